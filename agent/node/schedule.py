"""When a host is scanned, and when it reports: at the interval that the server sets, and immediately
when its set of blocked ranks or one of its processes changes.

A steady host, whose ranks make calls or compute and have not been in a call for long, is read and
reported less often, which halves the CPU time of its node agent. `SteadinessCheck` samples each rank
instead, in microseconds, and reads its whole ring only where the process stopped making calls. The
end of steadiness is reported immediately; what only /proc or a whole ring shows, at the next reading.

Where the interval is long because hosts are many, not every host that blocks reports immediately:
100,000 ranks may block at the same moment. `find_changes` gives the changes that only this host can
see. If all of its ranks wait in the same operation, the other hosts report that as well. If only some
of them wait, a rank that does not may be the one that all others wait for. And if all members of a
group are on this host, no other one sees that their call does not complete.
"""

from __future__ import annotations

import operator
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import BLOCKED_AFTER_S, FROZEN_AFTER_S, MIN_WAIT_S, NOT_RUNNING_STATES
from hangwatch.protocol.heartbeat import HeartbeatReply
from hangwatch.ring.layout import LiveWord, RingError
from hangwatch.ring.parts import DeviceEntry
from hangwatch.ring.reader import StreamState

from .discovery.watched import FLOOD_DIVISOR, WatchedProcess
from .discovery.watchlist import Watchlist
from .requests.builder import RecorderBuilder
from .requests.commands import make_sample_order
from .stacks.sampler import StackSampler

# Heartbeats that are sent early, because a rank is in a call for long, have this distance at least.
EARLY_INTERVAL_NS = 1_000_000_000
SETTLE_NS = 2_000_000_000  # how long a host must be quiet before it counts as steady
_MAX_PULSE_AGE_NS = 1_000_000_000  # the recorder's thread runs ten times a second
_SCAN_INTERVAL_NS = 500_000_000
_FAST_SCAN_INTERVAL_NS = 200_000_000  # used while processes start, or a ring fills quickly
_STARTUP_WINDOW_NS = 10_000_000_000  # more processes are expected for this long after a new one
_FIRST_PROCESS_TIMEOUT_S = 5.0
_STEADY_SCAN_INTERVAL_NS = 250_000_000  # between two scans of a steady host
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


class _GroupCreation(NamedTuple):
    process_key: str
    setup_uid: int  # the stream of set-up calls
    group_count: int


@dataclass(slots=True)
class ReportSchedule:
    """When the next heartbeat is due, and whether it is urgent, in monotonic nanoseconds."""

    next_ns: int
    _unsteady_ns: int = _NEVER_NS  # when it is due if the host does not remain steady
    _next_early_ns: int = 0
    _is_hastened: bool = False  # the next heartbeat is sent immediately, and is urgent
    # Two other reasons make it urgent, and do not hasten it.
    _has_urgent_changes: bool = False
    _is_server_waiting: bool = False
    # What the server knows of the changes below; None while heartbeats are frequent.
    _reported_changes: frozenset[Hashable] | None = None
    _report_within_s: float | None = None  # None after one early heartbeat

    @property
    def is_infrequent(self) -> bool:
        """Heartbeats are infrequent, so that changes are reported between them."""
        return self._reported_changes is not None

    def is_due(self, now_ns: int, *, may_hasten: bool) -> bool:
        return (may_hasten and self._is_hastened) or now_ns >= self.next_ns

    def hasten(self) -> None:
        """The next heartbeat is sent immediately. `Outbox` calls this for each reply, and `Watchlist`
        for each process that has ended.
        """
        self._is_hastened = True

    def delay(self, until_ns: int) -> None:
        """The next heartbeat is due then, and not earlier because of the end of steadiness."""
        self.next_ns = self._unsteady_ns = until_ns

    def bring_forward(self, at_ns: int) -> None:
        """The next heartbeat is due then at the latest."""
        self.next_ns = min(self.next_ns, at_ns)

    def apply_scan(
        self, watched: Iterable[WatchedProcess], now_ns: int, *, has_urgent_changes: bool
    ) -> None:
        """Brings the next heartbeat forward if an unsteady host has something to report."""
        self.bring_forward(self._unsteady_ns)
        if self._reported_changes is None:
            if has_urgent_changes and now_ns >= self._next_early_ns:
                self._next_early_ns = now_ns + EARLY_INTERVAL_NS
                self.bring_forward(now_ns)
            return
        if self._report_within_s is None:
            return
        new_changes = find_changes(watched) - self._reported_changes
        if new_changes:
            # The creation of a group is not urgent, since all hosts create groups at the same time.
            self._has_urgent_changes = any(
                not isinstance(change, _GroupCreation) for change in new_changes
            )
            # The delay is random, since the cause may have changed all hosts at the same time.
            within_s = random.uniform(0.0, self._report_within_s)
            self.bring_forward(now_ns + int(within_s * 1e9))
            self._report_within_s = None

    def start_report(self, watched: Iterable[WatchedProcess], next_ns: int) -> bool:
        """A heartbeat reports the present state; without a reply, the next one is due at ``next_ns``.
        Returns whether it is urgent.
        """
        is_urgent = self._is_hastened or self._has_urgent_changes or self._is_server_waiting
        self._is_hastened = self._has_urgent_changes = False
        if self._reported_changes is not None:
            self._reported_changes = find_changes(watched)
        self.delay(next_ns)
        return is_urgent

    def apply_reply(
        self,
        reply: HeartbeatReply,
        watched: Iterable[WatchedProcess],
        now_ns: int,
        *,
        is_steady: bool,
    ) -> None:
        """Applies when the server wants the next heartbeat."""
        self.delay(now_ns + int(reply.interval_s * 1e9))
        if is_steady and reply.steady_s is not None:
            self.next_ns = now_ns + int(reply.steady_s * 1e9)
        self._is_server_waiting = reply.urgent
        self._report_within_s = reply.changes_s
        if reply.changes_s is not None and self._reported_changes is None:
            self._reported_changes = find_changes(watched)


