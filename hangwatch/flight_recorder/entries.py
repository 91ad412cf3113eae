"""The entries and tables of a Flight Recorder dump, as they are written: names, numbers and
tensors, ``pg_config`` with the members of groups, ``pg_status`` with the recorder's counts of
calls. Pure.

The functions raise TypeError, ValueError, KeyError or AttributeError for malformed data. Of a
call's arguments, only those that the recorder records and that must be equal on all ranks are
compared.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hangwatch.model.calls import Signature, with_agreement_hash
from hangwatch.model.groups import DeviceCounters, RankTuple
from hangwatch.model.operators import (
    FLIGHT_OPERATIONS,
    ListSide,
    MustMatch,
    OperatorSpec,
    OutputScale,
)

Shapes = tuple[tuple[int, ...], ...]
RawFields = Mapping[str, Any]  # the fields of an entry, as they are written

MAX_DUMP_RANKS = 1 << 17
# All groups of a dump together have no more. Several groups of a job may have all of its ranks.
_MAX_MEMBERS = 4 * MAX_DUMP_RANKS
_CHARS_OF_A_MEMBER = 8  # a member's length in the text of a large group
_MAX_TENSORS, _MAX_DIMENSIONS = 1 << 16, 64
_MAX_TEXT_CHARS = 4096

# The recorder's names of operations, where torch.distributed has another name.
_OP_NAMES = {name: spec.op for spec in FLIGHT_OPERATIONS.values() for name in spec.flight_names}
DTYPE_NAMES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8",
    "Byte": "uint8",
}  # fmt: skip
# The types of an absent tensor: a rank that is not the root of a gather or scatter has no list.
_NO_DTYPES = {"", "undefined"}
COALESCED_PATTERN = re.compile(r"^(coalesced|[A-Z_]+_coalesced)$")
PEER_PATTERN = re.compile(r"^(?P<op>send|recv) (?P<mine>\d{1,7})(?:->|<-)(?P<other>\d{1,7}|\?)$")
_UNKNOWN_OPERATOR = OperatorSpec(op="", tensors_arg="", must_match=MustMatch.NOTHING)


class TensorFields(NamedTuple):
    """The sizes and types of a call's inputs and outputs, unparsed."""

    inputs: Shapes
    outputs: Shapes
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """The sizes of a call's inputs and outputs."""

    tensors: tuple[int, int]  # the number of inputs, and of outputs
    elements: tuple[int, int]  # the elements of all inputs, and of all outputs
    is_single_call: bool  # false for several calls that were coalesced


@functools.lru_cache(maxsize=4096)  # equal signatures of all dumps are shared objects
def read_signature(
    names: tuple[str, ...], tensors: tuple[TensorFields, ...]
) -> tuple[Signature, TensorSizes]:
    """The signature of a call whose parts have these ``names`` and together these tensors."""
    inputs: Shapes = ()
    outputs: Shapes = ()
    dtypes = set()
    for part in tensors:
        inputs += tuple(tuple(map(parse_int, shape)) for shape in part.inputs)
        outputs += tuple(tuple(map(parse_int, shape)) for shape in part.outputs)
        for name in map(parse_text, (*part.input_dtypes, *part.output_dtypes)):
            dtypes.add(DTYPE_NAMES.get(name, name.lower()))
    channel = PEER_PATTERN.match(names[0])
    if channel:
        op = channel["op"]
    else:
        op_names = names
        if len(names) > 1 and names[-1] == "coalesced":
            op_names = names[:-1]
        elif COALESCED_PATTERN.match(names[-1]):
            op_names = names[-1:]
        ops = [_OP_NAMES.get(name, name) for name in op_names]
        op = "+".join(dict.fromkeys(ops))
    specs = [FLIGHT_OPERATIONS.get(part, _UNKNOWN_OPERATOR) for part in op.split("+")]
    # The arguments that must be equal and that the recorder records. Coalesced calls are compared
    # only if none has a list of tensors or is point-to-point.
    must_match = MustMatch.DTYPE | MustMatch.SHAPE
    if len(specs) == 1:
        must_match &= specs[0].must_match
    elif not all(map(_has_even_shapes, specs)):
        must_match = MustMatch.NOTHING
    shapes = _select_shapes(specs, inputs, outputs)
    shape_elements = tuple(map(math.prod, shapes))
    input_elements = tuple(map(math.prod, inputs))
    output_elements = tuple(map(math.prod, outputs))
    first = specs[0]
    has_splits = first.split_args and not first.is_rooted and len(inputs) > 1
    signature = Signature(
        op=op,
        shapes=shapes or outputs,
        dtype="/".join(sorted(dtypes - _NO_DTYPES)) or None,
        numel=sum(shape_elements),
        splits=(input_elements, output_elements) if has_splits else None,
    )
    sizes = TensorSizes(
        tensors=(len(inputs), len(outputs)),
        elements=(sum(input_elements), sum(output_elements)),
        is_single_call=len(names) == 1,
    )
    return with_agreement_hash(signature, must_match, shape_elements), sizes


