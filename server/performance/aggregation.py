"""What node agents tell of how calls perform, added up by process group. Everything kept is
bounded, whatever the size of the job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.operators import OPERATIONS
from hangwatch.performance import stragglers
from hangwatch.performance.distributions import (
    MAX_DURATION_US,
    MUTUAL_WAIT_OPS,
    DurationHistogram,
    are_valid_counts,
)
from hangwatch.performance.stragglers import Arrival, CallSkew, LatenessStats
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

GROUPS_KEPT = 2048  # of an attempt
ROWS_KEPT = 96  # operations and size classes of a group
SERIES_KEPT = 12  # operations of a group of which the course is kept
JUDGED_KEPT = 256  # calls of a group
WAITING_KEPT = 1 << 16  # arrivals of a group's calls that not all members have told of yet
FEWEST_WAITING = 8  # calls
WAITS_KEPT = 32  # of a call, about
# calls at most from one judgement on who is late to the next, so that nobody who looks has to wait
# for thousands of these
RETHINK = 16
PERIOD, PERIODS = 10.0, 90  # seconds, and how many of them
OTHERS = "(others)"  # operations beyond what is kept
KNOWN = OPERATIONS.keys()
LARGEST = 1 << 60  # of any number that somebody sends
Clocks = dict[
    str, tuple[float, float]
]  # by agent: between which seconds this clock is ahead of its


@dataclass(slots=True)
class Row:
    """Calls of one operation and size class, of all members together. ``transfer`` is from the last
    arrival on.
    """

    calls: int = 0
    bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)
    wait: DurationHistogram = field(
        default_factory=DurationHistogram
    )  # from each member's arrival to the last one's
    transfer: DurationHistogram = field(default_factory=DurationHistogram)
    transferred: int = 0  # bytes of these calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A period of a series. Durations in seconds, None where nothing is known."""

    at: float  # its beginning
    calls: int
    latency: tuple[float, float] | None  # p50, p95
    spread: tuple[float, float] | None


@dataclass(slots=True)
class Series:
    """The course of one operation in a group."""

    points: deque[Point] = field(default_factory=lambda: deque(maxlen=PERIODS))
    _began: float = 0.0
    _calls: int = 0
    _latency: DurationHistogram = field(default_factory=DurationHistogram)
    _spread: DurationHistogram = field(default_factory=DurationHistogram)

    def at(self, now: float) -> Series:
        """Itself, with the period closed that is over by now."""
        began = now - now % PERIOD
        if began > self._began:
            if (point := self._point()) is not None:
                self.points.append(point)
            self._began, self._calls, self._latency, self._spread = (
                began,
                0,
                DurationHistogram(),
                DurationHistogram(),
            )
        return self

    def add(self, calls: int, latency: Sequence[tuple[int, int]], longest_us: float) -> None:
        self._calls += calls
        self._latency.merge_counts(latency, longest_us)

    def apart(self, spread_s: float) -> None:
        self._spread.add_duration(spread_s * 1e6)

    def all(self) -> list[Point]:
        """The oldest first; the period that is under way last."""
        point = self._point()
        return [*self.points, *([point] if point else [])]

    def _point(self) -> Point | None:
        if not self._calls and not self._spread.total_count:
            return None
        return Point(
            at=self._began,
            calls=self._calls,
            latency=_middle(self._latency),
            spread=_middle(self._spread),
        )


def _middle(told: DurationHistogram) -> tuple[float, float] | None:
    p50, p95 = told.quantile(0.5), told.quantile(0.95)
    return None if p50 is None or p95 is None else (p50, p95)