def find_changes(watched: Iterable[WatchedProcess]) -> frozenset[Hashable]:
    """Everything that is worth an early report at this moment, whether or not it was reported. Pure."""
    changes: set[Hashable] = set()
    alive_count = 0
    # The processes in which a call has been blocked for long, with the stream of the oldest one
    blocked = []
    for process in watched:
        ring = process.snapshot
        if process.exit is not None or ring is None:
            continue
        alive_count += 1
        state = process.activity.state
        if state in NOT_RUNNING_STATES:
            changes.add((process.key, "state", state))
        if ring.pulse_s >= FROZEN_AFTER_S:
            changes.add((process.key, "pulse"))
        for stream in ring.streams:
            if stream.kind is StreamKind.SETUP:  # rare
                changes.add(_GroupCreation(process.key, stream.uid, stream.entered))
        for uid in process.history.first_concurrent:
            changes.add((process.key, "shared", uid))
        oldest = max(ring.active_streams, key=lambda s: s.pending_s or 0.0, default=None)
        if oldest is not None and (oldest.pending_s or 0.0) >= MIN_WAIT_S:
            blocked.append((process, oldest))
    calls = []
    ops = set()
    # Calls of groups all of whose members may be on this host
    ranks_by_call: dict[Hashable, set[int]] = defaultdict(set)
    for process, stream in blocked:
        op = process.history.newest_ops.get(stream.uid, "")
        ops.add(op)
        calls.append((process.key, op, stream.uid, stream.entered))
        group = stream.group
        if process.identity is None or stream.kind is not StreamKind.COLLECTIVE:
            continue
        if 1 < len(group.ranks) <= alive_count:
            call = (group.foreign or group.name, group.ranks, stream.entered)
            ranks = ranks_by_call[call]
            ranks.add(group.number if group.foreign else process.identity.rank)
            if ranks.issuperset(group.ranks):
                changes.add(call)
    if calls and (len(calls) < alive_count or len(ops) > 1):  # else one operation blocks all ranks
        changes.add(tuple(calls))
    return frozenset(changes)


@dataclass(slots=True)
class _ProcessSample:
    reported_words: tuple[int, ...] = ()
    record_count: int = 0
    is_between_calls: bool = False  # all calls up to then are complete
    is_quiet: bool = False  # there was nothing to report
    is_ring_filling: bool = False  # much of the ring was written since it was read


@dataclass(slots=True)
class SteadinessCheck:
    """Whether the host is steady, by its last samples."""

    is_steady: bool = False
    is_reading_due: bool = False  # a ring may soon overwrite what was not read
    next_block_ns: int = _NEVER_NS  # when a rank will have been in a call for long, if known
    _quiet_since_ns: int = 0  # 0: the last samples were not all quiet
    _samples: dict[str, _ProcessSample] = field(default_factory=dict)  # keys: process keys

    def sample_processes(self, watched: Iterable[WatchedProcess], now_ns: int) -> bool:
        """Samples all processes. Returns True if one that was quiet in its last sample no longer is."""
        samples = {}
        next_block_ns = _NEVER_NS
        has_urgent_changes = False
        for process in watched:
            if process.exit is not None and process.exit_acked_ns:
                continue
            sample = self._samples.get(process.key) or _ProcessSample()
            samples[process.key] = sample
            quiet_until_ns = _find_end_of_quiet(process, sample, now_ns)
            was_quiet = sample.is_quiet
            sample.is_quiet = quiet_until_ns > now_ns
            has_urgent_changes |= was_quiet and not sample.is_quiet
            if sample.is_quiet:
                next_block_ns = min(next_block_ns, quiet_until_ns)
        self._samples = samples
        self.is_reading_due = any(sample.is_ring_filling for sample in samples.values())
        self.next_block_ns = next_block_ns
        if not samples or not all(sample.is_quiet for sample in samples.values()):
            self._quiet_since_ns = 0
        elif not self._quiet_since_ns:
            self._quiet_since_ns = now_ns
        since_ns = self._quiet_since_ns
        self.is_steady = bool(since_ns) and now_ns - since_ns >= SETTLE_NS
        return has_urgent_changes


