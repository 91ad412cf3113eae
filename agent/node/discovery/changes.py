"""Detects changes that a host with infrequent heartbeats reports before the next one is due: rare
changes, and those that only this host can see.

If all its ranks wait in the same operation, that need not be reported early: the other hosts report
it too. It is reported early if only some of them wait, since a rank that does not may be the one
that all others wait for; or if all members of a group are on this host, in a call that does not
complete.

MERGED: Whether a host is steady: its ranks make calls or compute, and none of them has been in a call for
long. Such a host is read and reported less often. When it stops being steady, that is reported immediately.

A look at a rank takes microseconds, and reads its whole ring only where its process stopped making
calls. What only /proc or a whole ring shows is found when the host is next read.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_WAIT_S, NOT_RUNNING_STATES
from hangwatch.ring.layout import LiveWord, RingError
from hangwatch.ring.parts import DeviceEntry
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import StreamState

from ..reporting.updates import BLOCKED_AFTER_S
from .watched import FLOOD_DIVISOR, WatchedProcess


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


SETTLE_NS = 2_000_000_000  # how long a host must be quiet before it counts as steady
_MAX_PULSE_AGE_NS = 1_000_000_000  # the recorder's thread runs ten times a second
_NEVER_NS = 1 << 63
# A change to any of these is reported immediately.
_get_reported_words = operator.itemgetter(
    LiveWord.LIFECYCLE,
    LiveWord.DROPPED,
    LiveWord.ERRORS,
    LiveWord.OFF,
    LiveWord.PHASE,
    LiveWord.PHASE_NS,
    LiveWord.PHASE_LIMIT_NS,
    LiveWord.SEQUENCES,
    LiveWord.DEVICE_STATUS,
)


@dataclass(slots=True)
class _Look:
    """What the last look at a process saw."""

    reported_words: tuple[int, ...] = ()
    record_count: int = 0
    is_between_calls: bool = False  # all calls up to then are complete
    is_quiet: bool = False
    is_ring_filling: bool = False  # much of it was written since it was read


@dataclass(slots=True)
class SteadinessCheck:
    """``next_block_ns``: when a rank will have been in a call for long, as far as that is known."""

    is_steady: bool = False
    next_block_ns: int = _NEVER_NS
    _quiet_since_ns: int = 0  # 0: something happened at the last look
    _looks: dict[str, _Look] = field(default_factory=dict)  # by process key

    @property
    def is_reading_due(self) -> bool:
        """A ring may soon overwrite what was not read."""
        return any(look.is_ring_filling for look in self._looks.values())

    def look_at_processes(self, watched: Iterable[WatchedProcess], now_ns: int) -> bool:
        """Looks at all processes. Returns True if a process that was quiet at the last look no longer is."""
        looks: dict[str, _Look] = {}
        next_block_ns = _NEVER_NS
        has_urgent_changes = False
        for process in watched:
            if process.exit is not None and process.exit_acked_ns:
                continue
            look = looks[process.key] = self._looks.get(process.key) or _Look()
            quiet_until_ns = _find_end_of_quiet(process, look, now_ns)
            was_quiet, look.is_quiet = look.is_quiet, quiet_until_ns > now_ns
            has_urgent_changes |= was_quiet and not look.is_quiet
            if look.is_quiet:
                next_block_ns = min(next_block_ns, quiet_until_ns)
        self._looks = looks
        self.next_block_ns = next_block_ns
        if not looks or not all(look.is_quiet for look in looks.values()):
            self._quiet_since_ns = 0
        elif not self._quiet_since_ns:
            self._quiet_since_ns = now_ns
        since_ns = self._quiet_since_ns
        self.is_steady = bool(since_ns) and now_ns - since_ns >= SETTLE_NS
        return has_urgent_changes


def _find_end_of_quiet(process: WatchedProcess, look: _Look, now_ns: int) -> int:
    """When there will be something to report about a process, as far as that is known; not later
    than ``now_ns`` if there is something already.
    """
    reader = _find_intact_reader(process)
    if process.exit is not None or reader is None or process.pidfd is None or process.is_paused:
        return now_ns
    words = reader.read_live_words()
    reported_words = _get_reported_words(words)
    is_changed = reported_words != look.reported_words
    look.reported_words = reported_words
    if is_changed or now_ns - words[LiveWord.PULSE_NS] > _MAX_PULSE_AGE_NS:
        return now_ns
    if reader.parts.checks.count:  # the results of checks are reported as they come
        return now_ns
    if words[LiveWord.RECORDS] > look.record_count or reader.has_record(look.record_count):
        look.record_count = reader.count_records()
        look.is_between_calls = False
        unread = reader.record_capacity // FLOOD_DIVISOR
        look.is_ring_filling = reader.has_record(process.history.cursor + unread)
        return now_ns + int(BLOCKED_AFTER_S * 1e9)
    if look.is_between_calls:
        return _NEVER_NS
    return _find_end_of_pause(reader, look, now_ns)


def _find_intact_reader(process: WatchedProcess) -> RingReader | None:
    """The ring's reader; None if its file was replaced or truncated."""
    if process.ring is None or process.reader is None:
        return None
    try:
        inode, reader = process.ring.refresh_reader(process.ring_inode, process.reader)
    except (OSError, RingError):
        return None
    return reader if inode == process.ring_inode else None


def _find_end_of_pause(reader: RingReader, look: _Look, now_ns: int) -> int:
    """When a process that makes no calls will have been in one for long."""
    streams, devices = reader.read_positions(now_ns)
    ages_s = list_unfinished_ages(streams, devices, now_ns)
    look.is_between_calls = not ages_s
    if not ages_s:
        return _NEVER_NS
    return now_ns + int((BLOCKED_AFTER_S - max(ages_s)) * 1e9)


def list_unfinished_ages(
    streams: Iterable[StreamState], devices: Iterable[DeviceEntry], now_ns: int
) -> list[float]:
    """The age in seconds of the oldest unfinished call of each stream that has one. Where completion
    is unknown, only the newest call of the process counts, unless its device has completed all.
    """
    completed_ns = {d.uid: d.read_ns for d in devices if not d.is_behind_host}
    used = [stream for stream in streams if stream.entered]
    ages_s = [stream.pending_s for stream in used if stream.pending_s is not None]
    newest = max(used, key=lambda stream: stream.get_entered_ns(now_ns), default=None)
    if newest is not None and newest.completed is None:
        entered_ns = newest.get_entered_ns(now_ns)
        if completed_ns.get(newest.uid, 0) < entered_ns:
            ages_s.append((now_ns - entered_ns) / 1e9)
    return ages_s
