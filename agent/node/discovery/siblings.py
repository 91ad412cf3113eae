"""Ranks that never import torch: other children of a known rank's launcher, with RANK in their
environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from ...environment import identity
from ..system import processes

_AGENT_COMMAND_MARK = "hangwatch.agent.node.main"  # a node agent inherits a rank's environment


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingRank:
    """A process that a launcher started as a rank."""

    pid: int
    start_ticks: int
    launch: identity.LaunchInfo


def find_launcher(
    pid: int, proc: str = processes.PROC_ROOT
) -> tuple[int, identity.LaunchInfo] | None:
    """The nearest ancestor of a rank that is not that rank itself, and what it started; None where
    that is not to be seen.

    Wrappers such as ``bash train.sh`` or ``numactl`` stand between the two and carry the rank's
    environment.
    """
    try:
        launch = identity.parse_environ(processes.read_environ(pid, proc))
        if launch.rank is None:
            return None
        above = processes.read_stat(pid, proc).parent_pid
        while above > 1 and _read_launch(above, proc) == launch:
            above = processes.read_stat(above, proc).parent_pid
    except (OSError, ValueError):
        return None
    return (above, launch) if above > 0 else None


def find_siblings(
    rank_pids: Collection[int],
    known_ranks: Collection[tuple[str, int, int]],
    proc: str = processes.PROC_ROOT,
) -> list[SiblingRank]:
    """Ranks beside those with the pids ``ranks`` that are not among the ``known`` (job, restart,
    rank).
    """
    taken = set(known_ranks)
    launchers = {at for pid in rank_pids if (at := find_launcher(pid, proc)) is not None}
    jobs = {(above, launch.job, launch.restart, launch.world_size) for above, launch in launchers}
    found: list[SiblingRank] = []
    for above in {above for above, _ in launchers}:
        for child in processes.list_children(above, proc):
            if child in rank_pids:
                continue
            launch = _read_launch(child, proc)
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
                if stat.state in "ZX" or _AGENT_COMMAND_MARK in " ".join(
                    processes.read_cmdline(child, proc)
                ):
                    continue
                taken.add((launch.job, launch.restart, launch.rank))
                found.append(SiblingRank(pid=child, start_ticks=stat.start_ticks, launch=launch))
    return found


def _read_launch(pid: int, proc: str) -> identity.LaunchInfo | None:
    try:
        return identity.parse_environ(processes.read_environ(pid, proc))
    except OSError:  # gone, or another user's
        return None
