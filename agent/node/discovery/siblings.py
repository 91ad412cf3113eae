"""Finds ranks that never import torch: other children of a known rank's launcher, with the variables
of a rank in their environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hangwatch.protocol.heartbeat import ProcessIdentity

from ...environment import identity
from ..system import processes

_AGENT_COMMAND_MARK = "hangwatch.agent.node.main"  # a node agent inherits a rank's environment


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingRank:
    """A process that a launcher started as a rank."""

    pid: int
    start_ticks: int
    launch: identity.LaunchInfo


@dataclass(frozen=True, slots=True)
class _Launcher:
    """A process that started ranks, and one of these that is recorded."""

    pid: int
    known: ProcessIdentity
    numbers_tasks: bool  # mpirun or srun, whose tasks are the ranks

    @property
    def key(self) -> tuple[int, bool, str, int, int]:
        known = self.known
        return (self.pid, self.numbers_tasks, known.job, known.restart, known.world_size)

    def parse_rank(self, pid: int, proc: str) -> identity.LaunchInfo | None:
        """The launcher's variables of a process; None if they do not make it a rank of the same job as
        ``known``, or if it is gone or another user's.
        """
        return _read_launch(pid, self.known, self.numbers_tasks, proc)


class SiblingFinder:
    """Finds the siblings of recorded ranks. Keeps the launcher of each one: that takes several
    readings of environments, which do not change.
    """

    def __init__(self, proc: str = processes.PROC_ROOT) -> None:
        self._proc = proc
        self._launchers: dict[tuple[int, str, int], _Launcher] = {}  # by pid, job and rank

    def find_siblings(
        self,
        recorded: Mapping[int, ProcessIdentity],
        known_ranks: Collection[tuple[str, int, int]],
    ) -> list[SiblingRank]:
        """Ranks that the launchers of these recorded processes started, other than these processes
        and the ``known_ranks`` (job, restart, rank).
        """
        seen_ranks = set(known_ranks)
        ranks: list[SiblingRank] = []
        for launcher in self._find_launchers(recorded):
            for child in processes.list_children(launcher.pid, self._proc):
                launch = None if child in recorded else launcher.parse_rank(child, self._proc)
                if launch is None or launch.rank is None:
                    continue
                rank = (launch.job, launch.restart, launch.rank)
                if rank in seen_ranks:
                    continue
                start_ticks = _read_sibling_start(child, self._proc)
                if start_ticks is None:
                    continue
                seen_ranks.add(rank)
                ranks.append(SiblingRank(pid=child, start_ticks=start_ticks, launch=launch))
        return ranks

    def _find_launchers(self, recorded: Mapping[int, ProcessIdentity]) -> list[_Launcher]:
        """One for each job of a launcher. The ranks of a world inside a rank are recorded as another
        job than their environment says: they are left out.
        """
        launchers: dict[tuple[int, str, int], _Launcher] = {}
        for pid, known in recorded.items():
            key = (pid, known.job, known.rank)
            found = self._launchers.get(key) or find_launcher(pid, known, self._proc)
            if found is not None:
                launchers[key] = found
        self._launchers = launchers
        return list({found.key: found for found in launchers.values()}.values())


def find_launcher(
    pid: int, known: ProcessIdentity, proc: str = processes.PROC_ROOT
) -> _Launcher | None:
    """What launched a recorded rank; None if that cannot be read, or if the rank's environment does not
    say which rank it is.

    Wrappers such as ``bash train.sh`` or ``numactl`` are skipped: they have the rank's environment.
    """
    for numbers_tasks in (False, True):
        launch = _read_launch(pid, known, numbers_tasks, proc)
        if launch is None or launch.rank != known.rank:
            continue
        try:
            ancestor = processes.read_stat(pid, proc).parent_pid
            while ancestor > 1 and _read_launch(ancestor, known, numbers_tasks, proc) == launch:
                ancestor = processes.read_stat(ancestor, proc).parent_pid
        except (OSError, ValueError):
            return None
        return _Launcher(ancestor, known, numbers_tasks) if ancestor > 0 else None
    return None


def _read_launch(
    pid: int, known: ProcessIdentity, from_task: bool, proc: str
) -> identity.LaunchInfo | None:
    try:
        environ = processes.read_environ(pid, proc)
    except OSError:
        return None
    launch = identity.parse_environ(environ)
    if from_task:
        task = identity.parse_task(environ)
        if task is None:
            return None
        launch = replace(
            launch,
            job=known.job,
            restart=known.restart,
            rank=task.number,
            world_size=task.count,
            local_rank=task.local_number,
        )
    of_job = (launch.job, launch.restart, launch.world_size)
    is_same_job = of_job == (known.job, known.restart, known.world_size)
    return launch if is_same_job and launch.rank is not None else None


def _read_sibling_start(pid: int, proc: str) -> int | None:
    """The start ticks of a process; None if it has ended, or is a node agent."""
    with contextlib.suppress(OSError, ValueError):  # it has just ended
        stat = processes.read_stat(pid, proc)
        command = " ".join(processes.read_cmdline(pid, proc))
        if stat.state not in "ZX" and _AGENT_COMMAND_MARK not in command:
            return stat.start_ticks
    return None
