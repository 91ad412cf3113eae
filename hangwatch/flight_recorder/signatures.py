"""What the calls of a Flight Recorder say of their arguments, and what of that must agree on all
ranks. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangwatch.model.calls import Signature
from hangwatch.model.operators import MustMatch
from hangwatch.model.signatures import with_agreement_hash

Shapes = tuple[tuple[int, ...], ...]

# What the recorder calls by another name than torch.distributed does.
_OP_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_reduce_barrier": "barrier",
    "ALLGATHER_coalesced": "all_gather",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "ALLREDUCE_coalesced": "all_reduce",
    "BROADCAST_coalesced": "broadcast",
}
_DTYPE_NAMES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8",
    "Byte": "uint8",
}  # fmt: skip
_NO_DTYPES = (
    "",
    "undefined",
)  # of a tensor that is not there: who is not the root of a gather or scatter has no list
COALESCED_PATTERN = re.compile(r"^(coalesced|[A-Z_]+_coalesced)$")
PEER_PATTERN = re.compile(r"^(?P<op>send|recv) (?P<mine>\d{1,7})(?:->|<-)(?P<other>\d{1,7}|\?)$")

_GATHER_LIST_OPS = (
    "all_gather",
    "all_gather_v",
)  # the list of outputs is the same everywhere, even where the inputs are uneven
_SCATTER_LIST_OPS = ("reduce_scatter", "reduce_scatter_v")  # likewise its inputs
_EVEN_OPS = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
    "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
)  # fmt: skip
_UNEVEN_OPS = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "gather", "scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """How many tensors and elements go in and come out. ``single``: of one call, not of several
    that were coalesced.
    """

    tensors: tuple[int, int]
    elements: tuple[int, int]
    is_single_call: bool = True


def read_signature(
    names: Sequence[str], inputs: Shapes, outputs: Shapes, dtypes: Iterable[str]
) -> tuple[Signature, TensorSizes]:
    """Of a call whose parts have these ``names``, and these tensors together."""
    op = _resolve_op(names)
    even = set(op.split("+")) <= set(_EVEN_OPS)
    shapes = inputs
    if op in ("recv", "scatter") or (op in _GATHER_LIST_OPS and _has_uneven_shapes(outputs)):
        shapes = outputs
    elif (
        even
        or op in _GATHER_LIST_OPS
        or (op in _SCATTER_LIST_OPS and not _has_uneven_shapes(inputs))
    ):
        shapes = inputs if inputs == outputs else inputs + outputs
    compared = even or op in (*_GATHER_LIST_OPS, *_SCATTER_LIST_OPS, "send", "recv")
    agree = (
        MustMatch.DTYPE | MustMatch.SHAPE
        if compared
        else MustMatch.DTYPE
        if op in _UNEVEN_OPS
        else MustMatch.NOTHING
    )
    signature = Signature(
        op=op,
        shapes=shapes or outputs,
        dtype="/".join(sorted(set(dtypes))) or None,
        numel=_count_elements(shapes),
        splits=(
            (tuple(map(math.prod, inputs)), tuple(map(math.prod, outputs)))
            if op.startswith("all_to_all") and len(inputs) > 1
            else None
        ),
    )
    sizes = TensorSizes(
        tensors=(len(inputs), len(outputs)),
        elements=(_count_elements(inputs), _count_elements(outputs)),
        is_single_call=len(names) == 1,
    )
    return with_agreement_hash(signature, agree, tuple(map(math.prod, shapes))), sizes


def _resolve_op(names: Sequence[str]) -> str:
    if channel := PEER_PATTERN.match(names[0]):
        return channel["op"]
    if len(names) > 1 and names[-1] == "coalesced":
        names = names[:-1]
    elif COALESCED_PATTERN.match(names[-1]):
        names = names[-1:]
    return "+".join(dict.fromkeys(_OP_NAMES.get(name, name) for name in names))


def is_invalid_call(op: str, sizes: TensorSizes, member_count: int) -> bool:
    """What goes into the call and what comes out of it cannot fit, whatever the others of its
    ``members`` do.
    """
    (given, taken), (sent, received) = sizes.tensors, sizes.elements
    if not sizes.is_single_call or not (given and taken):
        return False
    if op in _GATHER_LIST_OPS and taken > 1:
        return taken != member_count
    if op in _SCATTER_LIST_OPS and given > 1:
        return given != member_count
    if op.startswith("all_gather") and op != "all_gather_v":
        return received != sent * member_count
    if op.startswith("reduce_scatter") and op != "reduce_scatter_v":
        return sent != received * member_count
    return op in ("all_reduce", "all_reduce_coalesced") and sent != received


def parse_dtype(name: str) -> str | None:
    """torch's name of a type; None where there is no tensor."""
    shown = _DTYPE_NAMES.get(name, name.lower())
    return None if shown in _NO_DTYPES else shown


def _count_elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _has_uneven_shapes(shapes: Shapes) -> bool:
    return len(set(map(math.prod, shapes))) > 1
