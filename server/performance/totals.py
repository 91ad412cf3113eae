"""Adds up the performance reports in heartbeats, by job, process group and operation. Memory is
bounded, whatever the size of the jobs and whatever is sent.

The arrivals of a group's members at the same calls are collected until every member has reported,
then compared to find out who comes last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import AttemptKey
from hangwatch.performance import stragglers
from hangwatch.performance.distributions import MUTUAL_WAIT_OPS, DurationHistogram
from hangwatch.performance.stragglers import Arrival, CallSkew, LatenessStats
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

MAX_GROUPS = 2048  # groups of an attempt

MAX_COMPARED_CALLS = 256  # calls of a group by which latecomers are judged
# The arrivals of a group that are kept until all members have reported, and the number of calls.
MAX_PENDING_ARRIVALS = 1 << 16
MIN_PENDING_CALLS = 8
MAX_PENDING_CALLS = 64
# Latecomers are computed again after at most this many calls, as they are compared, so that no
# reader has to wait for thousands of groups to be judged.
MAX_CALLS_BETWEEN_JUDGEMENTS = 16

MAX_SIZE_CLASS_ROWS = 96  # operations and size classes of a group
MAX_HISTORIES = 12  # operations of a group with a history
MAX_WAITS_PER_CALL = 32  # approximately: members whose waiting time is counted
MAX_OP_LENGTH = 64
OTHER_OPS = "(others)"  # operations beyond these limits

PERIOD_S = 10.0
MAX_PERIODS = 90

# Each agent's lower and upper bound, in seconds, of this server's clock minus the agent's.
ClockBounds = dict[str, tuple[float, float]]


@dataclass(slots=True)
class PerformanceTotals:
    """The totals of all jobs. Changed only by `apply_heartbeat` and `forget_agent`."""

    attempts: dict[AttemptKey, JobTotals] = field(default_factory=dict)
    clocks: ClockBounds = field(default_factory=dict)
    _report_numbers: dict[str, int] = field(default_factory=dict)  # the last report of each agent

    def apply_heartbeat(self, beat: heartbeat.Heartbeat, fleet: Fleet, now: float) -> None:
        """Adds a report, unless it is repeated, without unknown processes and streams."""
        report = beat.performance
        agent = fleet.agents[beat.agent]
        if report is None or report.number <= self._report_numbers.get(beat.agent, 0):
            return
        self._report_numbers[beat.agent] = report.number
        if report.clock is not None and report.clock[0] <= report.clock[1]:
            self.clocks[beat.agent] = report.clock
        for part in report.streams:
            process = agent.processes.get((beat.host, part.key))
            if process is None:
                continue
            stream = process.streams.get(part.uid)
            if stream is None or not process.holds_rank:
                continue
            job = self.attempts.setdefault(process.attempt.key, JobTotals())
            for reported in part.totals:
                op = reported.op if reported.op in OPERATIONS else OTHER_OPS
                job.operations.setdefault(op, OperationTotals()).add_calls(reported)
            group = job.get_group(stream.group)
            if group is None:
                continue
            rank = process.rank
            group.add_report(rank, part, now)
            group.queued |= stream.completed is None
            members = stream.group.ranks
            if stream.kind is StreamKind.COLLECTIVE and rank in members and len(members) > 1:
                group.add_samples(rank, beat.agent, part.samples, self.clocks, now)

    def get_job(self, attempt: Attempt) -> JobTotals:
        """The totals of an attempt; empty ones if it has not reported any calls."""
        return self.attempts.get(attempt.key) or JobTotals()

    def forget_agent(self, agent: str) -> None:
        self._report_numbers.pop(agent, None)
        self.clocks.pop(agent, None)


@dataclass(slots=True, kw_only=True)
class JobTotals:
    """The totals of one attempt of a job."""

    groups: dict[GroupKey, GroupTotals] = field(default_factory=dict)
    ignored_reports: int = 0  # reports of groups beyond `MAX_GROUPS`
    operations: dict[str, OperationTotals] = field(default_factory=dict)  # all groups together

    def get_group(self, group: Group) -> GroupTotals | None:
        """The totals of a group, created if needed; None beyond `MAX_GROUPS`."""
        totals = self.groups.get(group.key)
        if totals is None:
            if len(self.groups) >= MAX_GROUPS:
                self.ignored_reports += 1
                return None
            totals = self.groups[group.key] = GroupTotals(group=group)
        return totals


@dataclass(slots=True)
class PartlyReportedCall:
    """One call that some members have reported."""

    seq: int
    op: str
    size_class: int
    size_bytes: int  # -1: the members reported different sizes
    # By rank. The times are on the clocks of the node agents.
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    shortest_us: float = math.inf  # the shortest time from entry to completion; -1: one is unknown


@dataclass(slots=True)
class ArrivalComparison:
    """The comparison of a group's members: who comes last at its calls."""

    recent_skews: deque[CallSkew] = field(default_factory=lambda: deque(maxlen=MAX_COMPARED_CALLS))
    spread: DurationHistogram = field(default_factory=DurationHistogram)
    compared_calls: int = 0
    undecided_calls: int = 0  # the clocks do not show who came last
    # The result of the last judgement: see `MAX_CALLS_BETWEEN_JUDGEMENTS`.
    latecomers: list[LatenessStats] = field(default_factory=list)
    straggler: LatenessStats | None = None
    _next_judgement: int = 1  # compared calls

    def add_skew(self, skew: CallSkew) -> None:
        self.recent_skews.append(skew)
        self.spread.add_duration(skew.spread_s * 1e6)
        self.compared_calls += 1
        self.undecided_calls += not skew.last_ranks
        if self.compared_calls < self._next_judgement:
            return
        self.latecomers = stragglers.find_latecomers(self.recent_skews)
        self.straggler = stragglers.find_straggler(self.recent_skews, self.latecomers)
        interval = 1 + self.compared_calls // MAX_CALLS_BETWEEN_JUDGEMENTS
        self._next_judgement = self.compared_calls + min(MAX_CALLS_BETWEEN_JUDGEMENTS, interval)

    @property
    def error_s(self) -> float:
        """The largest error of the recent comparisons, due to the hosts' clocks."""
        return max((skew.error_s for skew in self.recent_skews), default=0.0)


