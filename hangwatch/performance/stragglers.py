"""Who comes last in a group's calls, how often and by how much. Pure.

An arrival is the moment at which a rank makes a call; the same calls of all members are compared.
Clocks of hosts differ, and what is less than they are known to agree is nobody's delay. Only calls
in which every member waits for all others are looked at
(`hangwatch.performance.distributions.MUTUAL`): a late rank holds the others up in no other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hangwatch.report.text import name_ranks, truncate_end

MIN_CALLS = 30  # that say something
MIN_SPAN_S = 5.0  # for which they must reach
# of the calls: a delay that is not reached so often is an event, not a habit, such as a checkpoint
MIN_LATE_SHARE = 0.05
MIN_WAIT_SHARE = 0.75  # of all the time that is waited for anybody, and is waited for stragglers
MIN_JOB_TIME_SHARE = 0.05  # of the time of the job
MIN_LAG_S = 0.001  # seconds
MAX_LATE_RANKS = 64  # ranks that may be late together
TRIVIAL_LAG_FRACTION = 0.1  # of its usual delay: less is not counted as coming last


class Arrival(NamedTuple):
    """``at`` in seconds on a clock that is common to all, give or take ``error``; without that
    among those of one ``host``.

    ``since`` is how long ago the rank made its call before this one: it is not waited for longer
    than that, however late it is for calls that were made one upon another.
    """

    rank: int
    arrived_at: float
    error_s: float = 0.0
    host: str = ""
    since_previous_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSkew:
    """One call, as all members came to it. Seconds."""

    seq: int
    last_arrival_at: float  # when the last one came
    last_ranks: frozenset[
        int
    ]  # who came after the widest gap, half of the members at most; empty: the clocks do not tell
    lag_s: float  # that gap
    lost_s: float  # how long the others waited for this call and for none before it
    spread_s: float  # from the first to the last; 0 where it is less than the error
    error_s: float  # of the spread


def measure_skew(seq: int, arrivals: Sequence[Arrival]) -> CallSkew:
    """Needs two arrivals or more. Several that are late together, as all of a slow host, are one
    another's company, not its delay.
    """
    ordered = sorted(arrivals, key=lambda a: a.arrived_at)
    first, last, count = ordered[0], ordered[-1], len(ordered)
    cut = max(
        range(max(count - count // 2, count - MAX_LATE_RANKS), count),
        key=lambda i: ordered[i].arrived_at - ordered[i - 1].arrived_at,
    )
    lag = ordered[cut].arrived_at - ordered[cut - 1].arrived_at
    decided = lag > _clock_error(ordered[cut:], ordered[:cut])
    spread, error = last.arrived_at - first.arrived_at, _clock_error([first], [last])
    return CallSkew(
        seq=seq,
        last_arrival_at=last.arrived_at,
        last_ranks=frozenset(a.rank for a in ordered[cut:]) if decided else frozenset(),
        lag_s=lag if decided else 0.0,
        lost_s=min(lag, ordered[cut].since_previous_s) if decided else 0.0,
        spread_s=spread if spread > error else 0.0,
        error_s=error,
    )


def _clock_error(first: Sequence[Arrival], second: Sequence[Arrival]) -> float:
    """By how much the difference of any two of their arrivals may be wrong, at the most."""
    if len({a.host for a in (*first, *second)}) == 1:
        return 0.0
    return max(a.error_s for a in first) + max(a.error_s for a in second)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessStats:
    """How one rank, or several together, come to a group's calls, over those that were judged."""

    ranks: frozenset[int]
    late_calls: int  # in which they came last, by more than a trifle
    share: float  # these, of all
    lag_s: float  # seconds after the others: the median of these calls
    waited_share: float  # share of the time in which the others wait for them


def find_latecomers(skews: Sequence[CallSkew]) -> list[LatenessStats]:
    """Each rank that came last in some call, alone or with others, the one that is waited for
    longest first.
    """
    calls: dict[int, list[CallSkew]] = {}
    for call in skews:
        for rank in call.last_ranks:
            calls.setdefault(rank, []).append(call)
    per_second = estimate_call_rate(skews)
    found = [
        _summarize_lateness(frozenset((rank,)), mine, len(skews), per_second)
        for rank, mine in calls.items()
    ]
    return sorted(found, key=lambda late: (-late.waited_share, -late.share, min(late.ranks)))


def _summarize_lateness(
    ranks: frozenset[int], late_skews: Sequence[CallSkew], call_count: int, per_second: float
) -> LatenessStats:
    """Of ``mine``, the calls in which all of these came last."""
    usual = _time_weighted_median(_cap_outliers([call.lag_s for call in late_skews], call_count))
    counted = [call.lag_s for call in late_skews if call.lag_s >= TRIVIAL_LAG_FRACTION * usual]
    waited = _share_of_time(late_skews, call_count, per_second)
    return LatenessStats(
        ranks=ranks,
        late_calls=len(counted),
        share=len(counted) / call_count,
        lag_s=statistics.median(counted),
        waited_share=waited,
    )


