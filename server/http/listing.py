"""Lists in parts: ``?limit=`` and an ``?after=`` that names the last item that was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

from fastapi import Query, Request

from ..core.problems import Problem
from .schema import Page

T = TypeVar("T")
S = TypeVar("S")

MAX_MEMBERS_PER_PAGE = (
    1 << 18
)  # members of groups in one answer, or 1.5 MB: each of 100,000 ranks has them all in one group

PageLimit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
PageCursor = Annotated[
    str | None, Query(description="the cursor in the `next` of the answer before")
]


def build_page(
    request: Request,
    rows: Iterable[S],
    make_cursor: Callable[[S], str],
    make_item: Callable[[S], T],
    limit: int,
    after: str | None,
    count_members: Callable[[S], int] | None = None,
) -> Page[T]:
    """The part of ``rows`` behind the cursor, shorter than ``limit`` where by ``weigh`` its items
    hold more than `NUMBERS_MAX` in all. Only the items of that part are made. Raises Problem for a
    stale cursor.
    """
    remaining = iter(rows)
    if after is not None and not any(make_cursor(row) == after for row in remaining):
        raise Problem(
            422, f"the list has no item {after!r} to go on after: start again without ?after="
        )
    chosen: list[S] = []
    weight, more = 0, False
    for row in remaining:
        weight += count_members(row) if count_members is not None else 0
        if more := len(chosen) == limit or (bool(chosen) and weight > MAX_MEMBERS_PER_PAGE):
            break
        chosen.append(row)
    url = (
        request.url.include_query_params(after=make_cursor(chosen[-1]), limit=limit)
        if more
        else None
    )
    return Page(
        items=[make_item(row) for row in chosen],
        next=None if url is None else f"{url.path}?{url.query}",
    )
