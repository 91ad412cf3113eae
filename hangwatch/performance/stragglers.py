"""Finds the ranks that arrive last at a group's calls, how often and by how much.

An arrival is the time at which a rank enters a call; the arrivals of all members at the same call
are compared. Clocks of hosts differ: a delay below their known error is not attributed to a rank.
Only calls in which every member waits for all others are considered
(`hangwatch.performance.distributions.MUTUAL_WAIT_OPS`), since only there a late rank delays the
others.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_CALLS = 30  # fewer calls are not judged
MIN_SPAN_S = 5.0  # the calls must cover at least this time
# Minimum share of the calls. A rarer delay is an isolated event, such as a checkpoint.
MIN_LATE_SHARE = 0.05
MIN_WAIT_SHARE = 0.75  # stragglers must cause at least this share of all waiting
MIN_JOB_TIME_SHARE = 0.05  # waiting for stragglers must take at least this share of the job's time
MIN_LAG_S = 0.001
MAX_LATE_RANKS = 64  # no more ranks are considered late together
TRIVIAL_LAG_FRACTION = 0.1  # delays below this fraction of a rank's usual one are not counted


class Arrival(NamedTuple):
    """One rank's arrival at a call. ``arrived_at`` is in seconds on a common clock, with an error of
    at most ``error_s``; arrivals on the same ``host`` have no error relative to each other.

    ``since_previous_s`` is the time since the rank's previous call. The delay attributed to this
    call is at most that: for calls in quick succession, one delay must not count several times.
    """

    rank: int
    arrived_at: float
    error_s: float = 0.0
    host: str = ""
    since_previous_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSkew:
    """The arrivals of all members at one call. Times are in seconds."""

    seq: int
    last_arrival_at: float
    # The ranks that arrived after the widest gap, at most half of the members. Empty if the gap is
    # within the clock error.
    last_ranks: frozenset[int]
    lag_s: float  # the length of that gap
    lost_s: float  # the part of the lag that was not already counted for an earlier call
    spread_s: float  # time from the first arrival to the last; 0 if it is within the error
    error_s: float  # the error of the spread


CallSkews = Sequence[CallSkew]


def measure_skew(seq: int, arrivals: Sequence[Arrival]) -> CallSkew:
    """Compares the arrivals, at least two, at one call. Several ranks may be late together, such as
    all ranks of a slow host.
    """
    ordered = sorted(arrivals, key=lambda arrival: arrival.arrived_at)
    times = [arrival.arrived_at for arrival in ordered]
    count = len(ordered)
    first_cut = max(count - count // 2, count - MAX_LATE_RANKS)
    cut = max(range(first_cut, count), key=lambda i: times[i] - times[i - 1])
    late = ordered[cut:]
    lag = times[cut] - times[cut - 1]
    lost = min(lag, late[0].since_previous_s)
    if lag <= _clock_error(late, ordered[:cut]):
        late, lag, lost = [], 0.0, 0.0
    spread = times[-1] - times[0]
    error = _clock_error(ordered[:1], ordered[-1:])
    return CallSkew(
        seq=seq,
        last_arrival_at=times[-1],
        last_ranks=frozenset(arrival.rank for arrival in late),
        lag_s=lag,
        lost_s=lost,
        spread_s=spread if spread > error else 0.0,
        error_s=error,
    )


def _clock_error(first: Sequence[Arrival], second: Sequence[Arrival]) -> float:
    """The maximum error, in seconds, of the difference between an arrival of each side."""
    if len({a.host for a in (*first, *second)}) == 1:
        return 0.0
    return max(a.error_s for a in first) + max(a.error_s for a in second)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessStats:
    """How late one rank, or several together, arrive at the judged calls of a group."""

    ranks: frozenset[int]
    late_calls: int  # calls at which they arrived last, by more than a trivial delay
    share: float  # their share in all judged calls
    lag_s: float  # delay after the others: the median over these calls
    waited_share: float  # share of the time during which the others wait for them


# The stragglers of a group, and its members.
GroupStragglers = tuple[LatenessStats, frozenset[int]]


def find_latecomers(skews: CallSkews) -> list[LatenessStats]:
    """How late each rank is that was among the last; the one that others wait for most is first."""
    calls: dict[int, list[CallSkew]] = {}
    for call in skews:
        for rank in call.last_ranks:
            calls.setdefault(rank, []).append(call)
    per_second = _estimate_call_rate(skews)
    latecomers = [
        _summarize_lateness(frozenset((rank,)), late_skews, len(skews), per_second)
        for rank, late_skews in calls.items()
    ]
    return sorted(latecomers, key=lambda late: (-late.waited_share, -late.share, min(late.ranks)))


def _summarize_lateness(
    ranks: frozenset[int], late_skews: CallSkews, call_count: int, per_second: float
) -> LatenessStats:
    """The lateness of ``ranks``; ``late_skews`` are the calls at which all of them were last."""
    lags = [call.lag_s for call in late_skews]
    # The usual delay is the one up to which half of the lost time accrues. Unlike the plain median,
    # it represents a rank that is far behind in one call of a step and barely last in the others.
    ordered = sorted(_cap_outliers(lags, call_count))
    accrued = zip(ordered, itertools.accumulate(ordered), strict=True)
    usual = next(lag for lag, lost in accrued if lost >= sum(ordered) / 2)
    counted = [lag for lag in lags if lag >= TRIVIAL_LAG_FRACTION * usual]
    return LatenessStats(
        ranks=ranks,
        late_calls=len(counted),
        share=len(counted) / call_count,
        lag_s=statistics.median(counted),
        waited_share=_share_of_time(late_skews, call_count, per_second),
    )


def _share_of_time(late_skews: CallSkews, call_count: int, per_second: float) -> float:
    lost_s = sum(_cap_outliers([call.lost_s for call in late_skews], call_count))
    return min(1.0, lost_s / call_count * per_second)


def _cap_outliers(durations: Sequence[float], call_count: int) -> list[float]:
    """Limits rare long durations to the longest one that occurs in `MIN_LATE_SHARE` of calls."""
    position = min(max(1, int(MIN_LATE_SHARE * call_count)), len(durations) - 1)
    limit = sorted(durations, reverse=True)[position]
    return [min(duration, limit) for duration in durations]


def _estimate_call_rate(skews: CallSkews) -> float:
    """The group's calls per second, including those between the judged ones."""
    if len(skews) < 2:
        return 0.0
    first = min(skews, key=lambda call: call.seq)
    last = max(skews, key=lambda call: call.seq)
    elapsed_s = last.last_arrival_at - first.last_arrival_at
    return (last.seq - first.seq) / elapsed_s if elapsed_s > 0 else 0.0


