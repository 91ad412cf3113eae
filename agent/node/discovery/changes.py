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

from .watched import WatchedProcess


@dataclass(frozen=True, slots=True)
class _GroupCreation:
    """A process has made so many groups in a world."""

    process_key: str
    setup_uid: int  # by the number of its sequence of set-up calls
    group_count: int


class ChangeDetector:
    """What the server does not know yet, where it wants to know early."""

    def __init__(self) -> None:
        self._report_within_s: float | None = None  # once between two heartbeats
        self._reported_changes: frozenset[Hashable] | None = None

    @property
    def is_enabled(self) -> bool:
        """The server hears this host seldom."""
        return self._reported_changes is not None

    def check_changes(self, watched: Iterable[WatchedProcess]) -> tuple[float, bool] | None:
        """In how many seconds to tell it, where there is news, and whether that is urgent: groups
        are made on all hosts at once.
        """
        if (
            self._report_within_s is None
            or self._reported_changes is None
            or not (fresh := find_changes(watched) - self._reported_changes)
        ):
            return None
        within_s, self._report_within_s = self._report_within_s, None
        urgent = any(not isinstance(item, _GroupCreation) for item in fresh)
        return (
            random.uniform(0.0, within_s),
            urgent,
        )  # what made it may have made it on all hosts at once

    def mark_reported(self, watched: Iterable[WatchedProcess]) -> None:
        """A heartbeat tells how things are."""
        if self._reported_changes is not None:
            self._reported_changes = find_changes(watched)

    def apply_reply(self, watched: Iterable[WatchedProcess], within_s: float | None) -> None:
        """The server wants to be told within so many seconds, or not before the next heartbeat."""
        self._report_within_s = within_s
        if within_s is not None and self._reported_changes is None:
            self._reported_changes = find_changes(watched)


def find_changes(watched: Iterable[WatchedProcess]) -> frozenset[Hashable]:
    """All of it that there is now: what was there before is no news. Pure."""
    alive = [w for w in watched if w.exit is None and w.snapshot is not None]
    return frozenset(
        [item for w in alive for item in _iter_process_changes(w)]
        + _find_partial_waits(alive)
        + _find_complete_waits(alive)
    )


def _iter_process_changes(w: WatchedProcess) -> Iterator[Hashable]:
    assert w.snapshot is not None
    if w.activity.state in NOT_RUNNING_STATES and not w.is_paused:
        yield w.key, "state", w.activity.state
    if w.snapshot.pulse_s >= FROZEN_AFTER_S:
        yield w.key, "pulse"
    for sequence in w.snapshot.streams:
        if sequence.kind is StreamKind.SETUP:  # groups are not made all the time
            yield _GroupCreation(w.key, sequence.uid, sequence.entered)
    for uid in w.history.first_concurrent:
        yield w.key, "shared", uid


def _find_partial_waits(alive: list[WatchedProcess]) -> list[Hashable]:
    """The calls in which ranks stand, where others do not, or stand in another operation."""
    stands = [
        (w.key, w.history.newest_ops.get(s.uid, ""), s.uid, s.entered)
        for w in alive
        if (s := _find_longest_blocked_stream(w)) is not None
    ]
    if not stands or (len(stands) == len(alive) and len({op for _, op, _, _ in stands}) == 1):
        return []
    return [tuple(stands)]


def _find_complete_waits(alive: list[WatchedProcess]) -> list[Hashable]:
    """The calls in which all members of a group stand, where all of these are on this host."""
    inside: dict[tuple[str, tuple[int, ...], int], set[int]] = {}
    for w in alive:
        s = _find_longest_blocked_stream(w)
        if (
            s is not None
            and w.identity is not None
            and s.kind is StreamKind.COLLECTIVE
            and 1 < len(s.group.ranks) <= len(alive)
        ):
            inside.setdefault((s.group.name, s.group.ranks, s.entered), set()).add(w.identity.rank)
    return [call for call, ranks in inside.items() if ranks.issuperset(call[1])]


def _find_longest_blocked_stream(w: WatchedProcess) -> StreamState | None:
    """The sequence in whose unfinished call a rank has stood the longest, where that is long."""
    assert w.snapshot is not None
    pending = [
        s for s in w.snapshot.streams if s.pending_s is not None and s.pending_s >= MIN_WAIT_S
    ]
    return max(pending, key=lambda s: s.pending_s or 0.0, default=None)
