"""Finds ranks that never import torch: other children of a known rank's launcher, with RANK in
their environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
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
    """The pid of the process that launched a rank, and the rank's launch variables; None if they
    cannot be read.

    Wrappers such as ``bash train.sh`` or ``numactl`` are skipped: they have the rank's environment.
    """
    try:
        launch = identity.parse_environ(processes.read_environ(pid, proc))
        if launch.rank is None:
            return None
        ancestor = processes.read_stat(pid, proc).parent_pid
        while ancestor > 1 and _read_launch(ancestor, proc) == launch:
            ancestor = processes.read_stat(ancestor, proc).parent_pid
    except (OSError, ValueError):
        return None
    return (ancestor, launch) if ancestor > 0 else None


def find_siblings(
    jobs_by_pid: Mapping[int, str],
    known_ranks: Collection[tuple[str, int, int]],
    proc: str = processes.PROC_ROOT,
) -> list[SiblingRank]:
    """Ranks that the launchers of these recorded processes started, other than these processes and
    the ``known_ranks`` (job, restart, rank). ``jobs_by_pid`` has the job of each as recorded.
    """
    jobs_by_launcher = _find_launched_jobs(jobs_by_pid, proc)
    seen_ranks = set(known_ranks)
    ranks: list[SiblingRank] = []
    for launcher, jobs in jobs_by_launcher.items():
        for child in processes.list_children(launcher, proc):
            if child in jobs_by_pid:
                continue
            launch = _read_launch(child, proc)
            if launch is None or launch.rank is None:
                continue
            if (launch.job, launch.restart, launch.world_size) not in jobs:
                continue
            rank = (launch.job, launch.restart, launch.rank)
            if rank in seen_ranks:
                continue
            start_ticks = _read_sibling_start(child, proc)
            if start_ticks is None:
                continue
            seen_ranks.add(rank)
            ranks.append(SiblingRank(pid=child, start_ticks=start_ticks, launch=launch))
    return ranks


def _find_launched_jobs(
    jobs_by_pid: Mapping[int, str], proc: str
) -> dict[int, set[tuple[str, int, int]]]:
    """By launcher's pid: the (job, restart, world size) of the ranks that it started. The ranks of a
    world inside a rank are recorded as another job than their environment says: they are left out.
    """
    jobs_by_launcher: dict[int, set[tuple[str, int, int]]] = {}
    for pid, recorded_job in jobs_by_pid.items():
        launched = find_launcher(pid, proc)
        if launched is not None and launched[1].job == recorded_job:
            launcher, launch = launched
            job = (launch.job, launch.restart, launch.world_size)
            jobs_by_launcher.setdefault(launcher, set()).add(job)
    return jobs_by_launcher


def _read_sibling_start(pid: int, proc: str) -> int | None:
    """The start ticks of a process; None if it has ended, or is a node agent."""
    with contextlib.suppress(OSError, ValueError):  # it has just ended
        stat = processes.read_stat(pid, proc)
        command = " ".join(processes.read_cmdline(pid, proc))
        if stat.state not in "ZX" and _AGENT_COMMAND_MARK not in command:
            return stat.start_ticks
    return None


def _read_launch(pid: int, proc: str) -> identity.LaunchInfo | None:
    try:
        return identity.parse_environ(processes.read_environ(pid, proc))
    except OSError:  # gone, or another user's
        return None
