"""Which ranks a view shows, and in which order. Done on the server, so that a browser never holds
more than one page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangwatch.model.ranks import RankState

from .overview import AttemptOverview
from .rank_columns import RANK_COLUMNS, SORTABLE_COLUMNS, RankRow

RankSpan = tuple[int, int]  # first and last


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFilter:
    """The view's state: ``sort`` is the key of a column, with ``-`` before it for the largest
    first. Empty texts select everything.
    """

    state: RankState | None = None
    group: str = ""
    query: str = ""
    sort: str = "rank"


def select_ranks(overview: AttemptOverview, now: float, rank_filter: RankFilter) -> list[int]:
    """The ranks of a view, in its order."""
    ranks = list(overview.states)
    if rank_filter.state is not None:
        ranks = [rank for rank in ranks if overview.states[rank] is rank_filter.state]
    if rank_filter.group:
        ranks = [r for r in ranks if _is_in_group(RankRow(overview, r, now), rank_filter.group)]
    query = rank_filter.query.strip()
    if query:
        ranks = _match_query(overview, now, ranks, query)
    return _sort_ranks(overview, now, ranks, rank_filter.sort)


def _is_in_group(row: RankRow, group: str) -> bool:
    return any(stream.group.name == group for stream in row.streams)


def _match_query(
    overview: AttemptOverview, now: float, ranks: Sequence[int], query: str
) -> list[int]:
    """Selects by rank if the query looks like ``0, 4-7``, else by a part of a column's text."""
    spans = parse_rank_spans(query)
    if spans is not None:
        return filter_ranks(ranks, spans)
    text = query.lower()
    return [r for r in ranks if _contains_text(RankRow(overview, r, now), text)]


def _contains_text(row: RankRow, text: str) -> bool:
    for column in RANK_COLUMNS:
        if column.filter_texts is None:
            continue
        if any(text in searched.lower() for searched in column.filter_texts(row)):
            return True
    return False


def _sort_ranks(overview: AttemptOverview, now: float, ranks: list[int], sort: str) -> list[int]:
    key, is_reversed = sort.removeprefix("-"), sort.startswith("-")
    if key == "rank":  # their order already
        return ranks[::-1] if is_reversed else ranks
    sort_key = SORTABLE_COLUMNS[key].sort_key
    assert sort_key is not None
    order = {rank: sort_key(RankRow(overview, rank, now)) for rank in ranks}
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
