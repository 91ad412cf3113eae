"""The CPU time that processes have used, and what it is worth."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
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


def measure_shared_core_factor() -> float:
    """How many times as much CPU time a loop takes while all cores are busy as when only one is. Near
    1 for cores of their own, up to 2 for virtual ones that are the two threads of one core.
    """
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(_measure_loop_s, range(cores), 1)  # from here on all have started
        alone = [pool.apply(_measure_loop_s, (0,)) for _ in range(3)]
        together = pool.map(_measure_loop_s, range(3 * cores), 1)
    return statistics.median(together) / statistics.median(alone)


def _measure_loop_s(_: int) -> float:
    began_s, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - began_s
