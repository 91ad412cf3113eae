"""A call with the arguments in question, as a sentence shows it beside the calls that others made
in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hangwatch.model.calls import Call, Signature
from hangwatch.model.groups import Group
from hangwatch.report.text import resolve_root_rank

_TensorShapes = tuple[tuple[tuple[int, ...], ...], bool]
_ARGUMENT_LABELS = {"dtype": "dtype", "reduce_op": "reduce op"}


def format_call_arguments(
    call: Call, differing_fields: Sequence[str], all_calls: Sequence[Call], group: Group
) -> str:
    """The operation, and what of it differs ``among`` the calls of all sides."""
    told = [
        text
        for name in differing_fields
        if (text := _format_argument(call.signature, name, [c.signature for c in all_calls], group))
    ]
    return f"{call.signature.op}({', '.join(told)})" if told else call.signature.op


def _format_argument(
    signature: Signature, name: str, all_signatures: list[Signature], group: Group
) -> str:
    if name == "shape":
        return _format_shape(signature, all_signatures)
    if name == "root":
        return f"root {resolve_root_rank(signature.root, group.ranks)}"
    if name == "splits" and signature.splits is not None:
        return (
            f"sending {list(signature.splits[0])}, expecting {list(signature.splits[1])} elements"
        )
    return (
        f"{_ARGUMENT_LABELS[name]} {getattr(signature, name)}"
        if name in _ARGUMENT_LABELS
        else str(signature.detail)
        if name == "detail"
        else ""
    )


def _format_shape(signature: Signature, all_signatures: list[Signature]) -> str:
    """That of a single tensor; of a list how long it is, and its first tensor that the calls differ
    in.
    """
    if all(len(other.shapes) <= 1 for other in all_signatures):
        return "shape " + " ".join(str(list(shape)) for shape in signature.shapes)
    told, whole = _list_tensor_shapes(signature)
    count = (
        f"{len(told)} tensor{'s' if len(told) != 1 else ''}"
        if whole
        else f"more than {len(told)} tensors"
    )
    lists = [_list_tensor_shapes(other) for other in all_signatures]
    at = _find_first_difference(lists)
    if at is None:
        return (
            count
            if any(whole for _, whole in lists)
            else f"{count}, of which the first {len(told)} agree"
        )
    return f"{count}, number {at + 1} of shape {list(told[at])}" if at < len(told) else count


def _list_tensor_shapes(signature: Signature) -> _TensorShapes:
    """Their shapes, and whether these are all. Of a list that was cut the last is empty, as is that
    of a scalar.
    """
    shapes = signature.shapes
    whole = not shapes or shapes[-1] != () or sum(map(math.prod, shapes)) == signature.numel
    return (shapes, True) if whole else (shapes[:-1], False)


def _find_first_difference(lists: list[_TensorShapes]) -> int | None:
    """By numbers of elements, as calls are compared: a view of another shape is legal."""
    for at in range(max(len(shapes) for shapes, _ in lists)):
        sizes = {
            math.prod(shapes[at]) if at < len(shapes) else None
            for shapes, whole in lists
            if whole or at < len(shapes)
        }
        if len(sizes) > 1:
            return at
    return None