def _find_end_of_quiet(process: WatchedProcess, sample: _ProcessSample, now_ns: int) -> int:
    """When a process will have something to report, as far as that is known; not later than
    ``now_ns`` if it has something already. Updates ``sample``.
    """
    if process.exit is not None or process.pidfd is None:
        return now_ns
    if process.ring is None or process.reader is None:
        return now_ns
    try:
        reader = process.ring.refresh_reader(process.reader)
    except (OSError, RingError):  # the ring's file was truncated
        return now_ns
    if reader is not process.reader:  # the ring's file was replaced
        return now_ns
    words = reader.read_live_words()
    reported_words = _get_reported_words(words)
    is_changed = reported_words != sample.reported_words
    sample.reported_words = reported_words
    if is_changed or now_ns - words[LiveWord.PULSE_NS] > _MAX_PULSE_AGE_NS:
        return now_ns
    if reader.checks.count:  # the results of checks are reported as they come
        return now_ns
    if words[LiveWord.RECORDS] > sample.record_count or reader.has_record(sample.record_count):
        sample.record_count = reader.count_records()
        sample.is_between_calls = False
        unread = reader.record_capacity // FLOOD_DIVISOR
        sample.is_ring_filling = reader.has_record(process.history.cursor + unread)
        return now_ns + int(BLOCKED_AFTER_S * 1e9)
    if sample.is_between_calls:
        return _NEVER_NS
    streams, devices = reader.read_positions(now_ns)
    ages_s = list_unfinished_ages(streams, devices, now_ns)
    sample.is_between_calls = not ages_s
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


class ProcessScanner:
    """Reads all processes at intervals, and checks once for each whether py-spy can sample it."""

    def __init__(
        self,
        watchlist: Watchlist,
        sampler: StackSampler,
        recorder_builder: RecorderBuilder,
        linger_s: float,
        now_ns: int,
    ) -> None:
        """``linger_s``: how long the agent stays without a live process."""
        self._watchlist = watchlist
        self._sampler = sampler
        self._recorder_builder = recorder_builder
        self._linger_s = linger_s
        self.next_scan_ns = now_ns
        self.last_read_ns = 0
        self._last_discovery_ns = now_ns
        self._last_alive_ns = now_ns
        self._had_live_process = False
        self._steadiness = SteadinessCheck()
        self._next_read_ns = now_ns
        self.is_steady = False  # the result of the last scan; see `SteadinessCheck`
        self.has_urgent_changes = False  # the last scan found something to report immediately

    def scan_processes(self, now_ns: int, *, must_read: bool = False) -> None:
        """Reads the processes if that is due, or with ``must_read``."""
        discovered = self._watchlist.scan_processes(now_ns)
        watched = self._watchlist.watched.values()
        self.has_urgent_changes = self._steadiness.sample_processes(watched, now_ns)
        self.is_steady = self._steadiness.is_steady and not discovered
        is_due = must_read or self.has_urgent_changes or self._steadiness.is_reading_due
        if discovered:
            self._last_discovery_ns = now_ns
        if is_due or discovered or (not self.is_steady and now_ns >= self._next_read_ns):
            self._watchlist.read_processes(now_ns)
            self.last_read_ns = now_ns
            interval_ns = _SCAN_INTERVAL_NS
            is_starting = now_ns - self._last_discovery_ns < _STARTUP_WINDOW_NS
            if is_starting or any(process.is_flooded for process in watched):
                interval_ns = _FAST_SCAN_INTERVAL_NS
            self._next_read_ns = now_ns + interval_ns
            for process in watched:
                if process.snapshot is None:
                    continue
                is_known = process.exit is None and process.identity is not None
                if is_known and not process.is_pyspy_probed:
                    order = make_sample_order(process)
                    process.is_pyspy_probed = self._sampler.submit_order(order)
                self._recorder_builder.update_build(process.snapshot.identity)
        steady_scan_ns = now_ns + _STEADY_SCAN_INTERVAL_NS
        self.next_scan_ns = min(
            steady_scan_ns if self.is_steady else self._next_read_ns,
            self._steadiness.next_block_ns,
        )
        if self._watchlist.has_alive:
            self._last_alive_ns = now_ns
            self._had_live_process = True

    def idle_s(self, now_ns: int) -> float:
        """How long no process has been alive."""
        return (now_ns - self._last_alive_ns) / 1e9

    @property
    def linger_s(self) -> float:
        """How long to stay without a live process."""
        if self._had_live_process or self._watchlist.watched:
            return self._linger_s
        return _FIRST_PROCESS_TIMEOUT_S
