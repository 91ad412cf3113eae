"""Detects changes that a host with infrequent heartbeats reports before the next one is due: rare
changes, and those that only this host can see.

If all its ranks wait in the same operation, that need not be reported early: the other hosts report
it too. It is reported early if only some of them wait, since a rank that does not may be the one
that all others wait for; or if all members of a group are on this host, in a call that does not
complete.
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
    """A process has created this many groups in one world."""

    process_key: str
    setup_uid: int  # of the stream of set-up calls
    group_count: int


class ChangeDetector:
    """Detects what the server does not know yet, if it wants to be informed early."""

    def __init__(self) -> None:
        self._report_within_s: float | None = None  # at most one early report between heartbeats
        self._reported_changes: frozenset[Hashable] | None = None

    @property
    def is_enabled(self) -> bool:
        """The heartbeats of this host are infrequent."""
        return self._reported_changes is not None

    def check_changes(self, watched: Iterable[WatchedProcess]) -> tuple[float, bool] | None:
        """If something changed: in how many seconds to report it, and whether the report is urgent.
        Group creation is not: all hosts create groups at the same time.
        """
        if self._report_within_s is None or self._reported_changes is None:
            return None
        new_changes = find_changes(watched) - self._reported_changes
        if not new_changes:
            return None
        within_s = self._report_within_s
        self._report_within_s = None
        is_urgent = any(not isinstance(change, _GroupCreation) for change in new_changes)
        # Random, since the cause may have changed all hosts at the same time.
        return random.uniform(0.0, within_s), is_urgent

    def mark_reported(self, watched: Iterable[WatchedProcess]) -> None:
        """A heartbeat reports the present state."""
        if self._reported_changes is not None:
            self._reported_changes = find_changes(watched)

    def apply_reply(self, watched: Iterable[WatchedProcess], within_s: float | None) -> None:
        """The server wants changes within ``within_s`` seconds; None: with the next heartbeat."""
        self._report_within_s = within_s
        if within_s is not None and self._reported_changes is None:
            self._reported_changes = find_changes(watched)


def find_changes(watched: Iterable[WatchedProcess]) -> frozenset[Hashable]:
    """Everything that is worth an early report at this moment, whether or not it was reported. Pure."""
    alive = [process for process in watched if process.exit is None and process.snapshot]
    changes = _find_partial_waits(alive) + _find_complete_waits(alive)
    for process in alive:
        changes.extend(_iter_process_changes(process))
    return frozenset(changes)


def _iter_process_changes(process: WatchedProcess) -> Iterator[Hashable]:
    assert process.snapshot is not None
    state = process.activity.state
    if state in NOT_RUNNING_STATES and not process.is_paused:
        yield process.key, "state", state
    if process.snapshot.pulse_s >= FROZEN_AFTER_S:
        yield process.key, "pulse"
    for stream in process.snapshot.streams:
        if stream.kind is StreamKind.SETUP:  # rare
            yield _GroupCreation(process.key, stream.uid, stream.entered)
    for uid in process.history.first_concurrent:
        yield process.key, "shared", uid


def _find_partial_waits(alive: list[WatchedProcess]) -> list[Hashable]:
    """The calls in which ranks are blocked while others are not, or are blocked in another
    operation.
    """
    blocked_calls: list[tuple[str, str, int, int]] = []
    blocked_ops: set[str] = set()
    for process in alive:
        stream = _find_longest_blocked_stream(process)
        if stream is None:
            continue
        op = process.history.newest_ops.get(stream.uid, "")
        blocked_ops.add(op)
        blocked_calls.append((process.key, op, stream.uid, stream.entered))
    if not blocked_calls:
        return []
    if len(blocked_calls) == len(alive) and len(blocked_ops) == 1:
        return []
    return [tuple(blocked_calls)]


def _find_complete_waits(alive: list[WatchedProcess]) -> list[Hashable]:
    """The calls in which all members of a group are blocked, if all of them are on this host."""
    blocked_ranks: dict[tuple[str, tuple[int, ...], int], set[int]] = {}
    for process in alive:
        stream = _find_longest_blocked_stream(process)
        if stream is None or process.identity is None:
            continue
        members = stream.group.ranks
        if stream.kind is StreamKind.COLLECTIVE and 1 < len(members) <= len(alive):
            group = stream.group
            call = (group.foreign or group.name, members, stream.entered)
            rank = group.number if group.foreign else process.identity.rank
            blocked_ranks.setdefault(call, set()).add(rank)
    return [call for call, ranks in blocked_ranks.items() if ranks.issuperset(call[1])]


def _find_longest_blocked_stream(process: WatchedProcess) -> StreamState | None:
    """The stream whose unfinished call has blocked the rank the longest, if that is long enough."""
    assert process.snapshot is not None
    longest: StreamState | None = None
    longest_s = MIN_WAIT_S
    for stream in process.snapshot.active_streams:
        pending_s = stream.pending_s
        if pending_s is None or pending_s < longest_s:
            continue
        if longest is None or pending_s > longest_s:
            longest, longest_s = stream, pending_s
    return longest
