"""``/ranks``: the verdict, the map of all ranks, and the table of ranks or process groups.

The table of ranks derives from `RANK_COLUMNS`. A new column is an entry there, and a case in
`templates/_rank_cells.html` if its cells need markup. Ranks are filtered and sorted on the server,
so that a browser never holds more than one page.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel

from hangwatch.diagnosis.unexplained import describe_losses
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, pack_ranks
from hangwatch.model.incidents import Incident
from hangwatch.model.ranks import RankState, parse_rank_ranges
from hangwatch.report.text import format_coarse_age
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..core.job_views import JobView
from ..http.api import PageOf100
from ..http.app_state import AppState, State
from ..http.rendering import make_json_response, wants_json
from ..monitor import views
from ..performance.views import list_stragglers
from .serving import PageNumber, TextQuery, choose_shown_attempt, serve_page, slice_page

RANKS_PER_PAGE = 50
GROUPS_PER_PAGE = 50
UNKNOWN = "–"
MIN_SHOWN_WAIT_S = 1.0
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


def _get_overview(state: AppState, attempt: Attempt) -> AttemptOverview:
    return state.cache.get_or_compute(
        ("board", attempt.key), lambda: _build_overview(state, attempt)
    )


def _build_overview(state: AppState, attempt: Attempt) -> AttemptOverview:
    records = state.shared.incidents.list_open(attempt)
    shown_records = records or (
        state.shared.incidents.list_ended_with(attempt) if attempt.is_finished else []
    )
    last_states = state.watch.diagnoser.get_record(attempt).rank_states
    states = last_states or state.get_rank_states(attempt)
    counts = Counter(states.values())
    view = views.describe_job(attempt, counts, records, state.now())
    job, advice = state.add_summary(attempt, view)
    culprits = frozenset(rank for record in shown_records for rank in record.incident.culprits)
    worst_first = sorted(counts, key=lambda state: -STATE_CONCERN[state])
    return AttemptOverview(
        attempt=attempt,
        job=job,
        advice=advice,
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


def _build_map_layout(attempt: Attempt, by: str) -> dict[str, Any]:
    """The map in blocks by host, or by the process groups with the description ``by``. The blocks
    are JSON, a list of [label, packed ranks].
    """
    expected = views.list_expected_ranks(attempt)[:MAX_MAP_CELLS]
    groups = views.list_groups(attempt)
    descriptions = {group.desc for group, _ in groups}
    choices = ("host", *sorted(descriptions - {"", "host"})[:MAX_MAP_GROUPINGS])
    by = by if by in choices else "host"
    labels = dict.fromkeys(expected, "not reporting")
    for rank, process in attempt.processes.items():
        labels[rank] = process.host if by == "host" else f"not in {by}"
    for group, streams in reversed(groups):  # a rank of several groups is in the first
        if group.desc == by != "host":
            labels |= dict.fromkeys(streams, f"{by} {group.name}")
    blocks: dict[str, list[int]] = {}
    for rank in expected:
        blocks.setdefault(labels[rank], []).append(rank)
    packed_blocks = [[label, pack_ranks(ranks)] for label, ranks in blocks.items()]
    return {
        "ranks": pack_ranks(expected),
        "blocks": json.dumps(packed_blocks),
        "by": by,
        "choices": choices,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The members of a group that have entered the same number of its calls."""

    entered: int
    op: str  # the operation of the last call
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    group: Group
    positions: Sequence[GroupPosition]  # the most advanced first
    unreported_ranks: frozenset[int]  # members that have not reported the group


def _build_group_rows(attempt: Attempt) -> list[GroupRow]:
    """Groups whose members are at different positions come first, then large ones."""
    rows = []
    for group, streams in views.list_groups(attempt):
        ranks_by_entered: dict[int, list[int]] = {}
        for rank, stream in sorted(streams.items()):
            ranks_by_entered.setdefault(stream.entered, []).append(rank)
        positions = [
            GroupPosition(entered=entered, op=streams[ranks[0]].op, ranks=ranks)
            for entered, ranks in sorted(ranks_by_entered.items(), reverse=True)
        ]
        unreported_ranks = frozenset(group.ranks).difference(streams)
        rows.append(GroupRow(group=group, positions=positions, unreported_ranks=unreported_ranks))

    def sort_key(row: GroupRow) -> tuple[bool, int, str, str]:
        is_together = len(row.positions) < 2 and not row.unreported_ranks
        return is_together, -len(row.group.ranks), row.group.desc, row.group.name

    return sorted(rows, key=sort_key)