@dataclass(slots=True)
class Call:
    """One call that members have begun to tell of. Times in µs, -1: not known."""

    op: str
    size: int  # class
    bytes: int  # -1: not the same for all
    # By rank: when it came, on its agent's clock; how long after its call before, how long it was
    # in it, and which agent
    arrivals: dict[int, tuple[int, int, int, str]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class GroupLedger:
    """Of one process group."""

    group: Group
    ranks: set[int] = field(default_factory=set)  # that have told anything
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    judged: deque[CallSkew] = field(default_factory=lambda: deque(maxlen=JUDGED_KEPT))
    spread: DurationHistogram = field(default_factory=DurationHistogram)
    # calls wait on a device, not the threads that make them: who is late there may hold up nobody
    queued: bool = False
    compared: int = 0
    undecided: int = 0
    missed: int = 0
    late: list[LatenessStats] = field(default_factory=list)  # as of some calls ago: see `RETHINK`
    straggler: LatenessStats | None = None
    _rethink: int = 1
    _waiting: dict[int, Call] = field(default_factory=dict)

    def add(self, rank: int, part: heartbeat.StreamPerformance, now: float) -> None:
        self.ranks.add(rank)
        self.missed += part.missed
        for told in part.totals:
            row = self.row(told.op, told.size)
            row.calls += told.calls
            row.bytes += told.bytes
            row.latency.merge_counts(told.latency, told.longest_us)
            self._series(told.op, now).add(told.calls, told.latency, told.longest_us)

    def arrive(
        self,
        rank: int,
        agent: str,
        samples: Iterable[heartbeat.CallSample],
        clocks: Clocks,
        now: float,
    ) -> Iterator[float]:
        """Notes when a member came to some calls; judges those to which all have come, and gives
        each one's spread in seconds.
        """
        members = len(self.group.ranks)
        for seq, entered, since, took, op, size, whole in samples:
            call = self._waiting.get(seq)
            if call is None:
                call = self._waiting[seq] = Call(op, size, whole)
                while len(self._waiting) > max(FEWEST_WAITING, min(64, WAITING_KEPT // members)):
                    del self._waiting[next(iter(self._waiting))]
            if op != call.op:  # a mismatch, which is not for here
                self._waiting.pop(seq, None)
                continue
            call.bytes = call.bytes if call.bytes == whole else -1
            call.arrivals[rank] = entered, since, took, agent
            if len(call.arrivals) == members:
                del self._waiting[seq]
                agents = {agent for _, _, _, agent in call.arrivals.values()}
                if len(agents) == 1 or agents <= clocks.keys():
                    yield self._judge(seq, call, agents, clocks, now)

    def _judge(self, seq: int, call: Call, agents: set[str], clocks: Clocks, now: float) -> float:
        bounds = {agent: clocks.get(agent, (0.0, 0.0)) for agent in agents}
        middle = {agent: (low + high) / 2 for agent, (low, high) in bounds.items()}
        error = {agent: (high - low) / 2 for agent, (low, high) in bounds.items()}
        arrivals = [
            Arrival(
                rank,
                us / 1e6 + middle[agent],
                error[agent],
                agent,
                since / 1e6 if since >= 0 else math.inf,
            )
            for rank, (us, since, _, agent) in call.arrivals.items()
        ]
        found = stragglers.measure_skew(seq, arrivals)
        self.judged.append(found)
        self.compared += 1
        self.undecided += not found.last_ranks
        if self.compared >= self._rethink:
            self.late = stragglers.find_latecomers(self.judged)
            self.straggler = stragglers.find_straggler(self.judged, self.late)
            self._rethink = self.compared + min(RETHINK, 1 + self.compared // RETHINK)
        self.spread.add_duration(found.spread_s * 1e6)
        self._series(call.op, now).apart(found.spread_s)
        row = self.row(call.op, call.size)
        moments = sorted(arrival.arrived_at for arrival in arrivals)
        for moment in moments[
            :: max(1, len(moments) // WAITS_KEPT)
        ]:  # the first, who waits longest, is among them
            waited = found.last_arrival_at - moment
            row.wait.add_duration(1e6 * waited if waited > found.error_s else 0.0)
        took = [us for _, _, us, _ in call.arrivals.values()]
        if call.op in MUTUAL_WAIT_OPS and min(took) >= 0 and call.bytes > 0:
            row.transfer.add_duration(
                min(took)
            )  # that of the last one to come, which waited for nobody
            row.transferred += call.bytes
        return found.spread_s

    def row(self, op: str, size: int) -> Row:
        at = op[:64], size
        if at not in self.rows and len(self.rows) >= ROWS_KEPT:
            at = OTHERS, 0
        return self.rows.setdefault(at, Row())

    def _series(self, op: str, now: float) -> Series:
        op = op[:64]
        return self.series.setdefault(
            op if op in self.series or len(self.series) < SERIES_KEPT else OTHERS, Series()
        ).at(now)

    @property
    def error(self) -> float:
        """By how much arrivals may be misjudged, in seconds."""
        return max((call.error_s for call in self.judged), default=0.0)


@dataclass(slots=True)
class OpTotals:
    """Of one operation in all groups of a job."""

    calls: int = 0
    bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)


@dataclass(slots=True, kw_only=True)
class JobLedger:
    """Of one attempt of a job."""

    groups: dict[GroupKey, GroupLedger] = field(default_factory=dict)
    left_out: int = 0  # reports of groups beyond those that are kept
    ops: dict[str, OpTotals] = field(default_factory=dict)
    spread: DurationHistogram = field(default_factory=DurationHistogram)

    def add(self, part: heartbeat.StreamPerformance) -> None:
        for told in part.totals:
            totals = self.ops.setdefault(told.op if told.op in KNOWN else OTHERS, OpTotals())
            totals.calls += told.calls
            totals.bytes += told.bytes
            totals.latency.merge_counts(told.latency, told.longest_us)

    def join(self, other: JobLedger) -> None:
        """Adds another job's totals."""
        for op, its in other.ops.items():
            totals = self.ops.setdefault(op, OpTotals())
            totals.calls += its.calls
            totals.bytes += its.bytes
            totals.latency.merge_counts(its.latency.counts.items(), its.latency.longest_us)
        self.spread.merge_counts(other.spread.counts.items(), other.spread.longest_us)

    def group(self, group: Group) -> GroupLedger | None:
        found = self.groups.get(group.key)
        if found is None and len(self.groups) < GROUPS_KEPT:
            found = self.groups[group.key] = GroupLedger(group=group)
        self.left_out += found is None
        return found


@dataclass(slots=True)
class Ledger:
    """Of all jobs. `take` is the only way in."""

    attempts: dict[tuple[str, int], JobLedger] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)  # the last report of each agent

    def take(self, beat: heartbeat.Heartbeat, fleet: Fleet, now: float) -> None:
        """Adds what a heartbeat says. What comes again, or of a process that is not known here, is
        left out.
        """
        told = beat.performance
        if told is None or told.number <= self._numbers.get(beat.agent, 0):
            return
        self._numbers[beat.agent] = told.number
        if told.clock is not None and told.clock[0] <= told.clock[1]:
            self.clocks[beat.agent] = told.clock
        for part in told.sequences:
            process, attempt = fleet.processes.get((beat.host, part.key), (None, None))
            sequence = process.streams.get(part.uid) if process is not None else None
            if (
                process is None
                or attempt is None
                or sequence is None
                or attempt.processes.get(process.rank) is not process
                or not _sane(part)
            ):
                continue
            job = self.attempts.setdefault((attempt.job, attempt.number), JobLedger())
            job.add(part)
            group = job.group(sequence.group)
            if group is not None:
                group.add(process.rank, part, now)
                group.queued |= sequence.completed is None
                if (
                    sequence.kind is StreamKind.COLLECTIVE
                    and process.rank in sequence.group.ranks
                    and len(sequence.group.ranks) > 1
                ):
                    for spread_s in group.arrive(
                        process.rank, beat.agent, part.samples, self.clocks, now
                    ):
                        job.spread.add_duration(spread_s * 1e6)

    def of(self, attempt: Attempt) -> JobLedger:
        return self.attempts.get((attempt.job, attempt.number)) or JobLedger()

    def forget_agent(self, agent: str) -> None:
        self._numbers.pop(agent, None)
        self.clocks.pop(agent, None)


def _sane(part: heartbeat.StreamPerformance) -> bool:
    """Numbers that can be reckoned with, whoever sent them."""
    for told in part.totals:
        small = (
            0 <= told.size <= 64
            and 0 <= told.calls < LARGEST
            and 0 <= told.bytes < LARGEST
            and 0 <= told.longest_us <= MAX_DURATION_US
        )
        if not small or not are_valid_counts(told.latency):
            return False
    samples = all(
        0 <= s[1] < LARGEST
        and -1 <= s[2] < LARGEST
        and -1 <= s[3] <= MAX_DURATION_US
        and 0 <= s[5] <= 64
        and -1 <= s[6] < LARGEST
        for s in part.samples
    )
    return samples and 0 <= part.missed < LARGEST
