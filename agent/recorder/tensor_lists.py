"""The tensors in an operator's argument: a single one, a list, or a list of lists."""

from __future__ import annotations

from typing import Any

_COMPARED_PER_END = 32  # at either end of a longer list; its length always is


def find_first_tensor(tensors: Any) -> Any:
    """The first tensor; None for an empty list."""
    while type(tensors) is list:
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def flatten_tensors(tensors: Any) -> list[Any]:
    """All tensors, in order."""
    if type(tensors) is not list:
        return [tensors]
    return [tensor for part in tensors for tensor in flatten_tensors(part)]


def select_ends(flat: list[Any]) -> list[Any]:
    """The tensors of a list that are compared: all, or those at both ends of a long list."""
    if len(flat) <= 2 * _COMPARED_PER_END:
        return flat
    return flat[:_COMPARED_PER_END] + flat[-_COMPARED_PER_END:]


def list_shapes(tensors: list[Any]) -> tuple[Any, ...]:
    """The number of tensors, and the shapes of those that are compared."""
    flat = flatten_tensors(tensors)
    return (len(flat), *(tensor.shape for tensor in select_ends(flat)))


def count_numels(flat: list[Any]) -> tuple[int, ...]:
    """The number of tensors, and the element counts of those that are compared."""
    return (len(flat), *(tensor.numel() for tensor in select_ends(flat)))


def count_split_elements(tensor: Any, rows: list[int]) -> tuple[int, ...]:
    """The elements per member, from split sizes in rows of ``tensor``; one number for even splits."""
    if not rows:
        return (tensor.numel(),)
    elements_per_row = tensor.numel() // max(1, len(tensor))
    return tuple(row_count * elements_per_row for row_count in rows)


def count_bytes(tensor: Any) -> int:
    """The size in bytes; 0 for a sparse tensor, of which each member may send another number of
    values.
    """
    return 0 if tensor.is_sparse or tensor.is_sparse_csr else int(tensor.nbytes)
