"""Lists in pages: ``?limit=``, and ``?after=`` with the cursor of the last item of the previous page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

from fastapi import Query, Request

from ..core.problems import Problem
from .schema import Page

T = TypeVar("T")
S = TypeVar("S")

# Members of groups in one response, or 1.5 MB: a group of 100,000 ranks repeats all of them for each
# rank.
MAX_MEMBERS_PER_PAGE = 1 << 18

PageLimit = Annotated[
    int, Query(ge=1, le=10_000, description="maximum number of items in one response")
]
PageCursor = Annotated[
    str | None, Query(description="the cursor in `next` of the previous response")
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
    """The page of ``rows`` after the cursor. It is shorter than ``limit`` if its items would have more
    than `MAX_MEMBERS_PER_PAGE` members by ``count_members``. Only the items of the page are built.
    Raises Problem for a stale cursor.
    """
    remaining = iter(rows)
    if after is not None and not any(make_cursor(row) == after for row in remaining):
        raise Problem(
            422, f"the list has no item {after!r} to continue after: start again without ?after="
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