def _has_even_shapes(spec: OperatorSpec) -> bool:
    """Whether the shapes of inputs and outputs are equal on all members."""
    return spec.compares_shapes and spec.list_side is None and not spec.is_p2p


def _select_shapes(specs: Sequence[OperatorSpec], inputs: Shapes, outputs: Shapes) -> Shapes:
    """The shapes that are shown and, if they must be equal, compared."""
    both = inputs if inputs == outputs else inputs + outputs
    if all(map(_has_even_shapes, specs)):
        return both
    if len(specs) > 1:
        return inputs
    (spec,) = specs
    if spec.p2p_role == "recv":
        return outputs
    if spec.list_side is None:
        return inputs
    is_output_listed = spec.list_side is ListSide.OUTPUTS
    if not spec.compares_shapes:  # only the root has the list
        return inputs if is_output_listed else outputs
    listed = outputs if is_output_listed else inputs
    has_uneven_shapes = len(set(map(math.prod, listed))) > 1
    return listed if has_uneven_shapes else both


def is_invalid_call(op: str, sizes: TensorSizes, member_count: int) -> bool:
    """Whether the sizes of inputs and outputs do not fit, whatever the other members called."""
    spec = FLIGHT_OPERATIONS.get(op, _UNKNOWN_OPERATOR)
    input_count, output_count = sizes.tensors
    sent, received = sizes.elements
    if not sizes.is_single_call or 0 in sizes.tensors:
        return False
    if spec.compares_shapes and spec.list_side is not None:
        listed_count = input_count if spec.list_side is ListSide.INPUTS else output_count
        if listed_count > 1:
            return listed_count != member_count
    if spec.output_scale is OutputScale.TIMES_MEMBERS:
        return received != sent * member_count
    if spec.output_scale is OutputScale.PER_MEMBER:
        return sent != received * member_count
    return spec.output_scale is OutputScale.SAME and sent != received


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One entry with its parsed identity. ``fields`` has all its fields, most of them unchecked."""

    record_id: int
    pg_id: str | None
    group: str
    description: str
    backend: str
    name: str
    is_p2p: bool
    seq: int
    fields: RawFields

    @classmethod
    def parse_entry(cls, fields: RawFields, index: int) -> FlightEntry:
        """The entry at ``index`` of a dump."""
        group, description = fields["process_group"]
        backend, _, name = parse_text(fields["profiling_name"]).rpartition(":")
        is_p2p = bool(fields.get("is_p2p")) or name.startswith(("send ", "recv "))
        seq_field = "p2p_seq_id" if is_p2p else "collective_seq_id"
        return cls(
            parse_int(fields.get("record_id", index)),
            str(parse_int(fields["pg_id"])) if "pg_id" in fields else None,
            parse_text(group),
            parse_text(description),
            backend,
            name,
            is_p2p,
            parse_int(fields[seq_field]),
            fields,
        )

    @property
    def is_coalesced_end(self) -> bool:
        """Whether the entry ends a coalesced call, and has the state of the whole call."""
        return bool(COALESCED_PATTERN.match(self.name))

    @property
    def created_ns(self) -> int:
        """The time of the call, in nanoseconds since the epoch; 0 if that is not recorded."""
        return parse_int(self.fields.get("time_created_ns") or 0)


def read_tensors(fields: RawFields) -> TensorFields:
    """The inputs and outputs of an entry. Raises ValueError if there are more than a call can have."""
    names = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
    inputs, outputs, input_dtypes, output_dtypes = (fields.get(name) or () for name in names)
    tensor_count = max(map(len, (inputs, outputs, input_dtypes, output_dtypes)))
    dimension_count = max(map(len, (*inputs, *outputs)), default=0)
    if tensor_count > _MAX_TENSORS or dimension_count > _MAX_DIMENSIONS:
        raise ValueError("more tensors, or more dimensions, than a call has")
    return TensorFields(
        tuple(map(tuple, inputs)),
        tuple(map(tuple, outputs)),
        _as_tuple(input_dtypes),
        _as_tuple(output_dtypes),
    )


def _as_tuple(dtypes: str | Sequence[str]) -> tuple[str, ...]:
    return (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)


def parse_groups(config: Any, default_names: Iterable[str]) -> dict[str, RankTuple]:
    """The members of the groups in ``pg_config`` by name; the default group may have several."""
    groups: dict[str, RankTuple] = {}
    total_chars = 0
    for key, fields in config.items():
        name = parse_text(key)
        value = fields["ranks"]
        # A few bytes of a pickle can stand for a long text or list many times.
        if isinstance(value, str):
            total_chars += len(value)
        elif isinstance(value, (list, tuple)):
            total_chars += len(value) * _CHARS_OF_A_MEMBER
        if total_chars > _MAX_MEMBERS * _CHARS_OF_A_MEMBER:
            raise ValueError("more members of groups than a process has")
        members = _parse_members(value) if isinstance(value, str) else _check_members(value)
        if members is None:
            continue
        if name:
            groups[name] = members
        else:  # gloo's table has a single entry without a name, for the default group
            groups = dict.fromkeys(default_names, members) | groups
    return groups


@functools.lru_cache(maxsize=256)  # equal lists in all dumps are parsed and held once
def _parse_members(text: str) -> RankTuple | None:
    return _check_members(json.loads(text))


def _check_members(ranks: Any) -> RankTuple | None:
    """The members; None if this is no list of them, or a list that is empty or too long."""
    is_list = isinstance(ranks, (list, tuple))
    if not is_list or not 0 < len(ranks) <= MAX_DUMP_RANKS:
        return None
    members = RankTuple(map(parse_int, ranks))
    has_duplicates = len(set(members)) < len(members)
    if has_duplicates or any(not 0 <= rank < MAX_DUMP_RANKS for rank in members):
        raise ValueError("the members of a group are not valid ranks")
    return members


def parse_statuses(
    table: Any,
    groups: Mapping[str, object],
    names_by_pg_id: Mapping[str, str],
    unreliable_names: set[str],
) -> dict[str, DeviceCounters]:
    """The statuses in ``pg_status``, which uses the recorder's numbers, by the names of their groups.

    Names and numbers both increase with each group that is made, and a group is in both tables once
    it has been used: if the tables have the same length, they correspond in this order. The default
    group, number 0 on every rank and named "0", may be in ``pg_config`` before it is used.
    """
    numbers, names = _sort_numbers(table), _sort_numbers(groups)
    if "0" not in numbers and "0" in names:
        names.remove("0")
    names_by_number = dict(names_by_pg_id)
    can_pair = len(names) == 1 or all(map(str.isdecimal, names))
    if len(numbers) == len(names) and can_pair:
        paired = dict(zip(numbers, names, strict=True))
        contradicts = any(paired.get(n, name) != name for n, name in names_by_pg_id.items())
        if not contradicts:
            names_by_number.update(paired)
    statuses = {}
    for key, fields in table.items():
        name = names_by_number.get(parse_text(key))
        if name is not None and name not in unreliable_names:
            started = parse_int(fields.get("last_started_collective", -1))
            statuses[name] = DeviceCounters(
                enqueued=parse_int(fields["last_enqueued_collective"]),
                started=started if started >= 0 else None,
                completed=parse_int(fields.get("last_completed_collective", -1)),
            )
    return statuses


def _sort_numbers(keys: Iterable[object]) -> list[str]:
    """Decimal numbers by value, without their conversion."""
    return sorted(map(parse_text, keys), key=lambda text: (len(text), text))


def parse_int(value: object) -> int:
    """An integer of up to 64 bits, also from text or a float. Raises TypeError or ValueError."""
    if (isinstance(value, str) and len(value) <= 20) or (
        isinstance(value, float) and value.is_integer()
    ):
        value = int(value)
    if not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} where a number should be")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a number of more than 64 bits")
    return value


def parse_text(value: object) -> str:
    """A string, truncated to 4,096 characters. Raises TypeError for other types."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where text should be")
    return value[:_MAX_TEXT_CHARS]
