"""Reads processes from /proc, and whether they do something. The root of /proc is always a parameter;
see proc(5) for the fields.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hangwatch.model.limits import MIN_TRANSFER_BYTES_PER_S, STOPPED_STATES
from hangwatch.model.ranks import ThreadStack

PROC_ROOT = "/proc"
ThreadStacks = tuple[ThreadStack, ...]  # the stacks of one process
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_TREE_PROCESSES = 256
_MAX_DESCRIPTORS = 4096  # the limit for one process
_SCHEDSTAT_INTERVAL_NS = 900_000_000  # every other one of two readings a second
# A thread that waits for a CPU for this share of the time is busy: a computing thread on a crowded
# host waits longer, one that only wakes now and then waits less.
_MIN_WAIT_SHARE = 1 / 3
_RESUME_TIMEOUT_S = (
    0.5  # /proc may show a process as stopped this long after a debugger has detached
)
_RUNNING_READINGS = 3  # readings in a row after which a process is known to run
_MAX_DEBUGGER_DEPTH = 4  # processes from a script that starts a debugger to the debugger
_IO_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")  # proc_pid_io(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcStat:
    """One line of /proc/PID/stat or /proc/PID/task/TID/stat."""

    state: str
    parent_pid: int
    cpu_ticks: int  # user and system
    reaped_ticks: int  # CPU time of its children that have ended
    start_ticks: int
    exit_code: int  # a status of wait(2); valid for a zombie, and with permission to read it


def parse_stat(raw: bytes) -> ProcStat:
    """Raises ValueError for anything else. The process's name ends at the last bracket."""
    fields = raw.rpartition(b")")[2].split()
    try:
        return ProcStat(
            state=fields[0].decode("ascii"),
            parent_pid=int(fields[1]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            reaped_ticks=int(fields[13]) + int(fields[14]),
            start_ticks=int(fields[19]),
            exit_code=int(fields[49]) if len(fields) > 49 else 0,
        )
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"not a stat line: {raw[:60]!r}") from error


def read_stat(pid: int, proc: str = PROC_ROOT) -> ProcStat:
    """Reads the whole process. Raises OSError if it is gone, ValueError if its line is malformed."""
    return parse_stat(_read_line(f"{proc}/{pid}/stat"))


def read_thread_stat(pid: int, thread: int, proc: str) -> ProcStat:
    """Reads a single thread; the main one's id is the pid. Raises as `read_stat`."""
    return parse_stat(_read_line(f"{proc}/{pid}/task/{thread}/stat"))


class SchedStat(NamedTuple):
    """One line of /proc/PID/task/TID/schedstat."""

    cpu_ns: int = 0  # 0: the kernel does not count any of these
    ready_ns: int = 0  # the thread was ready to run and had no CPU; added when it gets one
    slice_count: int = 0


_NO_TIMES = SchedStat()


def read_schedstat(pid: int, thread: int, proc: str) -> SchedStat:
    """The times of a thread; all are 0 if it has ended."""
    try:
        line = _read_line(f"{proc}/{pid}/task/{thread}/schedstat")
    except OSError:
        return _NO_TIMES
    return SchedStat(*map(int, line.split()[:3]))


def read_io_bytes(pid: int, tid: int, proc: str) -> int:
    """The bytes that a thread, or for ``tid`` 0 the whole process, has read and written; 0 if that may not
    be read. What goes to a disk counts twice, and while a long write lasts at least once.
    """
    folder = f"{pid}/task/{tid}" if tid else f"{pid}"
    try:
        counters = read_fields(f"{proc}/{folder}/io")
        return sum(int(counters.get(name, 0)) for name in _IO_COUNTERS)
    except (OSError, ValueError):
        return 0


