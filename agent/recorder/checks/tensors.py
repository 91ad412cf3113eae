"""Computes the checksum, the number of non-finite elements and statistics of a call's tensors.

Only CPU tensors are examined: reading from a device would mean waiting for it. Call the functions
within a `DispatchBypass`: then the user's autograd, autocast, dispatch and function modes see no
operator of ours. No function draws random numbers or creates a temporary of more than
`_CHUNK_ELEMENTS` elements.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_keyset_full, _dispatch_keyset_full_after

from ..calls import CallReader, flatten_tensors
from ..faults import Arguments
from ..groups import GroupTrack

_CHUNK_ELEMENTS = 1 << 18
# BackendSelect itself is not bypassed, because operators that create tensors need it.
_BYPASSED_KEYS = (
    _dispatch_keyset_full() - _dispatch_keyset_full_after(DispatchKey.BackendSelect)
).remove(DispatchKey.BackendSelect)
_HALF_PRECISION_DTYPES = ("torch.float16", "torch.bfloat16")
# The reduce ops whose result is non-finite if an input has an Inf: SUM, AVG, PRODUCT, PREMUL_SUM.
# Inputs of MIN and MAX may legally be Inf.
_SUMMING_OPS = frozenset({0, 1, 2, 8})

FiniteStats = tuple[float, float, float, float]


def is_readable(tensor: Any) -> bool:
    """Whether the tensor is a plain one in the host's memory, not a stand-in, as while tracing."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
        and tensor.layout is torch.strided and not tensor.is_quantized
        and not tensor.is_conj() and not tensor.is_neg() and not tensor._is_zerotensor()
    )  # fmt: skip


def compute_checksum(tensors: list[Any]) -> int | None:
    """CRC-32 of the bytes of all tensors in order; None for no bytes, or a non-contiguous tensor.

    The sign of a zero and the bits of a NaN count, because copies of the same bytes are compared. A
    single flipped bit always changes the checksum.
    """
    total, size = 0, 0
    for tensor in tensors:
        if not is_readable(tensor) or not tensor.is_contiguous():
            return None
        count = tensor.numel() * tensor.element_size()
        offset = tensor.storage_offset() * tensor.element_size()
        available = tensor.untyped_storage().nbytes() - offset
        if count > available:  # the storage was freed, as sharding does between uses
            return None
        if count:
            total = zlib.crc32((ctypes.c_char * count).from_address(tensor.data_ptr()), total)
            size += count
    return total if size else None


class DispatchBypass:
    """A context in which autograd, autocast, tracing and the user's modes see no operators."""

    def __enter__(self) -> None:
        self._active_guards: tuple[Any, ...] = (
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(_BYPASSED_KEYS),
        )
        for guard in self._active_guards:
            guard.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        for guard in reversed(self._active_guards):
            guard.__exit__(*exc_info)


def count_nonfinite(tensors: list[Any]) -> tuple[int, int]:
    """The numbers of elements that are NaN, and that are Inf.

    A sum is finite only if all elements are: in the common case, one quick pass is enough.
    """
    nan = inf = 0
    for tensor in filter(is_readable, tensors):
        if tensor.is_complex():
            numbers = torch.view_as_real(tensor)
        elif tensor.is_floating_point() and tensor.element_size() > 1:
            numbers = tensor
        else:  # its type has no NaN, or is an 8-bit float, which supports too few operators
            continue
        if not math.isfinite(numbers.sum().item()):
            for part in _iter_chunks(numbers):
                nan += int(part.isnan().sum().item())
                inf += int(part.isinf().sum().item())
    return nan, inf


def compute_stats(tensors: list[Any]) -> tuple[FiniteStats, int] | None:
    """(Mean, min, max and norm of the finite elements, number of others); None if there are none."""
    count = others = 0
    total = squares = 0.0
    low, high = math.inf, -math.inf
    for tensor in tensors:
        if not is_readable(tensor) or "float8" in str(tensor.dtype):
            continue
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for part in _iter_chunks(numbers):
            flat = part.double().flatten()
            finite = flat
            if not math.isfinite(flat.sum().item()):
                finite = flat[flat.isfinite()]
            others += flat.numel() - finite.numel()
            if finite.numel():
                count += finite.numel()
                total += finite.sum().item()
                squares += finite.dot(finite).item()
                low = min(low, finite.min().item())
                high = max(high, finite.max().item())
    if count:
        mean = _clamp_to_finite(total / count)
        norm = _clamp_to_finite(math.sqrt(squares))
        return (mean, low, high, norm), others
    return ((0.0, 0.0, 0.0, 0.0), others) if others else None


def has_half_precision(tensors: list[Any]) -> bool:
    """Whether any tensor has a 16-bit type, in which sums often overflow."""
    return any(str(t.dtype) in _HALF_PRECISION_DTYPES for t in tensors)


def _clamp_to_finite(value: float) -> float:
    """The value, or the largest float64 in place of Inf, which JSON does not have."""
    return value if math.isfinite(value) else math.copysign(1.7976931348623157e308, value)


def _iter_chunks(tensor: Any) -> Iterator[Any]:
    """Splits the tensor into chunks without copying it."""
    if tensor.numel() <= _CHUNK_ELEMENTS:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK_ELEMENTS)
    else:
        rows_per_chunk = max(1, len(tensor) * _CHUNK_ELEMENTS // tensor.numel())
        parts = tensor.split(rows_per_chunk) if len(tensor) > 1 else tensor
        for part in parts:
            yield from _iter_chunks(part)


class TensorArguments:
    """The arguments of one operator that hold a rank's input, and those that hold a result which
    must be equal on every rank, by their positions in the schema of this torch.
    """

    def __init__(self, reader: CallReader, schema: Any) -> None:
        spec = reader.spec
        indices = {argument.name: index for index, argument in enumerate(schema.arguments)}
        self.name = schema.name.partition("::")[2]
        self._reader = reader
        self.input_index = indices.get(spec.input_arg, -1)
        self.replicated_output_index = indices.get(spec.replicated_arg, -1)
        self.is_reduction = reader.reduce_op_index >= 0 and self.replicated_output_index >= 0

    def get_inputs(self, args: Arguments, track: GroupTrack) -> list[Any]:
        """The input tensors of this rank."""
        if self._reader.spec.root_is_source:
            group = track.group_ref()
            if group is None or group.rank() != args[self._reader.root_index]:
                return []
        return flatten_tensors(args[self.input_index])

    def has_summing_op(self, args: Arguments, caller: FrameType) -> bool:
        """Whether the call adds up or multiplies the inputs of the ranks."""
        if self._reader.reduce_op_index < 0:
            return False
        return self._reader.read_reduce_op(args, caller) in _SUMMING_OPS
