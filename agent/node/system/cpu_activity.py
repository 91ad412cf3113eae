"""Whether a process does something, from the CPU time of its main thread and of the thread that
makes its calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .processes import (
    PROC_ROOT,
    TICKS_PER_S,
    parse_ready_ns,
    read_schedstat,
    read_stat,
    read_thread_stat,
)

_SCHEDSTAT_INTERVAL_NS = 900_000_000  # with two readings a second, every other one
# A thread that waits for a CPU for this share of the time is busy: a computing thread on a crowded
# host waits longer, one that only wakes now and then waits less.
_MIN_WAIT_SHARE = 1 / 3


@dataclass(slots=True, kw_only=True)
class ThreadActivity:
    """Whether a thread was busy between two readings.

    A tick is 10 ms, and a thread blocked in a timed wait still wakes now and then: up to one tick a
    second counts as idle. A thread that is ready to run but gets no CPU is not idle, on an
    overloaded host. There, a thread that wakes now and then also waits for a CPU. Measured with
    eight busy loops per CPU: a loop that sleeps 20 ms waits up to a quarter of the time, one that
    sleeps 0.1 s 2 %, and a gloo collective not at all; a thread that computes waits almost always.
    """

    last_busy_ns: int  # when it was last seen using a CPU or waiting for one
    state: str = "?"
    _ticks_since_ns: int = 0
    _ticks: int = -1
    _schedstat: bytes = b""
    _was_ready: bool = False
    _schedstat_read_ns: int = 0

    def update_thread(self, pid: int, tid: int, now_ns: int, proc: str) -> None:
        """Raises OSError if the thread has ended, ValueError if /proc is malformed."""
        stat = read_thread_stat(pid, tid, proc)
        self.state = stat.state
        self.record_ticks(stat.cpu_ticks, now_ns)
        if now_ns - self._schedstat_read_ns >= _SCHEDSTAT_INTERVAL_NS:
            self.record_schedstat(read_schedstat(pid, tid, proc), stat.state == "R", now_ns)

    def record_ticks(self, ticks: int, now_ns: int) -> None:
        """Records its CPU time."""
        is_first = self._ticks < 0
        if not is_first and ticks - self._ticks > 1:
            self.last_busy_ns = now_ns
        elif not is_first and now_ns - self._ticks_since_ns < 1_000_000_000:
            return
        self._ticks = ticks
        self._ticks_since_ns = now_ns

    def record_schedstat(self, schedstat: bytes, is_ready: bool, now_ns: int) -> None:
        """Records its schedstat. A thread that was ready at both readings and did not run in between
        was ready all the time.
        """
        if schedstat and self._schedstat:
            ready_ns = parse_ready_ns(schedstat) - parse_ready_ns(self._schedstat)
            elapsed_ns = now_ns - self._schedstat_read_ns
            if ready_ns >= _MIN_WAIT_SHARE * elapsed_ns or (
                is_ready and self._was_ready and schedstat == self._schedstat
            ):
                self.last_busy_ns = now_ns
        self._schedstat = schedstat
        self._was_ready = is_ready
        self._schedstat_read_ns = now_ns


@dataclass(slots=True, kw_only=True)
class CpuActivity:
    """The state of a process, and whether its main thread or its calling thread was busy."""

    last_busy_ns: int
    state: str = "?"
    cpu_s: float = 0.0
    _main: ThreadActivity = field(init=False)
    # Of the thread that made the newest call, if that is another one than the main thread.
    _caller: ThreadActivity | None = None
    _caller_tid: int = 0

    def __post_init__(self) -> None:
        self._main = ThreadActivity(last_busy_ns=self.last_busy_ns)

    def update_activity(
        self, pid: int, now_ns: int, caller_tid: int = 0, proc: str = PROC_ROOT
    ) -> None:
        """Reads /proc. ``caller_tid`` is the thread that made the newest call, 0 if that is unknown.
        Raises OSError if the process is gone, ValueError if /proc is malformed.
        """
        whole = read_stat(pid, proc)
        self._main.update_thread(pid, pid, now_ns, proc)
        self.state = self._main.state
        self.cpu_s = whole.cpu_ticks / TICKS_PER_S
        if self.state in "ZX" and whole.state not in "ZX":
            self.state = "S"  # the main thread has ended (pthread_exit), the others continue
        self.last_busy_ns = max(self.last_busy_ns, self._main.last_busy_ns)
        if caller_tid not in (0, pid):
            self._update_caller(pid, caller_tid, now_ns, proc)

    def _update_caller(self, pid: int, tid: int, now_ns: int, proc: str) -> None:
        if self._caller is None or tid != self._caller_tid:
            self._caller, self._caller_tid = ThreadActivity(last_busy_ns=self.last_busy_ns), tid
        try:
            self._caller.update_thread(pid, tid, now_ns, proc)
        except (OSError, ValueError):  # it has ended
            return
        self.last_busy_ns = max(self.last_busy_ns, self._caller.last_busy_ns)
        if self._caller.state == "D" and self.state not in "Tt":
            self.state = "D"  # what the rank's calls wait for is in the kernel
