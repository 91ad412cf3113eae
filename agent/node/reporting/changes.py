"""What a host whose heartbeats are seldom tells before the next one is due: what is rare, and what
it alone can know.

That all its ranks wait for the same operation can wait: other hosts say so, too. That only some of
them do cannot, since whoever does not may be what all others wait for; nor that all members of a
group are here, in a call that does not finish.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_WAIT_S, NOT_RUNNING_STATES
from hangwatch.ring.snapshot import StreamState

from ..discovery.watched import Watched


@dataclass(frozen=True, slots=True)
class _Made:
    """A process has made so many groups in a world."""

    key: str
    world: int  # by the number of its sequence of set-up calls
    groups: int


class News:
    """What the server does not know yet, where it wants to know early."""

    def __init__(self) -> None:
        self._within_s: float | None = None  # once between two heartbeats
        self._told: frozenset[Hashable] | None = None

    @property
    def wanted(self) -> bool:
        """The server hears this host seldom."""
        return self._told is not None

    def look(self, watched: Iterable[Watched]) -> tuple[float, bool] | None:
        """In how many seconds to tell it, where there is news, and whether that is urgent: groups
        are made on all hosts at once.
        """
        if (
            self._within_s is None
            or self._told is None
            or not (fresh := found(watched) - self._told)
        ):
            return None
        within_s, self._within_s = self._within_s, None
        urgent = any(not isinstance(item, _Made) for item in fresh)
        return random.uniform(
            0.0, within_s
        ), urgent  # what made it may have made it on all hosts at once

    def told(self, watched: Iterable[Watched]) -> None:
        """A heartbeat tells how things are."""
        if self._told is not None:
            self._told = found(watched)

    def answered(self, watched: Iterable[Watched], within_s: float | None) -> None:
        """The server wants to be told within so many seconds, or not before the next heartbeat."""
        self._within_s = within_s
        if within_s is not None and self._told is None:
            self._told = found(watched)


def found(watched: Iterable[Watched]) -> frozenset[Hashable]:
    """All of it that there is now: what was there before is no news. Pure."""
    alive = [w for w in watched if w.ended is None and w.snapshot is not None]
    return frozenset(
        [item for w in alive for item in _of_one(w)] + _apart(alive) + _complete(alive)
    )


def _of_one(w: Watched) -> Iterator[Hashable]:
    assert w.snapshot is not None
    if w.activity.state in NOT_RUNNING_STATES and not w.paused:
        yield w.key, "state", w.activity.state
    if w.snapshot.pulse_s >= FROZEN_AFTER_S:
        yield w.key, "pulse"
    for sequence in w.snapshot.streams:
        if sequence.kind is StreamKind.SETUP:  # groups are not made all the time
            yield _Made(w.key, sequence.uid, sequence.entered)
    for uid in w.history.shared:
        yield w.key, "shared", uid


def _apart(alive: list[Watched]) -> list[Hashable]:
    """The calls in which ranks stand, where others do not, or stand in another operation."""
    stands = [
        (w.key, w.history.ops.get(s.uid, ""), s.uid, s.entered)
        for w in alive
        if (s := _stands(w)) is not None
    ]
    if not stands or (len(stands) == len(alive) and len({op for _, op, _, _ in stands}) == 1):
        return []
    return [tuple(stands)]


def _complete(alive: list[Watched]) -> list[Hashable]:
    """The calls in which all members of a group stand, where all of these are on this host."""
    inside: dict[tuple[str, tuple[int, ...], int], set[int]] = {}
    for w in alive:
        s = _stands(w)
        if (
            s is not None
            and w.identity is not None
            and s.kind is StreamKind.COLLECTIVE
            and 1 < len(s.group.ranks) <= len(alive)
        ):
            inside.setdefault((s.group.name, s.group.ranks, s.entered), set()).add(w.identity.rank)
    return [call for call, ranks in inside.items() if ranks.issuperset(call[1])]


def _stands(w: Watched) -> StreamState | None:
    """The sequence in whose unfinished call a rank has stood the longest, where that is long."""
    assert w.snapshot is not None
    pending = [
        s for s in w.snapshot.streams if s.pending_s is not None and s.pending_s >= MIN_WAIT_S
    ]
    return max(pending, key=lambda s: s.pending_s or 0.0, default=None)