def add_cpu_times(stacks: Iterable[ThreadStack], pid: int, proc: str) -> ThreadStacks:
    """The stacks with the CPU times of the threads whose ids are known and that have not ended."""
    timed = []
    for stack in stacks:
        tid = stack.tid or 0
        with contextlib.suppress(OSError, ValueError):
            cpu_s = read_thread_stat(pid, tid, proc).cpu_ticks / TICKS_PER_S
            ready_s = read_schedstat(pid, tid, proc).ready_ns / 1e9
            stack = replace(stack, cpu_s=cpu_s, ready_s=ready_s)
        timed.append(stack)
    return tuple(timed)


def _read_line(path: str) -> bytes:
    """Reads a file of one line by system calls, since it is done several times a second per rank."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def read_text(path: str | Path) -> str:
    """A small file, stripped; empty if it cannot be read, as once its thread has ended."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_live_stat(pid: int, start_ticks: int, proc: str = PROC_ROOT) -> ProcStat | None:
    """None if the process is a zombie or gone, or if another one has its pid."""
    try:
        stat = read_stat(pid, proc)
    except (OSError, ValueError):
        return None
    return stat if stat.start_ticks == start_ticks and stat.state not in "ZX" else None


def read_fields(path: str) -> dict[str, str]:
    """A file with a line for each field, ``name: value``, such as /proc/PID/status. Raises OSError if the
    process is gone.
    """
    fields = {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def read_descriptors(pid: int, proc: str) -> dict[int, str]:
    """What the descriptors of a process are, such as ``socket:[4711]``; empty if that may not be read."""
    links: dict[int, str] = {}
    try:
        names = os.listdir(f"{proc}/{pid}/fd")
    except OSError:
        return links
    for name in names[:_MAX_DESCRIPTORS]:
        with contextlib.suppress(OSError):  # a descriptor may be closed by now
            links[int(name)] = os.readlink(f"{proc}/{pid}/fd/{name}")
    return links


class MemoryMapping(NamedTuple):
    """One line of /proc/PID/maps."""

    first: int  # the first address
    end: int
    modes: str  # such as "r-xp"
    file_id: str  # device and inode
    path: str  # empty if no file is mapped


def read_mappings(pid: int, proc: str = PROC_ROOT) -> list[MemoryMapping]:
    """The memory of a process by address. Raises OSError if it is gone or may not be read."""
    mappings = []
    # A path may contain other line breaks.
    with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            span, modes, _, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            first, _, end = span.partition("-")
            file_id = f"{device} {inode}"
            mapping = MemoryMapping(int(first, 16), int(end, 16), modes, file_id, "".join(path))
            mappings.append(mapping)
    return mappings


def read_environ(pid: int, proc: str = PROC_ROOT) -> dict[str, str]:
    """The environment at the start. Raises OSError if it is gone or another user's."""
    environ = {}
    for entry in _read_arguments(f"{proc}/{pid}/environ"):
        name, equals, value = entry.partition("=")
        if equals:
            environ[name] = value
    return environ


def read_cmdline(pid: int, proc: str = PROC_ROOT) -> list[str]:
    """The command line of a process. Raises OSError if it is gone."""
    return _read_arguments(f"{proc}/{pid}/cmdline")


def _read_arguments(path: str) -> list[str]:
    return os.fsdecode(Path(path).read_bytes().rstrip(b"\0")).split("\0")


def list_cgroups(
    pid: int | str, controllers: Set[str], proc: Path, root: Path
) -> Iterator[tuple[Path, Path]]:
    """The control groups of a process, each as the root of its hierarchy and its folder: one in
    version 2, one for each of these controllers in version 1. Inside a container, the folder may be
    that of the host, and the container's own group is at the root.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:  # the process has ended
        return
    for line in lines:
        _, _, fields = line.partition(":")
        names, _, path = fields.partition(":")
        if not names or not controllers.isdisjoint(names.split(",")):
            base = root / names
            yield base, base / path.lstrip("/")


def list_children(pid: int, proc: str) -> list[int]:
    """Children of all threads of a process; empty if it is gone or the kernel does not list them."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with (
                contextlib.suppress(OSError),  # the thread has ended
                open(f"{proc}/{pid}/task/{thread}/children", "rb") as file,
            ):
                children.extend(map(int, file.read().split()))
    return children


