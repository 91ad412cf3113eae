"""What /proc says of a process. The root of /proc is a parameter everywhere; see proc(5) for the
fields.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

PROC_ROOT = "/proc"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # a second
_MAX_TREE_PROCESSES = 256  # processes
_SCHEDSTAT_INTERVAL_NS = 900_000_000  # the other look at most, where there are two a second
# of the time: more than whoever wakes now and then, and less than whoever computes
_MIN_WAIT_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcStat:
    """One line of /proc/PID/stat or /proc/PID/task/TID/stat."""

    state: str
    parent_pid: int
    cpu_ticks: int  # user and system
    reaped_ticks: int  # likewise, of its children that have ended
    start_ticks: int
    exit_code: int  # as wait(2) gives it; only a zombie's means anything, and only to who may look


def parse_stat(raw: bytes) -> ProcStat:
    """Raises ValueError for what is no such line. The name may hold spaces and brackets: it ends at
    the last bracket.
    """
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
    """The whole process. Raises OSError once it is gone, ValueError where it cannot be understood."""
    return parse_stat(_read_line(f"{proc}/{pid}/stat"))


def read_thread_stat(pid: int, thread: int, proc: str = PROC_ROOT) -> ProcStat:
    """One of its threads alone; the main one has the number of the process. Raises as `read_stat`."""
    return parse_stat(_read_line(f"{proc}/{pid}/task/{thread}/stat"))


def read_schedstat(pid: int, thread: int, proc: str = PROC_ROOT) -> bytes:
    """Of one thread: ns that it ran, ns that it was ready to and had no CPU, and how often it got
    one; empty where nobody counts that.

    The wait for a CPU is added when it ends.
    """
    try:
        turns = _read_line(f"{proc}/{pid}/task/{thread}/schedstat")
    except OSError:
        return b""
    return b"" if turns.startswith(b"0 ") else turns


def parse_ready_ns(schedstat: bytes) -> int:
    """How long a thread was ready to run and had no CPU, by `read_turns`."""
    return int(schedstat.split()[1]) if schedstat else 0


def _read_line(path: str) -> bytes:
    """A file of one line, by the system's own calls: these are read several times a second for each
    rank.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def is_alive(pid: int, start_ticks: int, proc: str = PROC_ROOT) -> bool:
    """This very process runs: its pid was not given to another, and it is no zombie."""
    try:
        stat = read_stat(pid, proc)
    except (OSError, ValueError):
        return False
    return stat.start_ticks == start_ticks and stat.state not in "ZX"


def read_status(pid: int | str, proc: str = PROC_ROOT) -> dict[str, str]:
    """/proc/PID/status by field name. Raises OSError once the process is gone."""
    with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as f:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in f)}


def read_environ(pid: int, proc: str = PROC_ROOT) -> dict[str, str]:
    """The environment a process was started with. Raises OSError where it is gone or somebody
    else's.
    """
    with open(f"{proc}/{pid}/environ", "rb") as f:
        pairs = (entry.partition("=") for entry in os.fsdecode(f.read()).split("\0"))
        return {name: value for name, eq, value in pairs if eq}


def read_cmdline(pid: int, proc: str = PROC_ROOT) -> list[str]:
    """The command line of a process. Raises OSError once it is gone."""
    with open(f"{proc}/{pid}/cmdline", "rb") as f:
        return [os.fsdecode(part) for part in f.read().rstrip(b"\0").split(b"\0")]


def list_children(pid: int, proc: str = PROC_ROOT) -> list[int]:
    """Children of all threads of a process; none where it is gone or the kernel does not list them."""
    found: list[int] = []
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"{proc}/{pid}/task/{thread}/children", "rb") as f:
                found.extend(int(child) for child in f.read().split())
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def read_tree_usage_s(pid: int, proc: str = PROC_ROOT) -> tuple[float, float]:
    """CPU time of a process and of all that it started, also of what has ended; and how long their
    main threads were ready and had none.

    Without what cannot be read, as it ends just now.
    """
    ticks, ready, left, seen = 0, 0, [pid], 0
    while left and seen < _MAX_TREE_PROCESSES:
        one, seen = left.pop(), seen + 1
        try:
            stat = read_stat(one, proc)
        except (OSError, ValueError):
            continue
        ticks += stat.cpu_ticks + stat.reaped_ticks
        ready += parse_ready_ns(read_schedstat(one, one, proc))
        left += list_children(one, proc)
    return ticks / TICKS_PER_S, ready / 1e9


def read_uptime_s(proc: str = PROC_ROOT) -> float:
    """Seconds since boot, on the clock of the start ticks; 0.0 where it cannot be read."""
    try:
        with open(f"{proc}/uptime", "rb") as f:
            return float(f.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(slots=True, kw_only=True)
class CpuActivity:
    """Whether a process's main thread does anything, from one look to the next.

    A tick is 10 ms, and a thread blocked in a timed wait still wakes now and then: up to a tick a
    second counts as idle. Whoever wants the CPU and does not get it is not idle, on a host with too
    much to do. There, whoever wakes now and then waits for a CPU, too: beside eight hogs for each
    CPU, a loop that sleeps 20 ms takes up to a quarter of its time for that, one that sleeps 0.1 s
    two hundredths, and a collective of gloo nothing. Whoever computes does nothing else.
    """

    state: str = "?"
    cpu_s: float = 0.0
    last_busy_ns: int  # when the main thread last used the CPU or waited for one, as far as seen
    _ticks_since_ns: int = 0
    _ticks: int = -1
    _schedstat: bytes = b""
    _was_ready: bool = False
    _schedstat_read_ns: int = 0

    def update_activity(self, pid: int, now_ns: int, proc: str = PROC_ROOT) -> None:
        """Raises OSError once the process is gone, ValueError where /proc cannot be understood."""
        whole, main = read_stat(pid, proc), read_thread_stat(pid, pid, proc)
        self.state, self.cpu_s = main.state, whole.cpu_ticks / TICKS_PER_S
        if main.state in "ZX" and whole.state not in "ZX":
            self.state = "S"  # the main thread has left with pthread_exit, and the others run on
        self.record_ticks(main.cpu_ticks, now_ns)
        if now_ns - self._schedstat_read_ns >= _SCHEDSTAT_INTERVAL_NS:
            self.record_schedstat(read_schedstat(pid, pid, proc), main.state == "R", now_ns)

    def record_ticks(self, ticks: int, now_ns: int) -> None:
        """Takes in the main thread's CPU time."""
        grown = ticks - self._ticks
        if self._ticks < 0 or grown > 1:
            if self._ticks >= 0:
                self.last_busy_ns = now_ns
            self._ticks, self._ticks_since_ns = ticks, now_ns
        elif now_ns - self._ticks_since_ns >= 1_000_000_000:
            self._ticks, self._ticks_since_ns = ticks, now_ns

    def record_schedstat(self, schedstat: bytes, is_ready: bool, now_ns: int) -> None:
        """Takes in its turns on the CPU. Who was ready at both looks and had none in between was
        ready all the time.
        """
        if schedstat and self._schedstat:
            waited = parse_ready_ns(schedstat) - parse_ready_ns(
                self._schedstat
            ) >= _MIN_WAIT_SHARE * (now_ns - self._schedstat_read_ns)
            if waited or (is_ready and self._was_ready and schedstat == self._schedstat):
                self.last_busy_ns = now_ns
        self._schedstat, self._was_ready, self._schedstat_read_ns = schedstat, is_ready, now_ns