def _share_of_time(late_skews: Sequence[CallSkew], call_count: int, per_second: float) -> float:
    return min(
        1.0,
        sum(_cap_outliers([call.lost_s for call in late_skews], call_count))
        / call_count
        * per_second,
    )


def _cap_outliers(durations: Sequence[float], call_count: int) -> list[float]:
    """What is longer than what comes often counts only as much."""
    most = sorted(durations, reverse=True)[
        min(max(1, int(MIN_LATE_SHARE * call_count)), len(durations) - 1)
    ]
    return [min(one, most) for one in durations]


def _time_weighted_median(lags: Iterable[float]) -> float:
    """The delay up to which half of all time is lost: a rank may be far behind in one call of a
    step, and just last in the others.
    """
    ordered = sorted(lags)
    half, lost = sum(ordered) / 2, 0.0
    for lag in ordered:
        lost += lag
        if lost >= half:
            return lag
    return ordered[-1]


def estimate_call_rate(skews: Sequence[CallSkew]) -> float:
    """Calls of the group in a second, those between the judged ones too."""
    if len(skews) < 2:
        return 0.0
    first, last = min(skews, key=lambda c: c.seq), max(skews, key=lambda c: c.seq)
    return (
        (last.seq - first.seq) / (last.last_arrival_at - first.last_arrival_at)
        if last.last_arrival_at > first.last_arrival_at
        else 0.0
    )


def find_straggler(
    skews: Sequence[CallSkew], latecomers: Sequence[LatenessStats]
) -> LatenessStats | None:
    """Whom a group waits for, one rank or several that are late together: again and again, most of
    the time that is waited at all, and so long that the job feels it. ``late`` is what `latecomers`
    makes of the same calls.
    """
    if (
        len(skews) < MIN_CALLS
        or max(c.last_arrival_at for c in skews) - min(c.last_arrival_at for c in skews)
        < MIN_SPAN_S
    ):
        return None
    per_second = estimate_call_rate(skews)
    everybody = _share_of_time(skews, len(skews), per_second)
    ranks = frozenset().union(
        *(one.ranks for one in latecomers if one.waited_share >= MIN_WAIT_SHARE * everybody)
    )
    mine = [call for call in skews if ranks <= call.last_ranks]
    if not ranks or not mine:
        return None
    worst = _summarize_lateness(ranks, mine, len(skews), per_second)
    return (
        worst
        if worst.share >= MIN_LATE_SHARE
        and worst.waited_share >= max(MIN_JOB_TIME_SHARE, MIN_WAIT_SHARE * everybody)
        and worst.lag_s >= MIN_LAG_S
        else None
    )


def find_straggler_causes(
    stragglers: Mapping[int, tuple[LatenessStats, frozenset[int]]],
) -> dict[int, frozenset[int]]:
    """Groups whose stragglers may only be late because they wait for another rank: that one, by
    group.

    ``named`` are the groups that have stragglers, by any number: these and the group's members. Who
    waits for somebody in one group comes late to its next one, unless all that it meets there have
    waited with it.
    """
    suspects = frozenset().union(*(late.ranks for late, _ in stragglers.values()))
    waits: dict[
        int, list[int]
    ] = {}  # by rank that is late: the groups in which it waits for another one
    for number, (late, members) in stragglers.items():
        for rank in (members & suspects) - late.ranks:
            waits.setdefault(rank, []).append(number)
    found: dict[int, frozenset[int]] = {}
    for number, (late, members) in stragglers.items():
        reasons = []
        for rank in late.ranks:
            held = [
                stragglers[i][0]
                for i in waits.get(rank, ())
                if stragglers[i][0].waited_share >= late.waited_share / 2
                and not members <= stragglers[i][1]
            ]
            reasons.append(
                max(held, key=lambda other: other.waited_share).ranks if held else frozenset()
            )
        if all(reasons):
            found[number] = frozenset().union(*reasons)
    return found


def format_straggler(
    late: LatenessStats, group: str, error_s: float, *, queued: bool = False
) -> str:
    """What is claimed of stragglers; less where calls are ``queued`` on a device and no thread
    waits in them.

    >>> sentence(Late(ranks=frozenset({3}), calls=46, share=0.92, lag=0.0402, waited=0.45), "dp_1", 0.0)
    'rank 3 comes last in 92 % of the calls of dp_1, 40 ms after the others, which wait for it 45 % of the time'
    """
    unsure = f" (± {format_duration(error_s)})" if error_s >= 0.05 * late.lag_s else ""
    comes, it = ("comes", "it") if len(late.ranks) == 1 else ("come", "them")
    waited = (
        "as their threads make them"
        if queued
        else f"which wait for {it} {100 * late.waited_share:.0f} % of the time"
    )
    return (
        f"{truncate_end(name_ranks(late.ranks), 60)} {comes} last in {100 * late.share:.0f} % of"
        f" the calls of {group}, {format_duration(late.lag_s)}{unsure} after the others, {waited}"
    )


def format_duration(seconds: float) -> str:
    """
    >>> duration(0.0402), duration(2.5), duration(0.000031), duration(0.0012)
    ('40 ms', '2.5 s', '31 µs', '1.2 ms')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            amount = seconds / size
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"
