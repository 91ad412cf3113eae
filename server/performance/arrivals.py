"""The arrivals of a group's members at the same calls: collected until every member has reported,
then compared to find out who comes last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hangwatch.performance import stragglers
from hangwatch.performance.distributions import DurationHistogram
from hangwatch.performance.stragglers import Arrival, CallSkew, LatenessStats
from hangwatch.protocol import heartbeat

MAX_COMPARED_CALLS = 256  # calls of a group by which latecomers are judged
# Arrivals of a group that are kept until all members have reported; at least so many calls.
MAX_PENDING_ARRIVALS = 1 << 16
MIN_PENDING_CALLS = 8
MAX_PENDING_CALLS = 64
# Latecomers are computed again after at most this many calls, as they are compared, so that no
# reader has to wait for thousands of groups to be judged.
MAX_CALLS_BETWEEN_JUDGEMENTS = 16

# By agent: the lower and the upper bound, in seconds, of this server's clock minus the agent's.
ClockBounds = dict[str, tuple[float, float]]


class ReportedArrival(NamedTuple):
    """One member's arrival at a call. Times are in µs; -1 where they are not known."""

    entered_us: int  # on the agent's clock
    since_previous_us: int  # since the member's previous call
    duration_us: int  # from entry to completion
    agent: str


@dataclass(slots=True)
class PendingCall:
    """One call that some members have reported."""

    seq: int
    op: str
    size_class: int
    size_bytes: int  # -1: the members reported different sizes
    arrivals: dict[int, ReportedArrival] = field(default_factory=dict)  # by rank

    @property
    def agents(self) -> set[str]:
        return {arrival.agent for arrival in self.arrivals.values()}


@dataclass(slots=True)
class PendingCalls:
    """The calls of one group that not all members have reported yet, by sequence number."""

    member_count: int
    calls: dict[int, PendingCall] = field(default_factory=dict)

    def add_sample(self, rank: int, agent: str, sample: heartbeat.CallSample) -> PendingCall | None:
        """Records the arrival of a member. Returns the call once all members have reported it."""
        seq, entered_us, since_previous_us, duration_us, op, size_class, size_bytes = sample
        call = self.calls.get(seq)
        if call is None:
            call = self.calls[seq] = PendingCall(seq, op, size_class, size_bytes)
            self._drop_oldest()
        if op != call.op:  # a mismatch: the diagnosis reports it
            self.calls.pop(seq, None)
            return None
        if call.size_bytes != size_bytes:
            call.size_bytes = -1
        call.arrivals[rank] = ReportedArrival(entered_us, since_previous_us, duration_us, agent)
        if len(call.arrivals) < self.member_count:
            return None
        self.calls.pop(seq, None)
        return call

    def _drop_oldest(self) -> None:
        affordable = min(MAX_PENDING_CALLS, MAX_PENDING_ARRIVALS // self.member_count)
        while len(self.calls) > max(MIN_PENDING_CALLS, affordable):
            del self.calls[min(self.calls)]


def convert_arrivals(call: PendingCall, clocks: Mapping[str, tuple[float, float]]) -> list[Arrival]:
    """The arrivals on this server's clock. A single agent needs no known clock."""
    arrivals: list[Arrival] = []
    for rank, reported in call.arrivals.items():
        low, high = clocks.get(reported.agent, (0.0, 0.0))
        arrived_at = reported.entered_us / 1e6 + (low + high) / 2
        since_s = reported.since_previous_us / 1e6 if reported.since_previous_us >= 0 else math.inf
        arrivals.append(Arrival(rank, arrived_at, (high - low) / 2, reported.agent, since_s))
    return arrivals


@dataclass(slots=True)
class ArrivalComparison:
    """Which members of a group come last at its calls."""

    recent_skews: deque[CallSkew] = field(default_factory=lambda: deque(maxlen=MAX_COMPARED_CALLS))
    spread: DurationHistogram = field(default_factory=DurationHistogram)
    compared_calls: int = 0
    undecided_calls: int = 0  # the clocks do not show who came last
    # As of the last judgement: see `MAX_CALLS_BETWEEN_JUDGEMENTS`.
    latecomers: list[LatenessStats] = field(default_factory=list)
    straggler: LatenessStats | None = None
    _next_judgement: int = 1  # compared calls

    def add_skew(self, skew: CallSkew) -> None:
        self.recent_skews.append(skew)
        self.spread.add_duration(skew.spread_s * 1e6)
        self.compared_calls += 1
        self.undecided_calls += not skew.last_ranks
        if self.compared_calls >= self._next_judgement:
            self._judge_latecomers()

    def _judge_latecomers(self) -> None:
        self.latecomers = stragglers.find_latecomers(self.recent_skews)
        self.straggler = stragglers.find_straggler(self.recent_skews, self.latecomers)
        interval = 1 + self.compared_calls // MAX_CALLS_BETWEEN_JUDGEMENTS
        self._next_judgement = self.compared_calls + min(MAX_CALLS_BETWEEN_JUDGEMENTS, interval)

    @property
    def error_s(self) -> float:
        """The largest error of the recent comparisons, due to the hosts' clocks."""
        return max((skew.error_s for skew in self.recent_skews), default=0.0)
