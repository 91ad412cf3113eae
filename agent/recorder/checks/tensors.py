"""Examines the tensors of a call without changing them: a checksum, the number of non-finite
elements, statistics.

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
    """Whether the tensor is a plain one in the host's memory, rather than a stand-in for one, such
    as while a graph is traced.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
        and tensor.layout is torch.strided and not tensor.is_quantized
        and not tensor.is_conj() and not tensor.is_neg() and not tensor._is_zerotensor()
    )  # fmt: skip


def compute_checksum(tensors: list[Any]) -> int | None:
    """CRC-32 over the bytes of all tensors in order; None if one is not contiguous, or there are no
    bytes.

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
    """A context in which operators go directly to their kernels, bypassing autograd, autocast,
    tracing and the user's modes.
    """

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
    """The number of elements that are NaN, and of those that are Inf.

    A sum is finite only if all elements are: in the common case, one quick pass is enough.
    """
    nan = inf = 0
    for tensor in tensors:
        if (
            is_readable(tensor)
            and (parts := _view_as_floating(tensor)) is not None
            and not math.isfinite(parts.sum().item())
        ):
            for part in _iter_chunks(parts):
                nan += int(part.isnan().sum().item())
                inf += int(part.isinf().sum().item())
    return nan, inf


def compute_stats(tensors: list[Any]) -> tuple[FiniteStats, int] | None:
    """Mean, min, max and norm of the finite elements, and the number of the others; None without
    elements.
    """
    count = others = 0
    total = squares = 0.0
    low, high = math.inf, -math.inf
    for tensor in tensors:
        if not is_readable(tensor) or "float8" in str(tensor.dtype):
            continue
        for part in _iter_chunks(torch.view_as_real(tensor) if tensor.is_complex() else tensor):
            flat = part.double().flatten()
            finite = flat if math.isfinite(flat.sum().item()) else flat[flat.isfinite()]
            others += flat.numel() - finite.numel()
            if finite.numel():
                count += finite.numel()
                total += finite.sum().item()
                squares += finite.dot(finite).item()
                low, high = min(low, finite.min().item()), max(high, finite.max().item())
    if not count and not others:
        return None
    if not count:
        return (0.0, 0.0, 0.0, 0.0), others
    return (
        _clamp_to_finite(total / count),
        low,
        high,
        _clamp_to_finite(math.sqrt(squares)),
    ), others


def has_half_precision(tensors: list[Any]) -> bool:
    """Whether any tensor has a 16-bit type, in which sums often overflow."""
    return any(str(t.dtype) in _HALF_PRECISION_DTYPES for t in tensors)


def _clamp_to_finite(value: float) -> float:
    """The value, or the largest float64 in place of Inf, which the sum of float64 values can be and
    JSON does not have.
    """
    return value if math.isfinite(value) else math.copysign(1.7976931348623157e308, value)


def _view_as_floating(tensor: Any) -> Any:
    """The tensor as floating-point numbers; None if its type has no NaN, or is an 8-bit float,
    which supports too few operators.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else None


def _iter_chunks(tensor: Any) -> Iterator[Any]:
    """Splits the tensor into chunks without copying it."""
    if tensor.numel() <= _CHUNK_ELEMENTS:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK_ELEMENTS)
    else:
        rows_per_chunk = max(1, len(tensor) * _CHUNK_ELEMENTS // tensor.numel())
        for part in tensor.split(rows_per_chunk) if len(tensor) > 1 else tensor:
            yield from _iter_chunks(part)


class TensorArguments:
    """The arguments of one operator that hold a rank's input, and those that hold a result which
    must be equal on every rank, by their positions in the schema of this torch.
    """

    def __init__(self, reader: CallReader, schema: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        self.name = schema.name.partition("::")[2]
        self._reader = reader
        spec = reader.spec
        self._input_index = names.index(spec.input_arg) if spec.input_arg in names else -1
        self.replicated_output_index = (
            names.index(spec.replicated_arg) if spec.replicated_arg in names else -1
        )
        self.is_reduction = reader.reduce_op_index >= 0 and self.replicated_output_index >= 0
        self._root_is_source = spec.root_is_source

    @property
    def is_examined(self) -> bool:
        return self._input_index >= 0

    def get_inputs(self, args: tuple[Any, ...], track: GroupTrack) -> list[Any]:
        """The input tensors of this rank."""
        if self._root_is_source and (
            (group := track.group_ref()) is None or group.rank() != args[self._reader.root_index]
        ):
            return []
        return flatten_tensors(args[self._input_index])

    def has_summing_op(self, args: tuple[Any, ...], caller: FrameType) -> bool:
        """Whether the call adds up or multiplies the inputs of the ranks."""
        if self._reader.reduce_op_index < 0:
            return False
        return self._reader.read_reduce_op(args, caller) in _SUMMING_OPS
