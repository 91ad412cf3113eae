"""Which ranks a view shows, and in which order. Done on the server, so that a browser never holds
more than one page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel

from hangwatch.model.ranks import RankState

from .overview import AttemptOverview
from .paging import PageNumber
from .rank_columns import SORT_PATTERN, SORTABLE_COLUMNS, RankRow
from .serving import TextQuery

RankSpan = tuple[int, int]  # first and last


class RanksQuery(BaseModel):
    """The state of the view, as the address gives it. Empty texts select everything."""

    job: str = ""
    attempt: Annotated[int | None, Query(ge=0)] = None
    state: RankState | Literal[""] = ""
    group: str = ""
    q: TextQuery = ""
    # The key of a column, with ``-`` before it for the largest first.
    sort: Annotated[str, Query(pattern=SORT_PATTERN)] = "rank"
    view: Literal["ranks", "groups"] = "ranks"  # the table
    by: TextQuery = "host"  # what the map is divided by
    page: PageNumber = 1


def select_ranks(overview: AttemptOverview, now: float, query: RanksQuery) -> list[int]:
    """The ranks of a view, in its order. The text selects ranks if it looks like ``0, 4-7``; else
    those of which a text contains it.
    """

    def make_row(rank: int) -> RankRow:
        return RankRow(overview, rank, now)

    ranks = list(overview.states)
    if query.state:
        ranks = [rank for rank in ranks if overview.states[rank] is query.state]
    if query.group:
        ranks = [rank for rank in ranks if make_row(rank).is_in_group(query.group)]
    text = query.q.strip()
    spans = parse_rank_spans(text)
    if spans is not None:
        ranks = filter_ranks(ranks, spans)
    elif text:
        ranks = [rank for rank in ranks if make_row(rank).contains_text(text.lower())]
    key, is_reversed = query.sort.removeprefix("-"), query.sort.startswith("-")
    if key == "rank":  # their order already
        return ranks[::-1] if is_reversed else ranks
    column = SORTABLE_COLUMNS[key]
    order = {rank: column.sort_key(make_row(rank)) for rank in ranks}
    return sorted(ranks, key=order.__getitem__, reverse=is_reversed)


def parse_rank_spans(text: str) -> list[RankSpan] | None:
    """Ranks as people write them, ``0, 4-7``; None for anything else.

    >>> parse_rank_spans("0, 4-7"), parse_rank_spans("node1")
    ([(0, 0), (4, 7)], None)
    """
    joined = re.sub(r"^ranks?\b|\s*(-)\s*", r"\1", text.strip())
    parts = [part for part in re.split(r"[\s,]+", joined) if part]
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", part) for part in parts):
        return None
    return [(int(part.partition("-")[0]), int(part.rpartition("-")[2])) for part in parts]


def filter_ranks(ranks: Iterable[int], spans: Sequence[RankSpan] | None) -> list[int]:
    """The ranks that are in one of the spans; all of them if ``spans`` is None."""
    if spans is None:
        return list(ranks)
    return [rank for rank in ranks if any(first <= rank <= last for first, last in spans)]
