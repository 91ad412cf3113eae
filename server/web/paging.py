"""Pages of a long list on one address: ``?page=``, from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Query

PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBounds:
    """Where a page begins and ends: ``start`` is included, ``end`` is not."""

    number: int
    page_count: int
    start: int
    end: int
    row_count: int

    def slice_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        return rows[self.start : self.end]


def compute_page_bounds(row_count: int, number: int, page_size: int) -> PageBounds:
    """The bounds of page ``number``, or of the last page if there are fewer.

    >>> bounds = compute_page_bounds(230, 9, 100)
    >>> bounds.number, bounds.start, bounds.end
    (3, 200, 230)
    """
    page_count = max(1, -(-row_count // page_size))
    number = min(number, page_count)
    start = (number - 1) * page_size
    return PageBounds(
        number=number,
        page_count=page_count,
        start=start,
        end=min(row_count, start + page_size),
        row_count=row_count,
    )
