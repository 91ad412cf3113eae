"""A call with the arguments in question, as a sentence shows it beside the calls that others made
in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hangwatch.model.calls import Call, Signature
from hangwatch.model.groups import Group
from hangwatch.report.text import resolve_root_rank

_Tensors = tuple[tuple[tuple[int, ...], ...], bool]
_PLAIN = {"dtype": "dtype", "reduce_op": "reduce op"}


def called(call: Call, fields: Sequence[str], among: Sequence[Call], group: Group) -> str:
    """The operation, and what of it differs ``among`` the calls of all sides."""
    told = [
        text
        for name in fields
        if (text := _argument(call.signature, name, [c.signature for c in among], group))
    ]
    return f"{call.signature.op}({', '.join(told)})" if told else call.signature.op


def _argument(signature: Signature, name: str, among: list[Signature], group: Group) -> str:
    if name == "shape":
        return _shape(signature, among)
    if name == "root":
        return f"root {resolve_root_rank(signature.root, group.ranks)}"
    if name == "splits" and signature.splits is not None:
        return (
            f"sending {list(signature.splits[0])}, expecting {list(signature.splits[1])} elements"
        )
    return (
        f"{_PLAIN[name]} {getattr(signature, name)}"
        if name in _PLAIN
        else str(signature.detail)
        if name == "detail"
        else ""
    )


def _shape(signature: Signature, among: list[Signature]) -> str:
    """That of a single tensor; of a list how long it is, and its first tensor that the calls differ
    in.
    """
    if all(len(other.shapes) <= 1 for other in among):
        return "shape " + " ".join(str(list(shape)) for shape in signature.shapes)
    told, whole = _tensors(signature)
    count = (
        f"{len(told)} tensor{'s' if len(told) != 1 else ''}"
        if whole
        else f"more than {len(told)} tensors"
    )
    lists = [_tensors(other) for other in among]
    at = _first_unlike(lists)
    if at is None:
        return (
            count
            if any(whole for _, whole in lists)
            else f"{count}, of which the first {len(told)} agree"
        )
    return f"{count}, number {at + 1} of shape {list(told[at])}" if at < len(told) else count


def _tensors(signature: Signature) -> _Tensors:
    """Their shapes, and whether these are all. Of a list that was cut the last is empty, as is that
    of a scalar.
    """
    shapes = signature.shapes
    whole = not shapes or shapes[-1] != () or sum(map(math.prod, shapes)) == signature.numel
    return (shapes, True) if whole else (shapes[:-1], False)


def _first_unlike(lists: list[_Tensors]) -> int | None:
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
