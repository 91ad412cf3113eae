"""The arguments of the calls in a Flight Recorder, and which of them must be equal on all ranks.
Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangwatch.model.calls import Signature
from hangwatch.model.operator_spec import ListSide, MustMatch, OperatorSpec, OutputScale, P2pRole
from hangwatch.model.operators import FLIGHT_OPERATIONS
from hangwatch.model.signatures import with_agreement_hash

Shapes = tuple[tuple[int, ...], ...]

# The recorder's names of operations, where torch.distributed has another name.
_OP_NAMES = {name: spec.op for spec in FLIGHT_OPERATIONS.values() for name in spec.flight_names}
_DTYPE_NAMES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8",
    "Byte": "uint8",
}  # fmt: skip
# Of an absent tensor: a rank that is not the root of a gather or scatter has no list.
_NO_DTYPES = ("", "undefined")
COALESCED_PATTERN = re.compile(r"^(coalesced|[A-Z_]+_coalesced)$")
PEER_PATTERN = re.compile(r"^(?P<op>send|recv) (?P<mine>\d{1,7})(?:->|<-)(?P<other>\d{1,7}|\?)$")

_UNKNOWN_OPERATOR = OperatorSpec(op="", tensors_arg="", must_match=MustMatch.NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """The sizes of a call's inputs and outputs."""

    tensors: tuple[int, int]  # the number of inputs, and of outputs
    elements: tuple[int, int]  # in all inputs, and in all outputs
    is_single_call: bool = True  # not several calls that were coalesced


def read_signature(
    names: Sequence[str], inputs: Shapes, outputs: Shapes, dtypes: Iterable[str]
) -> tuple[Signature, TensorSizes]:
    """The signature of a call whose parts have these ``names`` and together these tensors."""
    op = _resolve_op(names)
    specs = [_find_spec(part) for part in op.split("+")]
    must_match = _combine_must_match(specs)
    shapes = _select_shapes(specs, inputs, outputs)
    splits = None
    if specs[0].split_args and len(inputs) > 1:
        splits = (tuple(map(math.prod, inputs)), tuple(map(math.prod, outputs)))
    signature = Signature(
        op=op,
        shapes=shapes or outputs,
        dtype="/".join(sorted(set(dtypes))) or None,
        numel=_count_elements(shapes),
        splits=splits,
    )
    sizes = TensorSizes(
        tensors=(len(inputs), len(outputs)),
        elements=(_count_elements(inputs), _count_elements(outputs)),
        is_single_call=len(names) == 1,
    )
    return with_agreement_hash(signature, must_match, tuple(map(math.prod, shapes))), sizes


def _find_spec(op: str) -> OperatorSpec:
    return FLIGHT_OPERATIONS.get(op, _UNKNOWN_OPERATOR)


def _combine_must_match(specs: Sequence[OperatorSpec]) -> MustMatch:
    """The arguments that must be equal and that the recorder records. Coalesced calls are compared
    only if none has a list of tensors or is point-to-point.
    """
    if len(specs) == 1:
        return specs[0].must_match & (MustMatch.DTYPE | MustMatch.SHAPE)
    if all(map(_has_even_shapes, specs)):
        return MustMatch.DTYPE | MustMatch.SHAPE
    return MustMatch.NOTHING


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
    if spec.p2p_role is P2pRole.RECV:
        return outputs
    if spec.list_side is None:
        return inputs
    if not spec.compares_shapes:  # only the root has the list
        return outputs if spec.list_side is ListSide.INPUTS else inputs
    if spec.list_side is ListSide.OUTPUTS:
        return outputs if _has_uneven_shapes(outputs) else both
    return inputs if _has_uneven_shapes(inputs) else both


def _resolve_op(names: Sequence[str]) -> str:
    if channel := PEER_PATTERN.match(names[0]):
        return channel["op"]
    if len(names) > 1 and names[-1] == "coalesced":
        names = names[:-1]
    elif COALESCED_PATTERN.match(names[-1]):
        names = names[-1:]
    return "+".join(dict.fromkeys(_OP_NAMES.get(name, name) for name in names))


def is_invalid_call(op: str, sizes: TensorSizes, member_count: int) -> bool:
    """Whether the sizes of its inputs and outputs contradict each other, whatever the other members
    called.
    """
    spec = _find_spec(op)
    input_count, output_count = sizes.tensors
    sent, received = sizes.elements
    if not sizes.is_single_call or not (input_count and output_count):
        return False
    if spec.compares_shapes and spec.list_side is ListSide.OUTPUTS and output_count > 1:
        return output_count != member_count
    if spec.compares_shapes and spec.list_side is ListSide.INPUTS and input_count > 1:
        return input_count != member_count
    if spec.output_scale is OutputScale.TIMES_MEMBERS:
        return received != sent * member_count
    if spec.output_scale is OutputScale.PER_MEMBER:
        return sent != received * member_count
    return spec.output_scale is OutputScale.SAME and sent != received


def parse_dtype(name: str) -> str | None:
    """torch's name of a type; None if there is no tensor."""
    dtype = _DTYPE_NAMES.get(name, name.lower())
    return None if dtype in _NO_DTYPES else dtype


def _count_elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _has_uneven_shapes(shapes: Shapes) -> bool:
    return len(set(map(math.prod, shapes))) > 1