def read_tree_usage_s(pid: int, proc: str) -> tuple[float, float]:
    """CPU time of a process and of its descendants, including ended ones; and how long their main
    threads were ready to run without a CPU.
    """
    ticks = ready_ns = 0
    pids = [pid]  # grows while it is iterated
    for current in pids:
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            stat = read_stat(current, proc)
            ticks += stat.cpu_ticks + stat.reaped_ticks
            ready_ns += read_schedstat(current, current, proc).ready_ns
            pids += list_children(current, proc)[: _MAX_TREE_PROCESSES - len(pids)]
    return ticks / TICKS_PER_S, ready_ns / 1e9


def is_traced_by_own(pid: int, proc: str) -> bool:
    """Whether what pauses a process, as a debugger does, is the calling process or a descendant of it, such
    as py-spy, or cuda-gdb below a script that starts it. Also true if the pause has just ended.
    """
    try:
        status = read_fields(f"{proc}/{pid}/status")
        tracer = status.get("TracerPid", "0")
        if tracer == "0":  # none, or one in another container
            return not status.get("State", "").startswith("t")
        own_pid = str(os.getpid())
        for _ in range(_MAX_DEBUGGER_DEPTH):
            # The thread that traces has such a file.
            tracer_status = read_fields(f"{proc}/{tracer}/status")
            tracer = tracer_status.get("PPid", "0")
            if own_pid in (tracer_status.get("Tgid"), tracer):
                return True
    except OSError:  # one of them has ended
        pass
    return False


def continue_stopped(pid: int, start_ticks: int, proc: str) -> bool:
    """Continues a process that a debugger has left stopped, such as a py-spy that was killed and could not
    detach. Returns True if that was necessary.
    """
    deadline = time.monotonic() + _RESUME_TIMEOUT_S
    running_count = 0  # the signal that stops it may take effect late
    while time.monotonic() < deadline:
        stat = read_live_stat(pid, start_ticks, proc)
        if stat is None:
            return False
        running_count = 0 if stat.state in STOPPED_STATES else running_count + 1
        if running_count == _RUNNING_READINGS:
            return False
        time.sleep(0.02)
    with contextlib.suppress(OSError):  # the process ended just now
        os.kill(pid, signal.SIGCONT)
    return True


def measure_age_s(start_ticks: int) -> float:
    """How long ago a process was started, in seconds."""
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return round(max(0.0, uptime_s - start_ticks / TICKS_PER_S), 2)


