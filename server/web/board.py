"""What /ranks shows of one attempt of a job, worked out once for everybody who looks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import pack_ranks
from hangwatch.model.ranks import RankState
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core import schema
from ..http.app_state import Live
from ..monitor import views

CONCERN = {state: order for order, state in enumerate(RankState)}
MAP_MOST = 65_536  # cells
MAP_GROUPINGS = 8
# One letter for each state, as the map's script reads it; a culprit's is a capital.
LETTERS = {
    RankState.RUNNING: "r",
    RankState.EXITED: "x",
    RankState.STARTING: "i",
    RankState.WAITING: "w",
    RankState.SLOW: "l",
    RankState.MISSING: "m",
    RankState.LOST: "o",
    RankState.FROZEN: "f",
    RankState.STALLED: "s",
    RankState.DEAD: "d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    attempt: Attempt
    job: schema.Job
    advice: str
    states: Mapping[int, RankState]
    incidents: tuple[
        schema.Incident, ...
    ]  # the open ones, or those that the job ended with; the gravest and oldest first
    culprits: frozenset[int]
    counts: tuple[tuple[str, int], ...]
    cells: str  # a letter for each rank, run-length encoded


def board(live: Live, attempt: Attempt) -> Board:
    return live.memo.get(("board", attempt.job, attempt.number), lambda: _board(live, attempt))


def _board(live: Live, attempt: Attempt) -> Board:
    cases = live.watch.book.of(attempt)
    told = cases or (live.watch.book.ended_with(attempt) if attempt.is_finished else [])
    states = live.watch.states.get((attempt.job, attempt.number)) or live.states(attempt)
    job = live.described(attempt, views.job(attempt, Counter(states.values()), cases, live.now()))
    culprits = frozenset(rank for case in told for rank in case.incident.culprits)
    counts = Counter(states.values())
    return Board(
        attempt=attempt,
        job=job,
        advice=views.standing(attempt, job, live.settings.stall_after)[1],
        states=states,
        incidents=views.gravest_first(told),
        culprits=culprits,
        counts=tuple((s.value, counts[s]) for s in sorted(counts, key=lambda s: -CONCERN[s])),
        cells=cells(states, culprits),
    )


def cells(states: Mapping[int, RankState], culprits: frozenset[int]) -> str:
    """
    >>> cells({0: RankState.RUNNING, 1: RankState.RUNNING, 2: RankState.DEAD}, frozenset({2}))
    '2r1D'
    """
    letters = {rank: LETTERS[state] for rank, state in states.items()}
    for rank in culprits & letters.keys():
        letters[rank] = letters[rank].upper()
    return "".join(f"{sum(1 for _ in run)}{letter}" for letter, run in groupby(letters.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the map is divided. ``blocks`` is JSON: a list of [label, packed ranks]."""

    ranks: str
    blocks: str
    by: str
    choices: tuple[str, ...]


def layout(live: Live, attempt: Attempt, by: str) -> Layout:
    """The map by host, or by the process groups with one description."""
    return live.memo.get(("layout", attempt.job, attempt.number, by), lambda: _layout(attempt, by))


def _layout(attempt: Attempt, by: str) -> Layout:
    expected = views.expected(attempt)[:MAP_MOST]
    named = {
        s.group.desc
        for p in attempt.processes.values()
        for s in p.streams.values()
        if s.kind is StreamKind.COLLECTIVE
    }
    choices = ("host", *sorted(named - {"", "host"})[:MAP_GROUPINGS])
    by = by if by in choices else "host"
    blocks: dict[str, list[int]] = {}
    for rank in expected:
        blocks.setdefault(_block(attempt.processes.get(rank), by), []).append(rank)
    listed = [[label, pack_ranks(ranks)] for label, ranks in blocks.items()]
    return Layout(ranks=pack_ranks(expected), blocks=json.dumps(listed), by=by, choices=choices)


def _block(process: Process | None, by: str) -> str:
    if process is None:
        return "never heard of"
    if by == "host":
        return process.host
    mine = (
        s.group
        for s in process.streams.values()
        if s.kind is StreamKind.COLLECTIVE and s.group.desc == by
    )
    found = next(mine, None)
    return f"not in {by}" if found is None else f"{by} {found.name}"
