"""What the calls of a Flight Recorder say of their arguments, and what of that must agree on all ranks. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangwatch.model.calls import Signature
from hangwatch.model.operators import Agree
from hangwatch.model.signatures import with_agreement

Shapes = tuple[tuple[int, ...], ...]

# What the recorder calls by another name than torch.distributed does.
_NAMES = {
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
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8",
    "Byte": "uint8",
}  # fmt: skip
_NO_DTYPES = ("", "undefined")  # of a tensor that is not there: who is not the root of a gather or scatter has no list
COALESCED = re.compile(r"^(coalesced|[A-Z_]+_coalesced)$")
PEER = re.compile(r"^(?P<op>send|recv) (?P<mine>\d{1,7})(?:->|<-)(?P<other>\d{1,7}|\?)$")

_GATHERED = ("all_gather", "all_gather_v")  # the list of outputs is the same everywhere, even where the inputs are uneven
_SCATTERED = ("reduce_scatter", "reduce_scatter_v")  # likewise its inputs
_EVEN = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
    "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
)  # fmt: skip
_UNEVEN = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "gather", "scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many tensors and elements go in and come out. ``single``: of one call, not of several that were coalesced."""

    tensors: tuple[int, int]
    elements: tuple[int, int]
    single: bool = True


def read_signature(names: Sequence[str], inputs: Shapes, outputs: Shapes, dtypes: Iterable[str]) -> tuple[Signature, Sizes]:
    """Of a call whose parts have these ``names``, and these tensors together."""
    op = _op(names)
    even = set(op.split("+")) <= set(_EVEN)
    shapes = inputs
    if op in ("recv", "scatter") or (op in _GATHERED and _differ(outputs)):
        shapes = outputs
    elif even or op in _GATHERED or (op in _SCATTERED and not _differ(inputs)):
        shapes = inputs if inputs == outputs else inputs + outputs
    compared = even or op in (*_GATHERED, *_SCATTERED, "send", "recv")
    agree = Agree.DTYPE | Agree.SHAPE if compared else Agree.DTYPE if op in _UNEVEN else Agree.NOTHING
    signature = Signature(
        op=op,
        shapes=shapes or outputs,
        dtype="/".join(sorted(set(dtypes))) or None,
        numel=_numel(shapes),
        splits=(tuple(map(math.prod, inputs)), tuple(map(math.prod, outputs))) if op.startswith("all_to_all") and len(inputs) > 1 else None,
    )
    sizes = Sizes(tensors=(len(inputs), len(outputs)), elements=(_numel(inputs), _numel(outputs)), single=len(names) == 1)
    return with_agreement(signature, agree, tuple(map(math.prod, shapes))), sizes


def _op(names: Sequence[str]) -> str:
    if channel := PEER.match(names[0]):
        return channel["op"]
    if len(names) > 1 and names[-1] == "coalesced":
        names = names[:-1]
    elif COALESCED.match(names[-1]):
        names = names[-1:]
    return "+".join(dict.fromkeys(_NAMES.get(name, name) for name in names))


def unsound(op: str, sizes: Sizes, members: int) -> bool:
    """What goes into the call and what comes out of it cannot fit, whatever the others of its ``members`` do."""
    (given, taken), (sent, received) = sizes.tensors, sizes.elements
    if not sizes.single or not (given and taken):
        return False
    if op in _GATHERED and taken > 1:
        return taken != members
    if op in _SCATTERED and given > 1:
        return given != members
    if op.startswith("all_gather") and op != "all_gather_v":
        return received != sent * members
    if op.startswith("reduce_scatter") and op != "reduce_scatter_v":
        return sent != received * members
    return op in ("all_reduce", "all_reduce_coalesced") and sent != received


def dtype(name: str) -> str | None:
    """torch's name of a type; None where there is no tensor."""
    shown = _DTYPES.get(name, name.lower())
    return None if shown in _NO_DTYPES else shown


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _differ(shapes: Shapes) -> bool:
    return len(set(map(math.prod, shapes))) > 1
