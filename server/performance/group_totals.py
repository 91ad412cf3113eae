"""The performance of the calls of one process group, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hangwatch.model.groups import Group
from hangwatch.performance import stragglers
from hangwatch.performance.distributions import MUTUAL_WAIT_OPS, DurationHistogram
from hangwatch.performance.stragglers import Arrival, CallSkew
from hangwatch.protocol import heartbeat

from .arrivals import ArrivalComparison, ClockBounds, PendingCall, PendingCalls, convert_arrivals
from .period_history import PeriodHistory, PeriodTotals

MAX_SIZE_CLASS_ROWS = 96  # operations and size classes of a group
MAX_HISTORIES = 12  # operations of a group with a history
MAX_WAITS_PER_CALL = 32  # approximately: members whose waiting time is counted
MAX_OP_LENGTH = 64
OTHER_OPS = "(others)"  # operations beyond these limits


@dataclass(slots=True)
class OperationTotals:
    """The calls of one operation, of all ranks together."""

    calls: int = 0
    bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)

    def add_report(self, reported: heartbeat.CallTotals) -> None:
        self.calls += reported.calls
        self.bytes += reported.bytes
        self.latency.merge_counts(reported.latency, reported.longest_us)


@dataclass(slots=True)
class SizeClassTotals(OperationTotals):
    """The calls of one operation and size class in a group."""

    # From each member's arrival to the last one's.
    wait: DurationHistogram = field(default_factory=DurationHistogram)
    # From the last arrival to completion, and the sizes of the calls of which that is known.
    transfer: DurationHistogram = field(default_factory=DurationHistogram)
    transferred_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class GroupTotals:
    """The totals of one process group."""

    group: Group
    reporting_ranks: set[int] = field(default_factory=set)
    size_classes: dict[tuple[str, int], SizeClassTotals] = field(default_factory=dict)
    histories: dict[str, PeriodHistory] = field(default_factory=dict)  # by operation
    arrivals: ArrivalComparison = field(default_factory=ArrivalComparison)
    # Calls wait on a device, not the threads that make them: a late thread may delay no other rank.
    queued: bool = False
    missed_calls: int = 0  # too many for the node agent to read
    _pending: PendingCalls = field(init=False)

    def __post_init__(self) -> None:
        self._pending = PendingCalls(len(self.group.ranks))

    def add_report(self, rank: int, part: heartbeat.StreamPerformance, now: float) -> None:
        """Adds the totals that one member reports."""
        self.reporting_ranks.add(rank)
        self.missed_calls += part.missed
        for reported in part.totals:
            self._get_size_class(reported.op, reported.size).add_report(reported)
            period = self._get_period(reported.op, now)
            period.calls += reported.calls
            period.latency.merge_counts(reported.latency, reported.longest_us)

    def add_samples(
        self,
        rank: int,
        agent: str,
        samples: Iterable[heartbeat.CallSample],
        clocks: ClockBounds,
        now: float,
    ) -> list[float]:
        """Records a member's arrivals, and compares the calls that all members have reported.
        Returns the spread of each of these, in seconds.
        """
        spreads_s: list[float] = []
        for sample in samples:
            call = self._pending.add_sample(rank, agent, sample)
            if call is not None and (len(call.agents) == 1 or call.agents <= clocks.keys()):
                spreads_s.append(self._compare_arrivals(call, clocks, now))
        return spreads_s

    def _compare_arrivals(self, call: PendingCall, clocks: ClockBounds, now: float) -> float:
        arrivals = convert_arrivals(call, clocks)
        skew = stragglers.measure_skew(call.seq, arrivals)
        self.arrivals.add_skew(skew)
        self._get_period(call.op, now).spread.add_duration(1e6 * skew.spread_s)
        row = self._get_size_class(call.op, call.size_class)
        _add_waits(row, arrivals, skew)
        _add_transfer(row, call)
        return skew.spread_s

    def _get_size_class(self, op: str, size_class: int) -> SizeClassTotals:
        key = op[:MAX_OP_LENGTH], size_class
        if key not in self.size_classes and len(self.size_classes) >= MAX_SIZE_CLASS_ROWS:
            key = OTHER_OPS, 0
        return self.size_classes.setdefault(key, SizeClassTotals())

    def _get_period(self, op: str, now: float) -> PeriodTotals:
        op = op[:MAX_OP_LENGTH]
        if op not in self.histories and len(self.histories) >= MAX_HISTORIES:
            op = OTHER_OPS
        return self.histories.setdefault(op, PeriodHistory()).get_current(now)


def _add_waits(row: SizeClassTotals, arrivals: Sequence[Arrival], skew: CallSkew) -> None:
    """Adds how long some of the members waited; the first, which waited longest, is one of them."""
    times = sorted(arrival.arrived_at for arrival in arrivals)
    step = max(1, len(times) // MAX_WAITS_PER_CALL)
    for arrived_at in times[::step]:
        waited_s = skew.last_arrival_at - arrived_at
        row.wait.add_duration(1e6 * waited_s if waited_s > skew.error_s else 0.0)


def _add_transfer(row: SizeClassTotals, call: PendingCall) -> None:
    shortest_us = min(reported.duration_us for reported in call.arrivals.values())
    if call.op in MUTUAL_WAIT_OPS and shortest_us >= 0 and call.size_bytes > 0:
        # The shortest call is that of the last member to arrive, which did not wait.
        row.transfer.add_duration(shortest_us)
        row.transferred_bytes += call.size_bytes