class RankRow(NamedTuple):
    """One rank at one moment. Facts are computed when a column needs them: a table is sorted and
    filtered with all ranks of a job, but shows one page.
    """

    overview: AttemptOverview
    rank: int
    now: float

    @property
    def process(self) -> Process | None:
        return self.overview.attempt.processes.get(self.rank)

    @property
    def state(self) -> RankState:
        return self.overview.states[self.rank]

    @property
    def is_culprit(self) -> bool:
        return self.rank in self.overview.culprits

    @property
    def waiting_s(self) -> float | None:
        """How long the rank has waited in its current call; 0 if it does not wait."""
        process = self.process
        if process is None:
            return None
        return views.compute_waiting_s(process, self.now) or 0.0

    @property
    def last_seen_s(self) -> float | None:
        """The age of the host's last heartbeat."""
        process = self.process
        return None if process is None else max(0.0, self.now - process.reports.agent_seen_at)

    @property
    def streams(self) -> Iterable[CallStream]:
        process = self.process
        return () if process is None else process.streams.values()

    def contains_text(self, text: str) -> bool:
        """Whether host, phase, a call or its group's description contain ``text`` in lower case."""
        process = self.process
        if process is None:
            return False
        phase = "" if process.phase is None else process.phase.name
        calls = (f"{stream.op} {stream.group.desc}" for stream in self.streams)
        return any(text in searched.lower() for searched in (process.host, phase, *calls))

    @property
    def current_stream(self) -> CallStream | None:
        """The stream of the group's call that the rank waits in, or of its last call; if the last call
        is old, the stream with the oldest call that a device has not completed, if any.
        """
        collective = [s for s in self.streams if s.kind is StreamKind.COLLECTIVE]
        pending = [s for s in collective if s.is_pending]
        newest = max(pending or collective, key=lambda s: s.entered_at, default=None)
        if newest is None or pending or self.now - newest.entered_at < MIN_SHOWN_WAIT_S:
            return newest
        behind = [s for s in collective if s.device is not None and s.device.is_behind_host]
        return min(behind, key=lambda s: s.entered_at, default=newest)

    @property
    def loss_text(self) -> str:
        """Which calls of the rank are not completely recorded; empty if all are."""
        return "; ".join(describe_losses(self.overview.attempt, (self.rank,)))

    @property
    def device_text(self) -> str:
        """How far the device is in the current stream's group; empty if that is not reported."""
        stream = self.current_stream
        if stream is None or stream.device is None:
            return ""
        device = stream.device
        began = "" if device.started is None else f"began {max(0, device.started)}, "
        return (
            f"device: {began}completed {max(0, device.completed)} of {max(0, device.enqueued)}"
            " queued"
        )


@dataclass(frozen=True, slots=True)
class RankColumn:
    """One column. ``text`` gives the cell's text; `templates/_rank_cells.html` may add markup."""

    key: str  # the column's name in ?sort=
    title: str
    get_value: Callable[[RankRow], float | str | None]  # None or empty: unknown
    format_value: Callable[[Any], str] = str
    get_order: Callable[[RankRow], float] | None = None  # None: sorted by the values
    is_sortable: bool = True
    is_largest_first: bool = False  # the order after the first click on the title
    css_class: str = ""  # "wide": hidden on a narrow screen; "number": aligned to the right

    def text(self, row: RankRow) -> str:
        value = self.get_value(row)
        return UNKNOWN if value is None or value == "" else self.format_value(value)

    def sort_key(self, row: RankRow) -> float | str:
        """Unknown numbers are smaller than all others."""
        value = self.get_value(row) if self.get_order is None else self.get_order(row)
        return -1.0 if value is None else value

    def toggle_sort(self, sort: str) -> str:
        """The value of ?sort= after a click on the title."""
        first, second = self.key, f"-{self.key}"
        if self.is_largest_first:
            first, second = second, first
        return second if sort == first else first

    def describe_order(self, sort: str) -> str:
        """The value of aria-sort: empty if the table is not sorted by this column."""
        if sort.removeprefix("-") != self.key:
            return ""
        return "descending" if sort.startswith("-") else "ascending"


RANK_COLUMNS = (
    RankColumn("rank", "Rank", lambda row: row.rank),
    RankColumn(
        "state",
        "State",
        lambda row: row.state.value,
        # The worst state first, and culprits before all others.
        get_order=lambda row: -STATE_CONCERN[row.state] - row.is_culprit * len(STATE_CONCERN),
    ),
    RankColumn(
        "host",
        "Host",
        lambda row: "" if row.process is None else row.process.host,
        css_class="wide",
    ),
    RankColumn(
        "step",
        "Step",
        lambda row: None if row.process is None else row.process.step,
        is_largest_first=True,
        css_class="wide number",
    ),
    RankColumn(
        "waiting",
        "Waiting",
        lambda row: row.waiting_s,
        lambda waited_s: format_coarse_age(waited_s) if waited_s >= MIN_SHOWN_WAIT_S else UNKNOWN,
        is_largest_first=True,
        css_class="number",
    ),
    RankColumn(
        "call",
        "Call",
        lambda row: None if (stream := row.current_stream) is None else stream.op,
        is_sortable=False,
        css_class="call",
    ),
    RankColumn(
        "last_seen",
        "Last seen",
        lambda row: row.last_seen_s,
        lambda age_s: format_coarse_age(age_s) + (" ago" if age_s >= 1 else ""),
        is_largest_first=True,
        css_class="wide number",
    ),
)
SORTABLE_COLUMNS = {column.key: column for column in RANK_COLUMNS if column.is_sortable}
SORT_PATTERN = f"^-?({'|'.join(SORTABLE_COLUMNS)})$"


