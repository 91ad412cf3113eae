"""What the node agent itself takes of its host."""

from __future__ import annotations

import os
import resource

from hangwatch.protocol.heartbeat import AgentCost

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def measure_cost(dropped_count: int) -> AgentCost:
    """CPU time with that of the helpers that were run, and resident memory, by proc(5)."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    try:
        with open("/proc/self/statm", "rb") as f:
            pages = int(f.read().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    return AgentCost(
        cpu_s=round(sum(u.ru_utime + u.ru_stime for u in usage), 3),
        memory=pages * _PAGE_BYTES,
        dropped=dropped_count,
    )
