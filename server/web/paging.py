"""Pages of a long list on one address: ``?page=``, from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from fastapi import Query

PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPage(Generic[Row]):
    """One page of a list of ``row_count`` rows. ``start`` of them are on the pages before it."""

    rows: Sequence[Row]
    number: int
    page_count: int
    start: int
    row_count: int


def slice_page(rows: Sequence[Row], number: int, page_size: int) -> RowPage[Row]:
    """Page ``number`` of the rows, or the last page if there are fewer.

    >>> page = slice_page(range(230), 9, 100)
    >>> page.number, page.rows
    (3, range(200, 230))
    """
    page_count = max(1, -(-len(rows) // page_size))
    number = min(number, page_count)
    start = (number - 1) * page_size
    return RowPage(
        rows=rows[start : start + page_size],
        number=number,
        page_count=page_count,
        start=start,
        row_count=len(rows),
    )
