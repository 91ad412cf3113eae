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
from .board import CONCERN, Board


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    rank: int
    state: RankState
    culprit: bool
    process: Process | None
    waiting_s: float | None
    heard_s: float | None

    @property
    def calls(self) -> CallStream | None:
        """The sequence that it waits in, or last made a call in."""
        mine = (
            [s for s in self.process.streams.values() if s.kind is StreamKind.COLLECTIVE]
            if self.process
            else []
        )
        waiting = [s for s in mine if s.is_pending]
        return max(waiting or mine, key=lambda s: s.entered_at, default=None)


def row(of: Board, rank: int, now: float) -> Row:
    process = of.attempt.processes.get(rank)
    return Row(
        rank=rank,
        state=of.states[rank],
        culprit=rank in of.culprits,
        process=process,
        waiting_s=views.waiting_s(process, now) if process else None,
        heard_s=max(0.0, now - process.agent_seen_at) if process else None,
    )


def chosen(
    of: Board, now: float, *, state: RankState | None, group: str, query: str, sort: str
) -> list[int]:
    """The ranks of a view, in its order; ``sort`` is a column, with ``-`` before it for the largest
    first.
    """
    ranks = [r for r, s in of.states.items() if state is None or s is state]
    if group:
        ranks = [r for r in ranks if any(s.group.name == group for s in _sequences(of, r))]
    if query.strip():
        ranks = _found(of, ranks, query.strip())
    column, largest_first = sort.removeprefix("-"), sort.startswith("-")
    if column == "rank":
        return ranks[::-1] if largest_first else ranks

    def value(rank: int) -> float | str:
        process = of.attempt.processes.get(rank)
        if column == "state":  # the worst first, and of these the culprits
            return -CONCERN[of.states[rank]] - len(CONCERN) * (rank in of.culprits)
        if process is None:
            return "" if column == "host" else -1.0
        if column == "host":
            return process.host
        if column == "step":
            return -1 if process.step is None else process.step
        return (
            (views.waiting_s(process, now) or 0.0)
            if column == "waiting"
            else now - process.agent_seen_at
        )

    return sorted(ranks, key=value, reverse=largest_first)


def _sequences(of: Board, rank: int) -> Iterable[CallStream]:
    process = of.attempt.processes.get(rank)
    return process.streams.values() if process else ()


def _found(of: Board, ranks: list[int], query: str) -> list[int]:
    """By rank where the query looks like ``0, 4-7``; else by a part of the host's name, the phase,
    the call or the group.
    """
    if (wanted := spans(query)) is not None:
        return within(ranks, wanted)
    text = query.lower()

    def holds(rank: int) -> bool:
        process = of.attempt.processes.get(rank)
        if process is None:
            return False
        told = [
            process.host,
            process.phase or "",
            *(f"{s.op} {s.group.desc}" for s in process.streams.values()),
        ]
        return any(text in one.lower() for one in told)

    return [r for r in ranks if holds(r)]


def spans(text: str) -> list[tuple[int, int]] | None:
    """Ranks as people write them, ``0, 4-7``; None for anything else.

    >>> spans("0, 4-7"), spans("node1")
    ([(0, 0), (4, 7)], None)
    """
    joined = re.sub(r"^ranks?\b|\s*(-)\s*", r"\1", text.strip())
    parts = [p for p in re.split(r"[\s,]+", joined) if p]
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", p) for p in parts):
        return None
    return [(int(p.partition("-")[0]), int(p.rpartition("-")[2])) for p in parts]


def within(ranks: Iterable[int], wanted: Iterable[tuple[int, int]] | None) -> list[int]:
    """Those of `ranks` that are in one of the spans; all of them where there are none given."""
    listed = None if wanted is None else list(wanted)
    return [r for r in ranks if listed is None or any(first <= r <= last for first, last in listed)]
