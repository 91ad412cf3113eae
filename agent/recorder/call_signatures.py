"""The signatures of one operator's calls, each interned in the ring once."""

from __future__ import annotations

from typing import Any

from hangwatch.model.calls import Signature
from hangwatch.model.operator_spec import MustMatch, OperatorSpec
from hangwatch.model.signatures import encode_signature, with_agreement_hash

from .tensor_lists import count_bytes, count_numels, flatten_tensors
from .writer import RingWriter

MAX_CACHED_CALLS = 4096  # different signatures of one operator
_MAX_SHAPES = 8  # tensors of a list whose shapes are kept
_REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

# (its number in the ring, the hash of what must agree, the size in bytes)
InternedSignature = tuple[int, int, int]


class SignatureCache:
    """By key: the interned signatures. The caller makes the key from all that is in a signature."""

    def __init__(self, spec: OperatorSpec) -> None:
        self._spec = spec
        self._has_tensors = bool(spec.tensors_arg) or spec.is_generic
        self.interned: dict[Any, InternedSignature] = {}

    def add_signature(
        self,
        key: Any,
        ring: RingWriter,
        tensors: Any,
        first: Any,
        reduce_op: int | None,
        root: int | None,
        splits: Any,
    ) -> InternedSignature:
        """Interns a signature that is new or was overwritten. ``first`` is the first tensor."""
        if len(self.interned) >= MAX_CACHED_CALLS:
            self.interned.clear()
        flat = flatten_tensors(tensors) if first is not None and self._has_tensors else []
        signature = self._build_signature(flat, first, reduce_op, root, splits)
        number = ring.intern_signature(encode_signature(signature))
        size = sum(count_bytes(tensor) for tensor in flat)
        entry = self.interned[key] = number, signature.agree, size
        return entry

    def _build_signature(
        self, flat: list[Any], first: Any, reduce_op: int | None, root: int | None, splits: Any
    ) -> Signature:
        numels = count_numels(flat)
        shapes = [tuple(tensor.shape) for tensor in flat[:_MAX_SHAPES]]
        if len(flat) > _MAX_SHAPES:
            shapes.append(())
        signature = Signature(
            op=self._spec.op,
            shapes=tuple(shapes),
            dtype=str(first.dtype).removeprefix("torch.") if flat else None,
            reduce_op=_name_reduce_op(reduce_op),
            root=root,
            splits=splits,
            numel=sum(numels[1:]),
        )
        must_match = self._spec.must_match
        if not flat:
            must_match &= ~(MustMatch.DTYPE | MustMatch.SHAPE)
        return with_agreement_hash(signature, must_match, numels)


def _name_reduce_op(number: int | None) -> str | None:
    if number is None or number >= len(_REDUCE_OPS):
        return None
    return _REDUCE_OPS[number].lower()
