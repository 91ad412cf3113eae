"""Lists in parts: ``?limit=`` and an ``?after=`` that names the last item that was seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query, Request

from . import schema
from .problems import Problem

T = TypeVar("T")
S = TypeVar("S")

Limit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
After = Annotated[str | None, Query(description="the cursor in the `next` of the answer before")]


def part(
    request: Request,
    rows: Sequence[S],
    key: Callable[[S], str],
    make: Callable[[S], T],
    limit: int,
    after: str | None,
) -> schema.Page[T]:
    """The part of ``rows`` behind the cursor. Only the items of that part are made. Raises Problem for a stale cursor."""
    start = 0
    if after is not None:
        at = next((i for i, row in enumerate(rows) if key(row) == after), None)
        if at is None:
            raise Problem(422, f"the list has no item {after!r} to go on after: start again without ?after=")
        start = at + 1
    chosen = rows[start : start + limit]
    more = start + limit < len(rows)
    url = request.url.include_query_params(after=key(chosen[-1]), limit=limit) if more else None
    return schema.Page(items=[make(row) for row in chosen], next=None if url is None else f"{url.path}?{url.query}")
