"""Whether a host is steady: its ranks make calls or compute, and none of them has been in a call for
long. Such a host is read and reported less often. When it stops being steady, that is reported immediately.

A look at a rank takes microseconds, and reads its whole ring only where its process stopped making
calls. What only /proc or a whole ring shows is found when the host is next read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.ring.devices import DeviceEntry
from hangwatch.ring.layout import LiveWord, RingError
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import StreamState

from ..reporting.stream_updates import BLOCKED_AFTER_S
from .watched import FLOOD_DIVISOR, WatchedProcess

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
