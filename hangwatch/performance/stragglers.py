"""Who comes last in a group's calls, how often and by how much. Pure.

An arrival is the moment at which a rank makes a call; the same calls of all members are compared. Clocks of hosts differ, and what is
less than they are known to agree is nobody's delay. Only calls in which every member waits for all others are looked at
(`hangwatch.performance.distributions.MUTUAL`): a late rank holds the others up in no other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hangwatch.report.text import name_ranks, short

FEWEST_CALLS = 30  # that say something
SHORTEST_S = 5.0  # for which they must reach
OFTEN = 0.05  # of the calls: a delay that is not reached so often is an event, not a habit, such as a checkpoint
BY_FAR = 0.75  # of all the time that is waited for anybody, and is waited for stragglers
COSTLY = 0.05  # of the time of the job
NOTICED_S = 0.001  # seconds
MOST_LATE = 64  # ranks that may be late together
TRIFLE = 0.1  # of its usual delay: less is not counted as coming last


class Arrival(NamedTuple):
    """``at`` in seconds on a clock that is common to all, give or take ``error``; without that among those of one ``host``.

    ``since`` is how long ago the rank made its call before this one: it is not waited for longer than that, however late it is for
    calls that were made one upon another.
    """

    rank: int
    at: float
    error: float = 0.0
    host: str = ""
    since: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One call, as all members came to it. Seconds."""

    seq: int
    at: float  # when the last one came
    last: frozenset[int]  # who came after the widest gap, half of the members at most; empty: the clocks do not tell
    lag: float  # that gap
    lost: float  # how long the others waited for this call and for none before it
    spread: float  # from the first to the last; 0 where it is less than the error
    error: float  # of the spread