def find_straggler(skews: CallSkews, latecomers: Sequence[LatenessStats]) -> LatenessStats | None:
    """The rank, or several that are late together, that a group repeatedly waits for: they cause
    most of the waiting, and it takes a considerable share of the job's time. None if there is none.

    ``latecomers`` is the result of `find_latecomers` for the same calls.
    """
    times = [call.last_arrival_at for call in skews]
    if len(skews) < MIN_CALLS or max(times) - min(times) < MIN_SPAN_S:
        return None
    per_second = _estimate_call_rate(skews)
    total_share = _share_of_time(skews, len(skews), per_second)
    ranks = frozenset().union(
        *(one.ranks for one in latecomers if one.waited_share >= MIN_WAIT_SHARE * total_share)
    )
    late_skews = [call for call in skews if ranks <= call.last_ranks]
    if not ranks or not late_skews:
        return None
    worst = _summarize_lateness(ranks, late_skews, len(skews), per_second)
    is_straggler = (
        worst.share >= MIN_LATE_SHARE
        and worst.waited_share >= max(MIN_JOB_TIME_SHARE, MIN_WAIT_SHARE * total_share)
        and worst.lag_s >= MIN_LAG_S
    )
    return worst if is_straggler else None


def find_straggler_causes(stragglers: Mapping[int, GroupStragglers]) -> dict[int, frozenset[int]]:
    """The groups whose stragglers may be late only because they wait for other ranks, with the
    ranks that they wait for.

    ``stragglers`` is by the number of the group. A rank that waits in one group arrives late at the
    next one, unless all members there have waited with it.
    """
    suspects = frozenset().union(*(late.ranks for late, _ in stragglers.values()))
    # The groups in which a late rank waits for another rank, by the late rank.
    waits: dict[int, list[GroupStragglers]] = {}
    for late, members in stragglers.values():
        for rank in (members & suspects) - late.ranks:
            waits.setdefault(rank, []).append((late, members))
    causes = {}
    for number, (late, members) in stragglers.items():
        reasons = []
        for rank in late.ranks:
            awaited = [
                other
                for other, other_members in waits.get(rank, ())
                if other.waited_share >= late.waited_share / 2 and not members <= other_members
            ]
            if awaited:
                worst = max(awaited, key=lambda other: other.waited_share)
                reasons.append(worst.ranks)
        if len(reasons) == len(late.ranks):
            causes[number] = frozenset().union(*reasons)
    return causes
