"""Who comes last in a group's calls, how often and by how much. Pure.

An arrival is the moment at which a rank makes a call; the same calls of all members are compared. Clocks of hosts differ, and what is
less than they are known to agree is nobody's delay. Only calls in which every member waits for all others are looked at
(`hangwatch.performance.MUTUAL`): a late rank holds the others up in no other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FEWEST_CALLS = 30  # that say something
SHORTEST_S = 5.0  # for which they must reach
OFTEN = 0.05  # of the calls: a delay that is not reached so often is an event, not a habit, such as a checkpoint
BY_FAR = 0.75  # of all the time that is waited for anybody, and is waited for a straggler
COSTLY = 0.05  # of the time of the job
NOTICED_S = 0.001  # seconds
TRIFLE = 0.1  # of its usual delay: less is not counted as coming last


class Arrival(NamedTuple):
    """``at`` in seconds on a clock that is common to all, give or take ``error``; without that among those of one ``host``."""

    rank: int
    at: float
    error: float = 0.0
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One call, as all members came to it. Seconds."""

    seq: int
    at: float  # when the last one came
    last: int | None  # None: the clocks do not tell who it was
    lag: float  # of the last one after the next to last
    spread: float  # from the first to the last; 0 where it is less than the error
    error: float  # of the spread


def judge(seq: int, arrivals: Sequence[Arrival]) -> Judged:
    """Needs two arrivals or more."""
    ordered = sorted(arrivals, key=lambda a: a.at)
    first, last = ordered[0], ordered[-1]
    decided = all(last.at - other.at > apart(last, other) for other in _contenders(ordered))
    spread, error = last.at - first.at, apart(first, last)
    return Judged(
        seq=seq,
        at=last.at,
        last=last.rank if decided else None,
        lag=last.at - ordered[-2].at if decided else 0.0,
        spread=spread if spread > error else 0.0,
        error=error,
    )


def apart(one: Arrival, other: Arrival) -> float:
    """By how much the difference of two arrivals may be wrong."""
    return 0.0 if one.host == other.host else one.error + other.error


def _contenders(ordered: Sequence[Arrival]) -> Iterable[Arrival]:
    """Who may have come last in truth: the next to last of all, and each that its host's clock may have put too early."""
    last, widest = ordered[-1], max(a.error for a in ordered)
    for other in reversed(ordered[:-1]):
        yield other
        if last.at - other.at > last.error + widest:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How a rank comes to a group's calls, over those that were judged."""

    rank: int
    calls: int  # in which it came last, by more than a trifle
    share: float  # these, of all
    lag: float  # seconds after the others: the median of these calls
    waited: float  # share of the time in which the others wait for it


def latecomers(judged: Sequence[Judged]) -> list[Late]:
    """Every rank that came last in some call, the one that is waited for longest first. Delays beyond those that it has often count
    as these.
    """
    lags: dict[int, list[float]] = {}
    for call in judged:
        if call.last is not None:
            lags.setdefault(call.last, []).append(call.lag)
    per_second, events = rate(judged), max(1, int(OFTEN * len(judged)))
    found = []
    for rank, mine in lags.items():
        most = sorted(mine, reverse=True)[min(events, len(mine) - 1)]
        capped = [min(lag, most) for lag in mine]
        usual = _where_time_goes(capped)
        counted = [lag for lag in mine if lag >= TRIFLE * usual]
        waited = min(1.0, sum(capped) / len(judged) * per_second)
        late = Late(rank=rank, calls=len(counted), share=len(counted) / len(judged), lag=statistics.median(counted), waited=waited)
        found.append(late)
    return sorted(found, key=lambda late: (-late.waited, -late.share, late.rank))


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
    """The one rank that a group waits for, if there is one: again and again, for longer than for all others together, and so long
    that the job feels it. ``late`` is what `latecomers` makes of the same calls.
    """
    if len(judged) < FEWEST_CALLS or not late or max(c.at for c in judged) - min(c.at for c in judged) < SHORTEST_S:
        return None
    worst = late[0]
    by_far = worst.waited >= BY_FAR * sum(other.waited for other in late)
    return worst if by_far and worst.share >= OFTEN and worst.waited >= COSTLY and worst.lag >= NOTICED_S else None


def because_of(named: Mapping[int, tuple[Late, frozenset[int]]]) -> dict[int, int]:
    """Groups whose straggler may only be late because it waits for another rank: that one, by group.

    ``named`` are the groups that have a straggler, by any number: it and the group's members. Who waits for somebody in one group comes
    late to its next one, unless all that it meets there have waited with it.
    """
    waits: dict[int, list[int]] = {}  # by rank that is late: the groups in which it waits for another one
    for number, (late, members) in named.items():
        for rank in members & {other.rank for other, _ in named.values()} - {late.rank}:
            waits.setdefault(rank, []).append(number)
    found: dict[int, int] = {}
    for number, (late, members) in named.items():
        held = [named[i][0] for i in waits.get(late.rank, ()) if named[i][0].waited >= late.waited / 2 and not members <= named[i][1]]
        if held:
            found[number] = max(held, key=lambda other: other.waited).rank
    return found


def sentence(late: Late, group: str, error: float) -> str:
    """What is claimed of a straggler.

    >>> sentence(Late(rank=3, calls=46, share=0.92, lag=0.0402, waited=0.45), "dp_1", 0.0)
    'rank 3 comes last in 92 % of the calls of dp_1, 40 ms after the others, which wait for it 45 % of the time'
    """
    unsure = f" (± {duration(error)})" if error >= 0.05 * late.lag else ""
    return (
        f"rank {late.rank} comes last in {100 * late.share:.0f} % of the calls of {group}, {duration(late.lag)}{unsure} after the others, "
        f"which wait for it {100 * late.waited:.0f} % of the time"
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
