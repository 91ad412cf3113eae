"""The columns of the table of ranks. Head, cells and sorting all derive from `RANK_COLUMNS`.

A new column is an entry of that list. If its cells need markup, `templates/_rank_cells.html` gets a
case for it; other cells show `RankColumn.text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import RankState
from hangwatch.report.text import format_coarse_age
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..monitor import rank_states
from .overview import STATE_CONCERN, AttemptOverview

UNKNOWN = "–"
MIN_SHOWN_WAIT_S = 1.0


class RankRow(NamedTuple):
    """One rank at one moment. The process is None for a rank that has not reported. Facts are
    computed when a column needs them: a table is sorted and filtered with all ranks of a job, but
    shows one page.
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
    def host(self) -> str:
        process = self.process
        return "" if process is None else process.host

    @property
    def step(self) -> int | None:
        process = self.process
        return None if process is None else process.step

    @property
    def waiting_s(self) -> float | None:
        """How long it has waited in its current call; 0 if it does not wait."""
        process = self.process
        if process is None:
            return None
        return rank_states.compute_waiting_s(process, self.now) or 0.0

    @property
    def last_seen_s(self) -> float | None:
        """The age of its host's last heartbeat."""
        process = self.process
        return None if process is None else max(0.0, self.now - process.reports.agent_seen_at)

    @property
    def streams(self) -> Iterable[CallStream]:
        process = self.process
        return () if process is None else process.streams.values()

    def is_in_group(self, name: str) -> bool:
        return any(stream.group.name == name for stream in self.streams)

    def contains_text(self, text: str) -> bool:
        """Whether its host, its phase, or one of its calls with the group's description contains
        ``text``, which is in lower case.
        """
        process = self.process
        if process is None:
            return False
        phase = "" if process.phase is None else process.phase.name
        calls = (f"{stream.op} {stream.group.desc}" for stream in self.streams)
        return any(text in searched.lower() for searched in (process.host, phase, *calls))

    @property
    def current_stream(self) -> CallStream | None:
        """The group's stream in which it waits, or else made its last call. If that was a while
        ago and its device is behind, the stream whose last call came first of those not completed.
        """
        collective = [s for s in self.streams if s.kind is StreamKind.COLLECTIVE]
        pending = [s for s in collective if s.is_pending]
        newest = max(pending or collective, key=lambda s: s.entered_at, default=None)
        if newest is None or pending or self.now - newest.entered_at < MIN_SHOWN_WAIT_S:
            return newest
        behind = [s for s in collective if s.device is not None and s.device.is_behind_host]
        return min(behind, key=lambda s: s.entered_at, default=newest)

    @property
    def device_text(self) -> str:
        """How far its device has come in that stream's group; empty if the backend does not report
        it.
        """
        stream = self.current_stream
        if stream is None or stream.device is None:
            return ""
        device = stream.device
        began = "" if device.started is None else f"began {max(0, device.started)}, "
        return (
            f"device: {began}completed {max(0, device.completed)} of {max(0, device.enqueued)}"
            " queued"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankColumn:
    """One column. ``text`` gives the cell's text; `templates/_rank_cells.html` may add markup."""

    key: str  # names the column in ?sort=
    title: str
    text: Callable[[RankRow], str]
    sort_key: Callable[[RankRow], float | str] | None = None  # None: not sortable
    is_largest_first: bool = False  # the order that the first click on its title gives
    css_class: str = ""  # "wide": hidden on a narrow screen; "number": aligned to the right

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


def _make_number_column(
    key: str,
    title: str,
    get_number: Callable[[RankRow], float | None],
    format_number: Callable[[float], str],
    css_class: str,
) -> RankColumn:
    """A column that is sorted by its numbers, the largest first; unknown numbers come last."""

    def format_cell(row: RankRow) -> str:
        number = get_number(row)
        return UNKNOWN if number is None else format_number(number)

    def get_order(row: RankRow) -> float:
        number = get_number(row)
        return -1.0 if number is None else number

    return RankColumn(
        key=key,
        title=title,
        text=format_cell,
        sort_key=get_order,
        is_largest_first=True,
        css_class=css_class,
    )


def _get_state_order(row: RankRow) -> float:
    """The worst state first, and culprits before all others."""
    concern = STATE_CONCERN[row.state]
    return -concern - len(STATE_CONCERN) if row.is_culprit else -concern


def _format_waiting(waiting_s: float) -> str:
    return format_coarse_age(waiting_s) if waiting_s >= MIN_SHOWN_WAIT_S else UNKNOWN


def _format_last_seen(age_s: float) -> str:
    text = format_coarse_age(age_s)
    return f"{text} ago" if age_s >= 1 else text


def _format_call(row: RankRow) -> str:
    stream = row.current_stream
    return stream.op if stream is not None and stream.op else UNKNOWN


RANK_COLUMNS = (
    RankColumn(
        key="rank", title="Rank", text=lambda row: str(row.rank), sort_key=lambda row: row.rank
    ),
    RankColumn(
        key="state", title="State", text=lambda row: row.state.value, sort_key=_get_state_order
    ),
    RankColumn(
        key="host",
        title="Host",
        text=lambda row: row.host or UNKNOWN,
        sort_key=lambda row: row.host,
        css_class="wide",
    ),
    _make_number_column("step", "Step", lambda row: row.step, str, "wide number"),
    _make_number_column("waiting", "Waiting", lambda row: row.waiting_s, _format_waiting, "number"),
    RankColumn(key="call", title="Call", text=_format_call, css_class="call"),
    # The key is public: saved addresses contain it.
    _make_number_column(
        "heard", "Last seen", lambda row: row.last_seen_s, _format_last_seen, "wide number"
    ),
)
SORTABLE_COLUMNS = {column.key: column for column in RANK_COLUMNS if column.sort_key is not None}
SORT_PATTERN = f"^-?({'|'.join(SORTABLE_COLUMNS)})$"