@dataclass(slots=True)
class OperationTotals:
    """The calls of one operation, of all ranks together."""

    calls: int = 0
    bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)

    def add_calls(self, reported: heartbeat.CallTotals) -> None:
        self.calls += reported.calls
        self.bytes += reported.bytes
        self.latency.merge_counts(reported.latency, reported.longest_us)


@dataclass(slots=True)
class SizeClassTotals(OperationTotals):
    """The calls of one operation and size class in a group."""

    # The time from each member's arrival to the last one's.
    wait: DurationHistogram = field(default_factory=DurationHistogram)
    # The time from the last arrival to completion, and the sizes of the calls where that is known.
    transfer: DurationHistogram = field(default_factory=DurationHistogram)
    transferred_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class GroupTotals:
    """The totals of one process group."""

    group: Group
    reporting_ranks: set[int] = field(default_factory=set)
    size_classes: dict[tuple[str, int], SizeClassTotals] = field(default_factory=dict)
    histories: dict[str, PeriodHistory] = field(default_factory=dict)  # one for each operation
    arrivals: ArrivalComparison = field(default_factory=ArrivalComparison)
    # Calls wait on a device, not the threads that make them: a late thread may delay no other rank.
    queued: bool = False
    missed_calls: int = 0  # too many for the node agent to read
    # The calls that not all members have reported yet, by sequence number.
    _pending: dict[int, PartlyReportedCall] = field(default_factory=dict)

    def add_report(self, rank: int, part: heartbeat.StreamPerformance, now: float) -> None:
        """Adds the totals that one member reports."""
        self.reporting_ranks.add(rank)
        self.missed_calls += part.missed
        for reported in part.totals:
            self._get_size_class(reported.op, reported.size).add_calls(reported)
            self._get_period(reported.op, now).current.add_calls(reported)

    def add_samples(
        self,
        rank: int,
        agent: str,
        samples: Iterable[heartbeat.CallSample],
        clocks: ClockBounds,
        now: float,
    ) -> None:
        """Records a member's arrivals, and compares those at calls that all members have reported."""
        member_count = len(self.group.ranks)
        affordable = min(MAX_PENDING_CALLS, MAX_PENDING_ARRIVALS // member_count)
        for seq, entered_us, since_previous_us, duration_us, op, size_class, size_bytes in samples:
            call = self._pending.get(seq)
            if call is None:
                call = self._pending[seq] = PartlyReportedCall(seq, op, size_class, size_bytes)
                while len(self._pending) > max(MIN_PENDING_CALLS, affordable):
                    del self._pending[min(self._pending)]
            if op != call.op:  # a mismatch: the diagnosis reports it
                self._pending.pop(seq, None)
                continue
            if call.size_bytes != size_bytes:
                call.size_bytes = -1
            since_s = since_previous_us / 1e6 if since_previous_us >= 0 else math.inf
            call.arrivals[rank] = Arrival(
                rank, arrived_at=entered_us / 1e6, host=agent, since_previous_s=since_s
            )
            call.shortest_us = min(call.shortest_us, duration_us)
            if len(call.arrivals) == member_count:
                self._pending.pop(seq, None)
                agents = {arrival.host for arrival in call.arrivals.values()}
                # The clock of a single agent need not be known.
                if len(agents) == 1 or agents <= clocks.keys():
                    self._compare_arrivals(call, clocks, now)

    def _compare_arrivals(self, call: PartlyReportedCall, clocks: ClockBounds, now: float) -> None:
        arrivals = []  # the times are this server's
        for arrival in call.arrivals.values():
            low, high = clocks.get(arrival.host, (0.0, 0.0))
            arrived_at = arrival.arrived_at + (low + high) / 2
            arrivals.append(arrival._replace(arrived_at=arrived_at, error_s=(high - low) / 2))
        skew = stragglers.measure_skew(call.seq, arrivals)
        self.arrivals.add_skew(skew)
        self._get_period(call.op, now).spread.add_duration(1e6 * skew.spread_s)
        row = self._get_size_class(call.op, call.size_class)
        # How long some of the members waited; the first, which waited longest, is one of them.
        times = sorted(arrival.arrived_at for arrival in arrivals)
        for arrived_at in times[:: max(1, len(times) // MAX_WAITS_PER_CALL)]:
            waited_s = skew.last_arrival_at - arrived_at
            row.wait.add_duration(1e6 * waited_s if waited_s > skew.error_s else 0.0)
        if call.op in MUTUAL_WAIT_OPS and call.shortest_us >= 0 and call.size_bytes > 0:
            # The shortest call is that of the last member to arrive, which did not wait.
            row.transfer.add_duration(call.shortest_us)
            row.transferred_bytes += call.size_bytes

    def _get_size_class(self, op: str, size_class: int) -> SizeClassTotals:
        key = op[:MAX_OP_LENGTH], size_class
        if key not in self.size_classes and len(self.size_classes) >= MAX_SIZE_CLASS_ROWS:
            key = OTHER_OPS, 0
        return self.size_classes.setdefault(key, SizeClassTotals())

    def _get_period(self, op: str, now: float) -> PeriodHistory:
        """The history of an operation, in the current period."""
        op = op[:MAX_OP_LENGTH]
        if op not in self.histories and len(self.histories) >= MAX_HISTORIES:
            op = OTHER_OPS
        history = self.histories.setdefault(op, PeriodHistory())
        started_at = now - now % PERIOD_S
        if started_at > history.started_at:
            history.closed_points.extend(history.list_current_point())
            history.started_at = started_at
            history.current = OperationTotals()
            history.spread = DurationHistogram()
        return history


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodPoint:
    """One period. Quantiles are in seconds, and None where nothing was measured."""

    started_at: float
    calls: int
    latency_p50_p95: tuple[float, float] | None
    spread_p50_p95: tuple[float, float] | None


@dataclass(slots=True)
class PeriodHistory:
    """One operation in a group: its current period, and the points of the last ones."""

    started_at: float = 0.0
    current: OperationTotals = field(default_factory=OperationTotals)
    spread: DurationHistogram = field(default_factory=DurationHistogram)
    closed_points: deque[PeriodPoint] = field(default_factory=lambda: deque(maxlen=MAX_PERIODS))

    def list_points(self) -> list[PeriodPoint]:
        """The periods in which something was measured, in order, including the current one."""
        return [*self.closed_points, *self.list_current_point()]

    def list_current_point(self) -> list[PeriodPoint]:
        """The current period; empty if nothing was measured in it."""
        if not self.current.calls and not self.spread.total_count:
            return []
        point = PeriodPoint(
            started_at=self.started_at,
            calls=self.current.calls,
            latency_p50_p95=compute_p50_p95(self.current.latency),
            spread_p50_p95=compute_p50_p95(self.spread),
        )
        return [point]


def compute_p50_p95(durations: DurationHistogram) -> tuple[float, float] | None:
    """The median and the 95th percentile in seconds; None for an empty histogram."""
    p50, p95 = durations.quantile(0.5), durations.quantile(0.95)
    return None if p50 is None or p95 is None else (p50, p95)
