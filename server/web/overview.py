"""What /ranks shows of one attempt as a whole: its state, its incidents, the map of all ranks, and
the table of process groups. Everything is computed once for all viewers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from hangwatch.model.groups import Group, pack_ranks
from hangwatch.model.incidents import Incident
from hangwatch.model.ranks import RankState
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from ..core.job_views import JobView
from ..http.app_state import AppState
from ..monitor import views

STATE_CONCERN = {state: order for order, state in enumerate(RankState)}
MAX_MAP_CELLS = 65_536
MAX_MAP_GROUPINGS = 8
# The letters that static/map.js reads; upper case for a culprit.
STATE_LETTERS = {
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
class AttemptOverview:
    attempt: Attempt
    job: JobView
    advice: str
    states: Mapping[int, RankState]
    # The open incidents, or those that the job ended with; the most severe and oldest first.
    incidents: tuple[Incident, ...]
    culprits: frozenset[int]
    counts: tuple[tuple[str, int], ...]  # ranks in each state, the worst state first
    cells: str  # the map: a letter for each rank, run-length encoded


def get_overview(state: AppState, attempt: Attempt) -> AttemptOverview:
    return state.cache.get_or_compute(
        ("board", attempt.key), lambda: _build_overview(state, attempt)
    )


def _build_overview(state: AppState, attempt: Attempt) -> AttemptOverview:
    records = state.shared.incidents.list_open(attempt)
    shown_records = records or (
        state.shared.incidents.list_ended_with(attempt) if attempt.is_finished else []
    )
    published = state.watch.publisher.attempts.get(attempt.key)
    last_states = {} if published is None else published.rank_states
    states = last_states or state.get_rank_states(attempt)
    counts = Counter(states.values())
    job = state.add_summary(attempt, views.describe_job(attempt, counts, records, state.now()))
    culprits = frozenset(rank for record in shown_records for rank in record.incident.culprits)
    worst_first = sorted(counts, key=lambda state: -STATE_CONCERN[state])
    return AttemptOverview(
        attempt=attempt,
        job=job,
        advice=state.describe_status(attempt, job)[1],
        states=states,
        incidents=views.sort_by_severity(shown_records),
        culprits=culprits,
        counts=tuple((state.value, counts[state]) for state in worst_first),
        cells=encode_cells(states, culprits),
    )


def encode_cells(states: Mapping[int, RankState], culprits: frozenset[int]) -> str:
    """The map's cells, run-length encoded.

    >>> encode_cells({0: RankState.RUNNING, 1: RankState.RUNNING, 2: RankState.DEAD}, frozenset({2}))
    '2r1D'
    """
    letters = {rank: STATE_LETTERS[state] for rank, state in states.items()}
    for rank in culprits & letters.keys():
        letters[rank] = letters[rank].upper()
    return "".join(f"{len(list(run))}{letter}" for letter, run in groupby(letters.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MapLayout:
    """How the map is divided into blocks."""

    ranks: str  # packed
    blocks: str  # JSON: a list of [label, packed ranks]
    by: str  # the one of the choices that applies
    choices: tuple[str, ...]


def get_map_layout(state: AppState, attempt: Attempt, by: str) -> MapLayout:
    """The map by host, or by the process groups with the description ``by``."""
    return state.cache.get_or_compute(
        ("layout", attempt.key, by), lambda: _build_map_layout(attempt, by)
    )


def _build_map_layout(attempt: Attempt, by: str) -> MapLayout:
    expected = views.list_expected_ranks(attempt)[:MAX_MAP_CELLS]
    groups = _list_group_streams(attempt)
    descriptions = {group.desc for group, _ in groups}
    choices = ("host", *sorted(descriptions - {"", "host"})[:MAX_MAP_GROUPINGS])
    by = by if by in choices else "host"
    labels = dict.fromkeys(expected, "not reporting")
    for rank, process in attempt.processes.items():
        labels[rank] = process.host if by == "host" else f"not in {by}"
    for group, streams in reversed(groups):  # a rank of several of these groups is in the first
        if group.desc == by != "host":
            labels |= dict.fromkeys(streams, f"{by} {group.name}")
    blocks: dict[str, list[int]] = {}
    for rank in expected:
        blocks.setdefault(labels[rank], []).append(rank)
    listed = [[label, pack_ranks(ranks)] for label, ranks in blocks.items()]
    return MapLayout(ranks=pack_ranks(expected), blocks=json.dumps(listed), by=by, choices=choices)


def _list_group_streams(attempt: Attempt) -> list[tuple[Group, Mapping[int, CallStream]]]:
    """Each process group, and its streams by member."""
    listed = [attempt.streams_by_group[key] for key in views.list_groups(attempt)]
    return [(next(iter(streams.values())).group, streams) for streams in listed]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The members of a group that have entered the same number of its calls."""

    entered: int
    op: str  # the operation of the last of these calls
    ranks: tuple[int, ...]
    behind: int  # calls behind the most advanced member


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    group: Group
    positions: tuple[GroupPosition, ...]  # the most advanced first
    unreported_ranks: frozenset[int]  # members that have not reported the group

    @property
    def sort_key(self) -> tuple[bool, int, str, str]:
        """Groups whose members are at different positions come first, then large ones."""
        is_together = len(self.positions) < 2 and not self.unreported_ranks
        return is_together, -len(self.group.ranks), self.group.desc, self.group.name


def get_group_rows(state: AppState, attempt: Attempt) -> list[GroupRow]:
    """The process groups, those whose members are at different positions first."""
    return state.cache.get_or_compute(
        ("groups", attempt.key),
        lambda: sorted(
            (_build_group_row(group, streams) for group, streams in _list_group_streams(attempt)),
            key=lambda row: row.sort_key,
        ),
    )


def _build_group_row(group: Group, streams: Mapping[int, CallStream]) -> GroupRow:
    ranks_by_entered: dict[int, list[int]] = {}
    for rank, stream in sorted(streams.items()):
        ranks_by_entered.setdefault(stream.entered, []).append(rank)
    most_advanced = max(ranks_by_entered)
    positions = tuple(
        GroupPosition(
            entered=entered,
            op=streams[ranks[0]].op,
            ranks=tuple(ranks),
            behind=most_advanced - entered,
        )
        for entered, ranks in sorted(ranks_by_entered.items(), reverse=True)
    )
    unreported_ranks = frozenset(group.ranks).difference(streams)
    return GroupRow(group=group, positions=positions, unreported_ranks=unreported_ranks)
