"""Reads processes from /proc. The root of /proc is always a parameter; see proc(5) for the fields."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hangwatch.model.threads import ThreadStack

PROC_ROOT = "/proc"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_TREE_PROCESSES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcStat:
    """One line of /proc/PID/stat or /proc/PID/task/TID/stat."""

    state: str
    parent_pid: int
    cpu_ticks: int  # user and system
    reaped_ticks: int  # likewise, of its children that have ended
    start_ticks: int
    exit_code: int  # as in wait(2); only valid for a zombie, and with permission to read it


def parse_stat(raw: bytes) -> ProcStat:
    """Raises ValueError if it is not a stat line. The name may contain spaces and brackets: it ends
    at the last bracket.
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
    """Reads the whole process. Raises OSError if it is gone, ValueError if its line is malformed."""
    return parse_stat(_read_line(f"{proc}/{pid}/stat"))


def read_thread_stat(pid: int, thread: int, proc: str = PROC_ROOT) -> ProcStat:
    """Reads a single thread; the main one's id is the pid. Raises as `read_stat`."""
    return parse_stat(_read_line(f"{proc}/{pid}/task/{thread}/stat"))


def read_schedstat(pid: int, thread: int, proc: str = PROC_ROOT) -> bytes:
    """The schedstat line of a thread: ns on a CPU, ns ready to run without a CPU, number of time
    slices; empty if the kernel does not count them.

    The time without a CPU is added when the thread gets one.
    """
    try:
        schedstat = _read_line(f"{proc}/{pid}/task/{thread}/schedstat")
    except OSError:
        return b""
    return b"" if schedstat.startswith(b"0 ") else schedstat


def parse_ready_ns(schedstat: bytes) -> int:
    """How long a thread was ready to run and had no CPU, from `read_schedstat`."""
    return int(schedstat.split()[1]) if schedstat else 0


def add_cpu_times(stack: ThreadStack, pid: int, proc: str = PROC_ROOT) -> ThreadStack:
    """The stack with the CPU time of its thread, if its id is known and it has not ended."""
    try:
        ticks = read_thread_stat(pid, stack.tid or 0, proc).cpu_ticks
    except (OSError, ValueError):
        return stack
    turns = read_schedstat(pid, stack.tid or 0, proc)
    return replace(stack, cpu_s=ticks / TICKS_PER_S, ready_s=parse_ready_ns(turns) / 1e9)


def _read_line(path: str) -> bytes:
    """Reads a file of one line by system calls, since it is done several times a second per rank."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def is_alive(pid: int, start_ticks: int, proc: str = PROC_ROOT) -> bool:
    """This process is alive: its pid was not reused, and it is not a zombie."""
    try:
        stat = read_stat(pid, proc)
    except (OSError, ValueError):
        return False
    return stat.start_ticks == start_ticks and stat.state not in "ZX"


def read_status(pid: int | str, proc: str = PROC_ROOT) -> dict[str, str]:
    """/proc/PID/status by field name. Raises OSError if the process is gone."""
    fields: dict[str, str] = {}
    with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def read_environ(pid: int, proc: str = PROC_ROOT) -> dict[str, str]:
    """The environment that a process was started with. Raises OSError if it is gone or belongs to
    another user.
    """
    with open(f"{proc}/{pid}/environ", "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    environ: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals:
            environ[name] = value
    return environ


def read_cmdline(pid: int, proc: str = PROC_ROOT) -> list[str]:
    """The command line of a process. Raises OSError if it is gone."""
    with open(f"{proc}/{pid}/cmdline", "rb") as file:
        return [os.fsdecode(part) for part in file.read().rstrip(b"\0").split(b"\0")]


def list_children(pid: int, proc: str = PROC_ROOT) -> list[int]:
    """Children of all threads of a process; empty if it is gone or the kernel does not list them."""
    children: list[int] = []
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        try:
            with open(f"{proc}/{pid}/task/{thread}/children", "rb") as file:
                children.extend(int(child) for child in file.read().split())
        except OSError:
            continue  # the thread has ended
    return children


def read_tree_usage_s(pid: int, proc: str = PROC_ROOT) -> tuple[float, float]:
    """CPU time of a process and of its descendants, including ended ones; and how long their main
    threads were ready to run without a CPU.

    Processes that end in the meantime are left out.
    """
    ticks = 0
    ready_ns = 0
    pending_pids = [pid]
    for _ in range(_MAX_TREE_PROCESSES):
        if not pending_pids:
            break
        current = pending_pids.pop()
        try:
            stat = read_stat(current, proc)
        except (OSError, ValueError):
            continue
        ticks += stat.cpu_ticks + stat.reaped_ticks
        ready_ns += parse_ready_ns(read_schedstat(current, current, proc))
        pending_pids += list_children(current, proc)
    return ticks / TICKS_PER_S, ready_ns / 1e9


def read_uptime_s(proc: str = PROC_ROOT) -> float:
    """Seconds since boot, on the clock of the start ticks; 0.0 if it cannot be read."""
    try:
        with open(f"{proc}/uptime", "rb") as f:
            return float(f.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
