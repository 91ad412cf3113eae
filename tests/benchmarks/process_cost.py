"""The CPU time that processes have used."""

from __future__ import annotations

import os
from pathlib import Path


def read_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def list_family(pid: int) -> list[int]:
    """A process and its running children."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for tasks in children for child in tasks.read_text().split())]


def read_family_cpu_s(pid: int) -> float:
    """CPU time so far of a process and of the processes that it has started, alive or not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ended_s = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return ended_s + sum(map(read_cpu_s, list_family(pid)))
