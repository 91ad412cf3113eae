"""The table of ranks: filtered, sorted and cut into pages here, so that a browser never holds more
than one page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import RankState
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..monitor import views
from .board import STATE_CONCERN, AttemptOverview


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    rank: int
    state: RankState
    culprit: bool
    process: Process | None
    waiting_s: float | None
    last_seen_s: float | None

    @property
    def current_stream(self) -> CallStream | None:
        """The sequence that it waits in, or last made a call in."""
        collective_streams = (
            [s for s in self.process.streams.values() if s.kind is StreamKind.COLLECTIVE]
            if self.process
            else []
        )
        waiting = [s for s in collective_streams if s.is_pending]
        return max(waiting or collective_streams, key=lambda s: s.entered_at, default=None)


def build_row(overview: AttemptOverview, rank: int, now: float) -> RankRow:
    process = overview.attempt.processes.get(rank)
    return RankRow(
        rank=rank,
        state=overview.states[rank],
        culprit=rank in overview.culprits,
        process=process,
        waiting_s=views.compute_waiting_s(process, now) if process else None,
        last_seen_s=max(0.0, now - process.agent_seen_at) if process else None,
    )


def select_ranks(
    overview: AttemptOverview,
    now: float,
    *,
    state: RankState | None,
    group: str,
    query: str,
    sort: str,
) -> list[int]:
    """The ranks of a view, in its order; ``sort`` is a column, with ``-`` before it for the largest
    first.
    """
    ranks = [r for r, s in overview.states.items() if state is None or s is state]
    if group:
        ranks = [r for r in ranks if any(s.group.name == group for s in _list_streams(overview, r))]
    if query.strip():
        ranks = _match_ranks(overview, ranks, query.strip())
    column, largest_first = sort.removeprefix("-"), sort.startswith("-")
    if column == "rank":
        return ranks[::-1] if largest_first else ranks

    def sort_key(rank: int) -> float | str:
        process = overview.attempt.processes.get(rank)
        if column == "state":  # the worst first, and of these the culprits
            return -STATE_CONCERN[overview.states[rank]] - len(STATE_CONCERN) * (
                rank in overview.culprits
            )
        if process is None:
            return "" if column == "host" else -1.0
        if column == "host":
            return process.host
        if column == "step":
            return -1 if process.step is None else process.step
        return (
            (views.compute_waiting_s(process, now) or 0.0)
            if column == "waiting"
            else now - process.agent_seen_at
        )

    return sorted(ranks, key=sort_key, reverse=largest_first)


def _list_streams(overview: AttemptOverview, rank: int) -> Iterable[CallStream]:
    process = overview.attempt.processes.get(rank)
    return process.streams.values() if process else ()


def _match_ranks(overview: AttemptOverview, ranks: list[int], query: str) -> list[int]:
    """By rank where the query looks like ``0, 4-7``; else by a part of the host's name, the phase,
    the call or the group.
    """
    if (wanted := parse_rank_spans(query)) is not None:
        return filter_ranks(ranks, wanted)
    text = query.lower()

    def contains_text(rank: int) -> bool:
        process = overview.attempt.processes.get(rank)
        if process is None:
            return False
        searched_texts = [
            process.host,
            process.phase or "",
            *(f"{s.op} {s.group.desc}" for s in process.streams.values()),
        ]
        return any(text in one.lower() for one in searched_texts)

    return [r for r in ranks if contains_text(r)]


def parse_rank_spans(text: str) -> list[tuple[int, int]] | None:
    """Ranks as people write them, ``0, 4-7``; None for anything else.

    >>> spans("0, 4-7"), spans("node1")
    ([(0, 0), (4, 7)], None)
    """
    joined = re.sub(r"^ranks?\b|\s*(-)\s*", r"\1", text.strip())
    parts = [p for p in re.split(r"[\s,]+", joined) if p]
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", p) for p in parts):
        return None
    return [(int(p.partition("-")[0]), int(p.rpartition("-")[2])) for p in parts]


def filter_ranks(ranks: Iterable[int], spans: Iterable[tuple[int, int]] | None) -> list[int]:
    """Those of `ranks` that are in one of the spans; all of them where there are none given."""
    span_list = None if spans is None else list(spans)
    return [
        r
        for r in ranks
        if span_list is None or any(first <= r <= last for first, last in span_list)
    ]