@dataclass(slots=True, kw_only=True)
class ThreadActivity:
    """Whether a thread was busy between two readings.

    A tick is 10 ms, and a thread blocked in a timed wait still wakes now and then: up to one tick a
    second counts as idle. A thread that is ready to run but gets no CPU is not idle, on an
    overloaded host. Nor is one in uninterruptible sleep whose file moves, on a slow disk or a network
    file system. On an overloaded host, a thread that wakes now and then also waits for a CPU. Measured with
    eight busy loops per CPU: a loop that sleeps 20 ms waits up to a quarter of the time, one that
    sleeps 0.1 s 2 %, and a gloo collective not at all; a thread that computes waits almost always.
    """

    state: str = "?"
    _ticks_since_ns: int = 0
    _ticks: int = -1
    _schedstat: SchedStat = _NO_TIMES
    _was_ready: bool = False
    _schedstat_read_ns: int = 0
    _moved_bytes: int = -1
    _moved_read_ns: int = 0

    def update_thread(self, pid: int, tid: int, now_ns: int, proc: str) -> bool:
        """Reads /proc, and returns whether the thread was busy. Raises OSError if it has ended,
        ValueError if /proc is malformed.
        """
        stat = read_thread_stat(pid, tid, proc)
        self.state = stat.state
        is_first = self._ticks < 0
        is_busy = not is_first and stat.cpu_ticks - self._ticks > 1
        if is_first or is_busy or now_ns - self._ticks_since_ns >= 1_000_000_000:
            self._ticks = stat.cpu_ticks
            self._ticks_since_ns = now_ns
        if stat.state == "D":
            is_busy |= self._moves_data(read_io_bytes(pid, tid, proc), now_ns)
        elapsed_ns = now_ns - self._schedstat_read_ns
        if elapsed_ns < _SCHEDSTAT_INTERVAL_NS:
            return is_busy
        schedstat = read_schedstat(pid, tid, proc)
        is_ready = stat.state == "R"
        if schedstat.cpu_ns and self._schedstat.cpu_ns:
            ready_ns = schedstat.ready_ns - self._schedstat.ready_ns
            # A thread that was ready at both readings and did not run in between was always ready.
            was_always_ready = is_ready and self._was_ready and schedstat == self._schedstat
            if was_always_ready or ready_ns >= _MIN_WAIT_SHARE * elapsed_ns:
                is_busy = True
        self._schedstat = schedstat
        self._was_ready = is_ready
        self._schedstat_read_ns = now_ns
        return is_busy

    def _moves_data(self, moved_bytes: int, now_ns: int) -> bool:
        """Whether a thread in state D has read or written enough since the last reading."""
        elapsed_s = (now_ns - self._moved_read_ns) / 1e9
        is_first = self._moved_bytes < 0
        increase = moved_bytes - self._moved_bytes
        is_moving = not is_first and increase >= MIN_TRANSFER_BYTES_PER_S * elapsed_s
        if is_first or is_moving or elapsed_s >= 1.0:
            self._moved_bytes, self._moved_read_ns = moved_bytes, now_ns
        return is_moving


@dataclass(slots=True, kw_only=True)
class CpuActivity:
    """A process's state, and whether its main thread or its calling thread was busy."""

    last_busy_ns: int  # when one of them was last seen using a CPU or waiting for one
    state: str = "?"
    cpu_s: float = 0.0
    paused_ns: int = 0  # the total time during which our py-spy paused it
    _read_ns: int = 0
    _main: ThreadActivity = field(default_factory=ThreadActivity)
    # The thread that made the newest call, if that is another one than the main thread.
    _caller: ThreadActivity = field(default_factory=ThreadActivity)
    _caller_tid: int = 0

    def update_activity(
        self, pid: int, now_ns: int, caller_tid: int = 0, proc: str = PROC_ROOT
    ) -> None:
        """Reads /proc. ``caller_tid`` is the thread that made the newest call, 0 if that is unknown.
        Raises OSError if the process is gone, ValueError if /proc is malformed.

        py-spy pauses a process while it reads native frames, the first time for seconds, since it
        reads the symbols of every library then. If it is our py-spy, the process does not count as
        stopped, and its idle time does not grow.
        """
        whole = read_stat(pid, proc)
        if self._main.update_thread(pid, pid, now_ns, proc):
            self.last_busy_ns = now_ns
        self.state = self._main.state
        self.cpu_s = whole.cpu_ticks / TICKS_PER_S
        read_ns, self._read_ns = self._read_ns or now_ns, now_ns
        if self.state == "t" and is_traced_by_own(pid, proc):
            self.state = "S"
            self.paused_ns += now_ns - read_ns
            self.last_busy_ns = min(now_ns, self.last_busy_ns + now_ns - read_ns)
        if self.state in "ZX" and whole.state not in "ZX":
            self.state = "S"  # the main thread has ended (pthread_exit), the others continue
        if caller_tid in (0, pid):
            return
        if caller_tid != self._caller_tid:
            self._caller = ThreadActivity()
            self._caller_tid = caller_tid
        try:
            if self._caller.update_thread(pid, caller_tid, now_ns, proc):
                self.last_busy_ns = now_ns
        except (OSError, ValueError):  # the thread has ended
            return
        if self._caller.state == "D" and self.state not in "Tt":
            self.state = "D"  # what the rank's calls wait for is in the kernel
