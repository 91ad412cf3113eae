"""Scans for processes, reads them, and decides when to do so again. A scan of a steady host samples
the positions of its processes without reading them.
"""

from __future__ import annotations

from .discovery.watched import WatchedProcess
from .discovery.watchlist import Watchlist
from .report_schedule import SteadinessCheck
from .requests.builder import RecorderBuilder
from .requests.commands import make_sample_order
from .stacks.sampler import StackSampler
from .system.runtime import AgentTiming

_STEADY_SCAN_INTERVAL_NS = 250_000_000  # between two scans of a steady host
_MAX_READING_AGE_NS = 150_000_000  # a more recent reading is sent as it is


class ProcessScanner:
    """Reads all processes at intervals, and checks once for each whether py-spy can sample it."""

    def __init__(
        self,
        watchlist: Watchlist,
        sampler: StackSampler,
        recorder_builder: RecorderBuilder,
        timing: AgentTiming,
        now_ns: int,
    ) -> None:
        self._watchlist = watchlist
        self._sampler = sampler
        self._recorder_builder = recorder_builder
        self._timing = timing
        self.next_scan_ns = now_ns
        self._last_read_ns = 0
        self._last_discovery_ns = now_ns
        self._last_alive_ns = now_ns
        self._had_live_process = False
        self._steadiness = SteadinessCheck()
        self._next_read_ns = now_ns
        self.is_steady = False  # the result of the last scan; see `SteadinessCheck`
        self.has_urgent_changes = False  # the last scan found something to report immediately

    def scan_processes(self, now_ns: int, *, must_read: bool = False) -> bool:
        """Returns True if a process has ended. With ``must_read`` the processes are read in any case,
        since a heartbeat is about to report them.
        """
        discovered = self._watchlist.scan_processes(now_ns)
        watched = self._watchlist.watched.values()
        self.has_urgent_changes = self._steadiness.sample_processes(watched, now_ns)
        self.is_steady = self._steadiness.is_steady and not discovered
        is_due = must_read or self.has_urgent_changes or self._steadiness.is_reading_due
        has_ended = False
        if is_due or discovered or (not self.is_steady and now_ns >= self._next_read_ns):
            has_ended = self._read_processes(now_ns, discovered)
        steady_scan_ns = now_ns + _STEADY_SCAN_INTERVAL_NS
        self.next_scan_ns = min(
            steady_scan_ns if self.is_steady else self._next_read_ns,
            self._steadiness.next_block_ns,
        )
        if self._watchlist.has_alive:
            self._last_alive_ns = now_ns
            self._had_live_process = True
        return has_ended

    def _read_processes(self, now_ns: int, discovered: list[WatchedProcess]) -> bool:
        has_ended = any(process.exit is not None for process in discovered)
        has_ended |= self._watchlist.read_processes(now_ns)
        self._last_read_ns = now_ns
        if discovered:
            self._last_discovery_ns = now_ns
        interval_s = self._timing.scan_interval_s
        is_starting = now_ns - self._last_discovery_ns < self._timing.startup_window_s * 1e9
        if is_starting or any(process.is_flooded for process in self._watchlist.watched.values()):
            interval_s = self._timing.fast_scan_interval_s
        self._next_read_ns = now_ns + int(interval_s * 1e9)
        self._watchlist.clean_up(now_ns)
        for process in self._watchlist.watched.values():
            if process.snapshot is None:
                continue
            is_known = process.exit is None and process.identity is not None
            if is_known and not process.is_pyspy_probed:
                process.is_pyspy_probed = self._sampler.submit_order(make_sample_order(process))
            self._recorder_builder.update_build(process.snapshot.identity)
        return has_ended

    def is_reading_old(self, now_ns: int) -> bool:
        """The last reading is too old to be sent."""
        return now_ns - self._last_read_ns > _MAX_READING_AGE_NS

    def discard_reading(self) -> None:
        """Makes the last reading count as too old."""
        self._last_read_ns = 0

    def idle_s(self, now_ns: int) -> float:
        """How long no process has been alive."""
        return (now_ns - self._last_alive_ns) / 1e9

    @property
    def linger_s(self) -> float:
        """How long to stay without a live process."""
        if self._had_live_process or self._watchlist.watched:
            return self._timing.linger_s
        return self._timing.first_process_timeout_s
