"""Formats a call with the arguments in question, to compare it with the calls that other ranks made
at the same position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hangwatch.model.calls import Call, Signature
from hangwatch.model.groups import Group
from hangwatch.report.text import resolve_root_rank

_TensorShapes = tuple[tuple[tuple[int, ...], ...], bool]  # the known shapes, and whether all are
_ARGUMENT_LABELS = {"dtype": "dtype", "reduce_op": "reduce op"}


def format_call_arguments(
    call: Call, differing_fields: Sequence[str], all_calls: Sequence[Call], group: Group
) -> str:
    """The operation with the arguments that differ between ``all_calls``."""
    all_signatures = [other.signature for other in all_calls]
    arguments = [
        _format_argument(call.signature, name, all_signatures, group) for name in differing_fields
    ]
    shown = [argument for argument in arguments if argument]
    return f"{call.signature.op}({', '.join(shown)})" if shown else call.signature.op


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
    if name in _ARGUMENT_LABELS:
        return f"{_ARGUMENT_LABELS[name]} {getattr(signature, name)}"
    return str(signature.detail) if name == "detail" else ""


def _format_shape(signature: Signature, all_signatures: list[Signature]) -> str:
    """The shape of a single tensor; of a list, its length and the first tensor whose size differs
    between the calls.
    """
    if all(len(other.shapes) <= 1 for other in all_signatures):
        return "shape " + " ".join(str(list(shape)) for shape in signature.shapes)
    shapes, is_complete = _list_tensor_shapes(signature)
    if is_complete:
        count = f"{len(shapes)} tensor{'s' if len(shapes) != 1 else ''}"
    else:
        count = f"more than {len(shapes)} tensors"
    lists = [_list_tensor_shapes(other) for other in all_signatures]
    index = _find_first_difference(lists)
    if index is not None:
        if index >= len(shapes):
            return count
        return f"{count}, number {index + 1} of shape {list(shapes[index])}"
    if any(is_other_complete for _, is_other_complete in lists):
        return count
    return f"{count}, of which the first {len(shapes)} agree"


def _list_tensor_shapes(signature: Signature) -> _TensorShapes:
    """The known shapes, and whether these are all. The last shape of a truncated list is empty, like
    that of a scalar.
    """
    shapes = signature.shapes
    if not shapes or shapes[-1] != () or sum(map(math.prod, shapes)) == signature.numel:
        return shapes, True
    return shapes[:-1], False


def _find_first_difference(lists: list[_TensorShapes]) -> int | None:
    """The index of the first tensor whose number of elements differs. Calls are compared by these,
    since a view with another shape is allowed.
    """
    for index in range(max(len(shapes) for shapes, _ in lists)):
        sizes: set[int | None] = set()
        for shapes, is_complete in lists:
            if index < len(shapes):
                sizes.add(math.prod(shapes[index]))
            elif is_complete:
                sizes.add(None)
        if len(sizes) > 1:
            return index
    return None
