"""Ranks that never import torch: other children of a known rank's launcher, with RANK in their
environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from ...environment import identity
from ..system import processes

_MARK = "hangwatch.agent.node.main"  # a node agent inherits a rank's environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A process that a launcher started as a rank."""

    pid: int
    start_ticks: int
    launch: identity.Launch


def launcher(pid: int, proc: str = processes.PROC) -> tuple[int, identity.Launch] | None:
    """The nearest ancestor of a rank that is not that rank itself, and what it started; None where
    that is not to be seen.

    Wrappers such as ``bash train.sh`` or ``numactl`` stand between the two and carry the rank's
    environment.
    """
    try:
        launch = identity.from_environ(processes.read_environ(pid, proc))
        if launch.rank is None:
            return None
        above = processes.read_stat(pid, proc).parent
        while above > 1 and _launch(above, proc) == launch:
            above = processes.read_stat(above, proc).parent
    except (OSError, ValueError):
        return None
    return (above, launch) if above > 0 else None


def scan(
    ranks: Collection[int], known: Collection[tuple[str, int, int]], proc: str = processes.PROC
) -> list[Found]:
    """Ranks beside those with the pids ``ranks`` that are not among the ``known`` (job, restart,
    rank).
    """
    taken = set(known)
    launchers = {at for pid in ranks if (at := launcher(pid, proc)) is not None}
    jobs = {(above, launch.job, launch.restart, launch.world_size) for above, launch in launchers}
    found: list[Found] = []
    for above in {above for above, _ in launchers}:
        for child in processes.children(above, proc):
            if child in ranks:
                continue
            launch = _launch(child, proc)
            if (
                launch is None
                or launch.rank is None
                or (above, launch.job, launch.restart, launch.world_size) not in jobs
            ):
                continue
            if (launch.job, launch.restart, launch.rank) in taken:
                continue
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                stat = processes.read_stat(child, proc)
                if stat.state in "ZX" or _MARK in " ".join(processes.read_cmdline(child, proc)):
                    continue
                taken.add((launch.job, launch.restart, launch.rank))
                found.append(Found(pid=child, start_ticks=stat.start_ticks, launch=launch))
    return found


def _launch(pid: int, proc: str) -> identity.Launch | None:
    try:
        return identity.from_environ(processes.read_environ(pid, proc))
    except OSError:  # gone, or another user's
        return None
