"""Lists in parts: ``?limit=`` and an ``?after=`` that names the last item that was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

from fastapi import Query, Request

from ..core import schema
from ..core.problems import Problem

T = TypeVar("T")
S = TypeVar("S")

NUMBERS_MAX = (
    1 << 18
)  # members of groups in one answer, or 1.5 MB: each of 100,000 ranks has them all in one group

Limit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
After = Annotated[str | None, Query(description="the cursor in the `next` of the answer before")]


def part(
    request: Request,
    rows: Iterable[S],
    key: Callable[[S], str],
    make: Callable[[S], T],
    limit: int,
    after: str | None,
    weigh: Callable[[S], int] | None = None,
) -> schema.Page[T]:
    """The part of ``rows`` behind the cursor, shorter than ``limit`` where by ``weigh`` its items
    hold more than `NUMBERS_MAX` in all. Only the items of that part are made. Raises Problem for a
    stale cursor.
    """
    rest = iter(rows)
    if after is not None and not any(key(row) == after for row in rest):
        raise Problem(
            422, f"the list has no item {after!r} to go on after: start again without ?after="
        )
    chosen: list[S] = []
    weight, more = 0, False
    for row in rest:
        weight += weigh(row) if weigh is not None else 0
        if more := len(chosen) == limit or (bool(chosen) and weight > NUMBERS_MAX):
            break
        chosen.append(row)
    url = request.url.include_query_params(after=key(chosen[-1]), limit=limit) if more else None
    return schema.Page(
        items=[make(row) for row in chosen], next=None if url is None else f"{url.path}?{url.query}"
    )
