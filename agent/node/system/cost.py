"""Measures what the node agent costs its host."""

from __future__ import annotations

import os
import resource

from hangwatch.protocol.heartbeat import AgentCost

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def measure_cost(dropped_count: int) -> AgentCost:
    """CPU time, including that of helper processes, and resident memory, see proc(5)."""
    cpu_s = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        cpu_s += usage.ru_utime + usage.ru_stime
    try:
        with open("/proc/self/statm", "rb") as f:
            pages = int(f.read().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    return AgentCost(
        cpu_s=round(cpu_s, 3),
        memory=pages * _PAGE_BYTES,
        dropped=dropped_count,
    )
