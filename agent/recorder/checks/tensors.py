"""Looks into tensors, reading only: a checksum, a count of what is not finite, a few statistics.

CPU tensors only, whatever else the job uses: what lies on a device could be read only by waiting
for it. All of it is to be called `Unseen`: then no operator runs where the user's autograd,
autocast, dispatch or function modes could see it. None draws random numbers, and none makes a
temporary of more than `_PART` elements.
"""

from __future__ import annotations

import ctypes
import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any

_CHUNK_ELEMENTS = 1 << 18  # elements
_HALF_PRECISION_DTYPES = ("torch.float16", "torch.bfloat16")

FiniteStats = tuple[float, float, float, float]


def flatten_tensors(argument: Any) -> list[Any]:
    """All tensors of an operator's argument: one, a list, or a list of lists."""
    if isinstance(argument, (list, tuple)):
        return [t for part in argument for t in flatten_tensors(part)]
    return [argument]


def is_readable(tensor: Any) -> bool:
    """A plain tensor in the host's memory. Not what only looks like one, as while a graph is
    traced.
    """
    plain, strided = _get_plain_types()
    return (
        type(tensor) in plain and tensor.is_cpu and tensor.layout is strided and not tensor.is_quantized
        and not tensor.is_conj() and not tensor.is_neg() and not tensor._is_zerotensor()
    )  # fmt: skip


def compute_checksum(tensors: list[Any]) -> int | None:
    """CRC-32 over the bytes, one tensor after the other; None where some lie scattered, or there
    are none.

    Bit for bit: the sign of a zero and the bits of a NaN count, as what is compared is copies of
    the same bytes. A single flipped bit always tells.
    """
    total, size = 0, 0
    for tensor in tensors:
        if not is_readable(tensor) or not tensor.is_contiguous():
            return None
        count = tensor.numel() * tensor.element_size()
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        if count > held:  # its storage was freed, as sharding does between uses
            return None
        if count:
            total = zlib.crc32((ctypes.c_char * count).from_address(tensor.data_ptr()), total)
            size += count
    return total if size else None


class DispatchBypass:
    """Within it, operators go straight to their kernels: past autograd, autocast, tracing, and
    modes of the user's.
    """

    def __enter__(self) -> None:
        functions, keys, above = _get_guard_types()
        self._active_guards = (functions(), keys(above))
        for guard in self._active_guards:
            guard.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        for guard in reversed(self._active_guards):
            guard.__exit__(*exc_info)


def count_nonfinite(tensors: list[Any]) -> tuple[int, int]:
    """How many elements are NaN, and how many Inf.

    A sum is finite only if all that went into it is: one quick pass for the common case.
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
    import torch

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
    """In 16 bits, where sums overflow in everyday life."""
    return any(str(t.dtype) in _HALF_PRECISION_DTYPES for t in tensors)


def _clamp_to_finite(value: float) -> float:
    """JSON knows no Inf: the sum of float64s can be one."""
    return value if math.isfinite(value) else math.copysign(1.7976931348623157e308, value)


def _view_as_floating(tensor: Any) -> Any:
    """It as floating-point numbers; None where it cannot hold a NaN, or its kind of float can do
    too little.
    """
    import torch

    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else None


def _iter_chunks(tensor: Any) -> Iterator[Any]:
    """It in pieces, none of which needs a copy."""
    if tensor.numel() <= _CHUNK_ELEMENTS:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK_ELEMENTS)
    else:
        for row in (
            tensor.split(max(1, len(tensor) * _CHUNK_ELEMENTS // tensor.numel()))
            if len(tensor) > 1
            else tensor
        ):
            yield from _iter_chunks(row)


@functools.cache
def _get_plain_types() -> tuple[tuple[type, ...], Any]:
    import torch

    return (torch.Tensor, torch.nn.Parameter), torch.strided


@functools.cache
def _get_guard_types() -> tuple[Any, Any, Any]:
    import torch
    from torch._C import DispatchKey, _dispatch_keyset_full, _dispatch_keyset_full_after

    above = _dispatch_keyset_full() - _dispatch_keyset_full_after(DispatchKey.BackendSelect)
    return (
        torch._C.DisableTorchFunction,
        torch._C._ExcludeDispatchKeyGuard,
        above.remove(DispatchKey.BackendSelect),
    )  # it makes tensors