def judge(seq: int, arrivals: Sequence[Arrival]) -> Judged:
    """Needs two arrivals or more. Several that are late together, as all of a slow host, are one another's company, not its delay."""
    ordered = sorted(arrivals, key=lambda a: a.at)
    first, last, count = ordered[0], ordered[-1], len(ordered)
    cut = max(range(max(count - count // 2, count - MOST_LATE), count), key=lambda i: ordered[i].at - ordered[i - 1].at)
    lag = ordered[cut].at - ordered[cut - 1].at
    decided = lag > _apart(ordered[cut:], ordered[:cut])
    spread, error = last.at - first.at, _apart([first], [last])
    return Judged(
        seq=seq,
        at=last.at,
        last=frozenset(a.rank for a in ordered[cut:]) if decided else frozenset(),
        lag=lag if decided else 0.0,
        lost=min(lag, ordered[cut].since) if decided else 0.0,
        spread=spread if spread > error else 0.0,
        error=error,
    )


def _apart(some: Sequence[Arrival], others: Sequence[Arrival]) -> float:
    """By how much the difference of any two of their arrivals may be wrong, at the most."""
    if len({a.host for a in (*some, *others)}) == 1:
        return 0.0
    return max(a.error for a in some) + max(a.error for a in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How one rank, or several together, come to a group's calls, over those that were judged."""

    ranks: frozenset[int]
    calls: int  # in which they came last, by more than a trifle
    share: float  # these, of all
    lag: float  # seconds after the others: the median of these calls
    waited: float  # share of the time in which the others wait for them


def latecomers(judged: Sequence[Judged]) -> list[Late]:
    """Each rank that came last in some call, alone or with others, the one that is waited for longest first."""
    calls: dict[int, list[Judged]] = {}
    for call in judged:
        for rank in call.last:
            calls.setdefault(rank, []).append(call)
    per_second = rate(judged)
    found = [_late(frozenset((rank,)), mine, len(judged), per_second) for rank, mine in calls.items()]
    return sorted(found, key=lambda late: (-late.waited, -late.share, min(late.ranks)))


def _late(ranks: frozenset[int], mine: Sequence[Judged], count: int, per_second: float) -> Late:
    """Of ``mine``, the calls in which all of these came last."""
    usual = _where_time_goes(_without_events([call.lag for call in mine], count))
    counted = [call.lag for call in mine if call.lag >= TRIFLE * usual]
    waited = _share_of_time(mine, count, per_second)
    return Late(ranks=ranks, calls=len(counted), share=len(counted) / count, lag=statistics.median(counted), waited=waited)


def _share_of_time(mine: Sequence[Judged], count: int, per_second: float) -> float:
    return min(1.0, sum(_without_events([call.lost for call in mine], count)) / count * per_second)


def _without_events(durations: Sequence[float], calls: int) -> list[float]:
    """What is longer than what comes often counts only as much."""
    most = sorted(durations, reverse=True)[min(max(1, int(OFTEN * calls)), len(durations) - 1)]
    return [min(one, most) for one in durations]


def _where_time_goes(lags: Iterable[float]) -> float:
    """The delay up to which half of all time is lost: a rank may be far behind in one call of a step, and just last in the others."""
    ordered = sorted(lags)
    half, lost = sum(ordered) / 2, 0.0
    for lag in ordered:
        lost += lag
        if lost >= half:
            return lag
    return ordered[-1]


def rate(judged: Sequence[Judged]) -> float:
    """Calls of the group in a second, those between the judged ones too."""
    if len(judged) < 2:
        return 0.0
    first, last = min(judged, key=lambda c: c.seq), max(judged, key=lambda c: c.seq)
    return (last.seq - first.seq) / (last.at - first.at) if last.at > first.at else 0.0


def straggler(judged: Sequence[Judged], late: Sequence[Late]) -> Late | None:
    """Whom a group waits for, one rank or several that are late together: again and again, most of the time that is waited at all, and
    so long that the job feels it. ``late`` is what `latecomers` makes of the same calls.
    """
    if len(judged) < FEWEST_CALLS or max(c.at for c in judged) - min(c.at for c in judged) < SHORTEST_S:
        return None
    per_second = rate(judged)
    everybody = _share_of_time(judged, len(judged), per_second)
    ranks = frozenset().union(*(one.ranks for one in late if one.waited >= BY_FAR * everybody))
    mine = [call for call in judged if ranks <= call.last]
    if not ranks or not mine:
        return None
    worst = _late(ranks, mine, len(judged), per_second)
    return worst if worst.share >= OFTEN and worst.waited >= max(COSTLY, BY_FAR * everybody) and worst.lag >= NOTICED_S else None


def because_of(named: Mapping[int, tuple[Late, frozenset[int]]]) -> dict[int, frozenset[int]]:
    """Groups whose stragglers may only be late because they wait for another rank: that one, by group.

    ``named`` are the groups that have stragglers, by any number: these and the group's members. Who waits for somebody in one group
    comes late to its next one, unless all that it meets there have waited with it.
    """
    suspects = frozenset().union(*(late.ranks for late, _ in named.values()))
    waits: dict[int, list[int]] = {}  # by rank that is late: the groups in which it waits for another one
    for number, (late, members) in named.items():
        for rank in (members & suspects) - late.ranks:
            waits.setdefault(rank, []).append(number)
    found: dict[int, frozenset[int]] = {}
    for number, (late, members) in named.items():
        reasons = []
        for rank in late.ranks:
            held = [named[i][0] for i in waits.get(rank, ()) if named[i][0].waited >= late.waited / 2 and not members <= named[i][1]]
            reasons.append(max(held, key=lambda other: other.waited).ranks if held else frozenset())
        if all(reasons):
            found[number] = frozenset().union(*reasons)
    return found


def sentence(late: Late, group: str, error: float, *, queued: bool = False) -> str:
    """What is claimed of stragglers; less where calls are ``queued`` on a device and no thread waits in them.

    >>> sentence(Late(ranks=frozenset({3}), calls=46, share=0.92, lag=0.0402, waited=0.45), "dp_1", 0.0)
    'rank 3 comes last in 92 % of the calls of dp_1, 40 ms after the others, which wait for it 45 % of the time'
    """
    unsure = f" (± {duration(error)})" if error >= 0.05 * late.lag else ""
    comes, it = ("comes", "it") if len(late.ranks) == 1 else ("come", "them")
    waited = "as their threads make them" if queued else f"which wait for {it} {100 * late.waited:.0f} % of the time"
    return (
        f"{short(name_ranks(late.ranks), 60)} {comes} last in {100 * late.share:.0f} % of the calls of {group}, {duration(late.lag)}"
        f"{unsure} after the others, {waited}"
    )


def duration(seconds: float) -> str:
    """
    >>> duration(0.0402), duration(2.5), duration(0.000031), duration(0.0012)
    ('40 ms', '2.5 s', '31 µs', '1.2 ms')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            amount = seconds / size
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"