class RanksQuery(BaseModel):
    """The state of the view, as the address gives it. Empty texts select everything."""

    job: str = ""
    attempt: Annotated[int | None, Query(ge=0)] = None
    state: RankState | Literal[""] = ""
    group: str = ""
    q: TextQuery = ""
    # The key of a column; ``-`` before it means the largest first.
    sort: Annotated[str, Query(pattern=SORT_PATTERN)] = "rank"
    view: Literal["ranks", "groups"] = "ranks"  # the table
    by: TextQuery = "host"  # what the map is divided by
    page: PageNumber = 1


routes = APIRouter(include_in_schema=False)


@routes.get("/")
async def redirect_home() -> Response:
    return RedirectResponse("/ranks", status_code=307)


@routes.get("/ranks")
async def show_ranks(
    state: State, request: Request, listed: PageOf100, query: Annotated[RanksQuery, Query()]
) -> Response:
    if not wants_json(request):
        return serve_page(state, request, "ranks.html", lambda: _build_page_values(state, query))
    attempt = choose_shown_attempt(state, query.job, query.attempt)
    now = state.now()
    if attempt is None:
        return make_json_response({"items": [], "next": None})
    overview = _get_overview(state, attempt)
    return listed.make_response(
        select_ranks(overview, now, query),
        str,
        lambda rank: views.describe_rank(attempt, rank, overview.states[rank], now),
    )


def _build_page_values(state: AppState, query: RanksQuery) -> dict[str, Any]:
    values = query.model_dump(mode="json")
    attempt = choose_shown_attempt(state, query.job, query.attempt)
    if attempt is None:
        start_values = {"overview": None, "url": state.base_url, "token": state.token is not None}
        return values | start_values
    overview = _get_overview(state, attempt)
    stragglers = list_stragglers(state.get_ranked_groups(attempt))
    layout = state.cache.get_or_compute(
        ("layout", attempt.key, query.by), lambda: _build_map_layout(attempt, query.by)
    )
    values |= {
        "overview": overview,
        "jobs": [a.job for a in state.list_latest_attempts()],
        "straggler": stragglers[0] if stragglers else None,
        "culprit_frames": {i.id: views.find_culprit_frame(i) for i in overview.incidents[:1]},
        "layout": layout,
    }
    if query.view == "groups":
        rows = state.cache.get_or_compute(
            ("groups", attempt.key), lambda: _build_group_rows(attempt)
        )
        return values | {"shown": slice_page(rows, query.page, GROUPS_PER_PAGE)}
    now = state.now()
    shown = slice_page(select_ranks(overview, now, query), query.page, RANKS_PER_PAGE)
    incident_ids = {}
    for incident in reversed(overview.incidents):  # the most severe one is the last to set a rank's
        incident_ids.update(dict.fromkeys(incident.waiting, incident.id))
        incident_ids.update(dict.fromkeys(incident.culprits, incident.id))
    return values | {
        "columns": RANK_COLUMNS,
        "shown": shown,
        "rows": [RankRow(overview, rank, now) for rank in shown.rows],
        "incident_ids": incident_ids,
    }


def select_ranks(overview: AttemptOverview, now: float, query: RanksQuery) -> list[int]:
    """The ranks of a view, in its order. A text like ``0, 4-7`` selects these ranks; any other text
    selects the ranks with a host, a phase or a call that contains it.
    """

    def make_row(rank: int) -> RankRow:
        return RankRow(overview, rank, now)

    ranks = list(overview.states)
    if query.state:
        ranks = [rank for rank in ranks if overview.states[rank] is query.state]
    if query.group:
        ranks = [
            rank
            for rank in ranks
            if any(stream.group.name == query.group for stream in make_row(rank).streams)
        ]
    text = query.q.strip()
    is_listed = parse_rank_filter(text)
    if is_listed is not None:
        ranks = [rank for rank in ranks if is_listed(rank)]
    elif text:
        ranks = [rank for rank in ranks if make_row(rank).contains_text(text.lower())]
    key = query.sort.removeprefix("-")
    is_reversed = query.sort.startswith("-")
    if key == "rank":  # the ranks are in this order
        return ranks[::-1] if is_reversed else ranks
    column = SORTABLE_COLUMNS[key]
    return sorted(ranks, key=lambda rank: column.sort_key(make_row(rank)), reverse=is_reversed)


def parse_rank_filter(text: str) -> Callable[[int], bool] | None:
    """Whether a rank is among those that people wrote as ``0, 4-7``; None for any other text.

    >>> is_listed = parse_rank_filter("0, 4-7")
    >>> [rank for rank in range(9) if is_listed(rank)], parse_rank_filter("node1")
    ([0, 4, 5, 6, 7], None)
    """
    listed = re.sub(r"^ranks?\b|\s*(-)\s*", r"\1", text.strip())
    try:
        ranges = parse_rank_ranges(",".join(listed.replace(",", " ").split()))
    except ValueError:
        return None
    return lambda rank: any(first <= rank <= last for first, last in ranges)
