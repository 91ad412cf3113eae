"""What /proc says of a process. The root of /proc is a parameter everywhere; see proc(5) for the
fields.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

PROC = "/proc"
TICKS = os.sysconf("SC_CLK_TCK")  # a second
_MOST_OF_TREE = 256  # processes
_ASK_NS = 900_000_000  # the other look at most, where there are two a second
_WANTS = 1 / 3  # of the time: more than whoever wakes now and then, and less than whoever computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """One line of /proc/PID/stat or /proc/PID/task/TID/stat."""

    state: str
    parent: int
    cpu_ticks: int  # user and system
    reaped_ticks: int  # likewise, of its children that have ended
    start_ticks: int
    exit_code: int  # as wait(2) gives it; only a zombie's means anything, and only to who may look


def parse_stat(raw: bytes) -> Stat:
    """Raises ValueError for what is no such line. The name may hold spaces and brackets: it ends at
    the last bracket.
    """
    fields = raw.rpartition(b")")[2].split()
    try:
        return Stat(
            state=fields[0].decode("ascii"),
            parent=int(fields[1]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            reaped_ticks=int(fields[13]) + int(fields[14]),
            start_ticks=int(fields[19]),
            exit_code=int(fields[49]) if len(fields) > 49 else 0,
        )
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"not a stat line: {raw[:60]!r}") from error


def read_stat(pid: int, proc: str = PROC) -> Stat:
    """The whole process. Raises OSError once it is gone, ValueError where it cannot be understood."""
    return parse_stat(_line(f"{proc}/{pid}/stat"))


def read_thread(pid: int, thread: int, proc: str = PROC) -> Stat:
    """One of its threads alone; the main one has the number of the process. Raises as `read_stat`."""
    return parse_stat(_line(f"{proc}/{pid}/task/{thread}/stat"))


def read_turns(pid: int, thread: int, proc: str = PROC) -> bytes:
    """Of one thread: ns that it ran, ns that it was ready to and had no CPU, and how often it got
    one; empty where nobody counts that.

    The wait for a CPU is added when it ends.
    """
    try:
        turns = _line(f"{proc}/{pid}/task/{thread}/schedstat")
    except OSError:
        return b""
    return b"" if turns.startswith(b"0 ") else turns


def ready_ns(turns: bytes) -> int:
    """How long a thread was ready to run and had no CPU, by `read_turns`."""
    return int(turns.split()[1]) if turns else 0


def _line(path: str) -> bytes:
    """A file of one line, by the system's own calls: these are read several times a second for each
    rank.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def alive(pid: int, start_ticks: int, proc: str = PROC) -> bool:
    """This very process runs: its pid was not given to another, and it is no zombie."""
    try:
        stat = read_stat(pid, proc)
    except (OSError, ValueError):
        return False
    return stat.start_ticks == start_ticks and stat.state not in "ZX"


def read_status(pid: int | str, proc: str = PROC) -> dict[str, str]:
    """/proc/PID/status by field name. Raises OSError once the process is gone."""
    with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as f:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in f)}


def read_environ(pid: int, proc: str = PROC) -> dict[str, str]:
    """The environment a process was started with. Raises OSError where it is gone or somebody
    else's.
    """
    with open(f"{proc}/{pid}/environ", "rb") as f:
        pairs = (entry.partition("=") for entry in os.fsdecode(f.read()).split("\0"))
        return {name: value for name, eq, value in pairs if eq}


def read_cmdline(pid: int, proc: str = PROC) -> list[str]:
    """The command line of a process. Raises OSError once it is gone."""
    with open(f"{proc}/{pid}/cmdline", "rb") as f:
        return [os.fsdecode(part) for part in f.read().rstrip(b"\0").split(b"\0")]


def children(pid: int, proc: str = PROC) -> list[int]:
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


def tree_use_s(pid: int, proc: str = PROC) -> tuple[float, float]:
    """CPU time of a process and of all that it started, also of what has ended; and how long their
    main threads were ready and had none.

    Without what cannot be read, as it ends just now.
    """
    ticks, ready, left, seen = 0, 0, [pid], 0
    while left and seen < _MOST_OF_TREE:
        one, seen = left.pop(), seen + 1
        try:
            stat = read_stat(one, proc)
        except (OSError, ValueError):
            continue
        ticks += stat.cpu_ticks + stat.reaped_ticks
        ready += ready_ns(read_turns(one, one, proc))
        left += children(one, proc)
    return ticks / TICKS, ready / 1e9


def uptime_s(proc: str = PROC) -> float:
    """Seconds since boot, on the clock of the start ticks; 0.0 where it cannot be read."""
    try:
        with open(f"{proc}/uptime", "rb") as f:
            return float(f.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(slots=True, kw_only=True)
class Activity:
    """Whether a process's main thread does anything, from one look to the next.

    A tick is 10 ms, and a thread blocked in a timed wait still wakes now and then: up to a tick a
    second counts as idle. Whoever wants the CPU and does not get it is not idle, on a host with too
    much to do. There, whoever wakes now and then waits for a CPU, too: beside eight hogs for each
    CPU, a loop that sleeps 20 ms takes up to a quarter of its time for that, one that sleeps 0.1 s
    two hundredths, and a collective of gloo nothing. Whoever computes does nothing else.
    """

    state: str = "?"
    cpu_s: float = 0.0
    busy_ns: int  # when the main thread last used the CPU or waited for one, as far as seen
    _since_ns: int = 0
    _ticks: int = -1
    _turns: bytes = b""
    _ready: bool = False
    _asked_ns: int = 0

    def look(self, pid: int, now_ns: int, proc: str = PROC) -> None:
        """Raises OSError once the process is gone, ValueError where /proc cannot be understood."""
        whole, main = read_stat(pid, proc), read_thread(pid, pid, proc)
        self.state, self.cpu_s = main.state, whole.cpu_ticks / TICKS
        if main.state in "ZX" and whole.state not in "ZX":
            self.state = "S"  # the main thread has left with pthread_exit, and the others run on
        self.saw(main.cpu_ticks, now_ns)
        if now_ns - self._asked_ns >= _ASK_NS:
            self.had(read_turns(pid, pid, proc), main.state == "R", now_ns)

    def saw(self, ticks: int, now_ns: int) -> None:
        """Takes in the main thread's CPU time."""
        grown = ticks - self._ticks
        if self._ticks < 0 or grown > 1:
            if self._ticks >= 0:
                self.busy_ns = now_ns
            self._ticks, self._since_ns = ticks, now_ns
        elif now_ns - self._since_ns >= 1_000_000_000:
            self._ticks, self._since_ns = ticks, now_ns

    def had(self, turns: bytes, ready: bool, now_ns: int) -> None:
        """Takes in its turns on the CPU. Who was ready at both looks and had none in between was
        ready all the time.
        """
        if turns and self._turns:
            waited = ready_ns(turns) - ready_ns(self._turns) >= _WANTS * (now_ns - self._asked_ns)
            if waited or (ready and self._ready and turns == self._turns):
                self.busy_ns = now_ns
        self._turns, self._ready, self._asked_ns = turns, ready, now_ns
