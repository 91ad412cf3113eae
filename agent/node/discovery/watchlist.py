"""The list of watched processes: each is added when it is found in the run dir or in /proc, and
removed once everything about it was reported.

Ranks that never import torch have no ring. They are found as siblings of a recorded rank: other
children of its launcher, with the variables of a rank in their environment.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hangwatch.model.groups import is_group_address
from hangwatch.protocol.heartbeat import ProcessIdentity

from ...environment import identity, run_dir
from ..system import processes
from ..system.runtime import AgentLog
from . import rings
from .watched import WatchedProcess, watch_process

# The ring of an ended process that is older than this at the first scan belongs to an earlier run.
_STALE_RING_NS = 30_000_000_000
_SIBLING_SCAN_INTERVAL_NS = 2_000_000_000
# Files that are added within the same tick of the kernel's clock do not change the folder's mtime.
_MTIME_SETTLE_NS = 1_000_000_000
# After its exit was acknowledged, the server may still request a process's calls for this long.
_KEEP_ENDED_NS = 30_000_000_000
_ACK_TIMEOUT_NS = 60_000_000_000  # later, files are removed in any case
_AGENT_COMMAND_MARK = "hangwatch.agent.node.main"  # a node agent inherits a rank's environment

_RankKey = tuple[str, int, int]  # job, restart and rank
_LauncherKey = tuple[int, str, int]  # pid, job and rank of one that it started


@dataclass(slots=True)
class Watchlist:
    """Finds processes, records their exits, removes their files. Independent of the server. Calls
    ``on_exit`` for each process that has ended.
    """

    folder: Path
    selector: selectors.BaseSelector
    log: AgentLog
    on_exit: Callable[[], None] = lambda: None
    # Pidfds that were opened before the first scan, by process key; that scan closes the others.
    early_pidfds: dict[str, int] = field(default_factory=dict)
    watched: dict[str, WatchedProcess] = field(default_factory=dict)
    # Processes that were dropped, until the server has acknowledged that.
    finished_keys: list[str] = field(default_factory=list)
    # All ranks that were ever seen, of the jobs that still have a process.
    _known_ranks: set[_RankKey] = field(default_factory=set)
    _removed_keys: set[str] = field(default_factory=set)
    _is_first_scan: bool = True
    _sibling_finder: SiblingFinder = field(default_factory=lambda: SiblingFinder())
    _next_sibling_scan_ns: int = 0
    _listed_mtime_ns: int = 0  # the folder's mtime when it was last listed; 0 if unsettled

    @property
    def has_alive(self) -> bool:
        return any(process.exit is None for process in self.watched.values())

    def scan_processes(self, now_ns: int) -> list[WatchedProcess]:
        """Finds and returns new processes, and drops those that are only wrappers of a rank."""
        new_processes = self._scan_rings(now_ns)
        if now_ns >= self._next_sibling_scan_ns:
            self._next_sibling_scan_ns = now_ns + _SIBLING_SCAN_INTERVAL_NS
            recorded = {}
            for process in self.watched.values():
                process.update_unrecorded(now_ns)
                known = process.identity
                if process.ring is None or process.exit is not None or known is None:
                    continue
                # No launcher numbers the members of a group that they put together by hand.
                if not is_group_address(known.master):
                    recorded[process.pid] = known
            for rank in self._sibling_finder.find_siblings(recorded, self._known_ranks):
                if run_dir.format_process_key(rank.pid, rank.start_ticks) in self.watched:
                    continue
                process = watch_process(rank.pid, rank.start_ticks, now_ns, launch=rank.launch)
                self._add_process(process)
                new_processes.append(process)
        if new_processes:
            self._record_ranks()
        while self.early_pidfds:  # the rings of these processes were removed before this scan
            _, pidfd = self.early_pidfds.popitem()
            os.close(pidfd)
        self._is_first_scan = False
        return [process for process in new_processes if process.key in self.watched]

    def read_processes(self, now_ns: int) -> None:
        """Reads all live processes, and drops wrappers. Removes the files of processes whose exit the
        server knows, and later drops these processes.
        """
        for process in self.watched.values():
            if process.exit is not None:
                continue
            process.read_state(now_ns)
            if process.ring_problem:
                self.log.warn_once(process.ring_problem)
            if process.pidfd is None and process.has_ended():
                self.record_exit(process, now_ns)
        self._record_ranks()
        for process in list(self.watched.values()):
            if process.exit is None:
                continue
            if process.identity is None:  # the exit of an unknown rank cannot be reported
                self._remove_files(process)
                self._drop_process(process)
                continue
            if process.exit_acked_ns or now_ns - process.exited_at_ns > _ACK_TIMEOUT_NS:
                self._remove_files(process)
            if process.exit_acked_ns and now_ns - process.exit_acked_ns > _KEEP_ENDED_NS:
                self._drop_process(process)
                self.finished_keys.append(process.key)

    def record_exit(self, process: WatchedProcess, now_ns: int) -> None:
        """Records that a process has ended, and stops waiting for its end."""
        if process.pidfd is not None:
            self.selector.unregister(process.pidfd)
        process.record_exit(now_ns)
        self.on_exit()

    def close(self) -> None:
        """Removes the files of all processes, reported or not, if none is alive any more."""
        if not self.has_alive:
            for process in self.watched.values():
                self._remove_files(process)
        for process in self.watched.values():
            process.close()

    def _scan_rings(self, now_ns: int) -> list[WatchedProcess]:
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
            if changed_ns == self._listed_mtime_ns:
                return []
            files, foreign_names = rings.find_ring_files(self.folder)
        except OSError as error:
            self.log.warn_once(f"the run dir {self.folder} cannot be read: {error.strerror}")
            return []
        is_settled = time.time_ns() - changed_ns > _MTIME_SETTLE_NS
        self._listed_mtime_ns = changed_ns if is_settled else 0
        for name in foreign_names:
            self.log.warn_once(f"{self.folder / name} is ignored: its name matches no process")
        self._removed_keys &= {file.key for file in files}
        new_processes = []
        for file in files:
            known = self.watched.get(file.key)
            if known is not None and known.ring is None:
                known.ring = file
                known.found_ns = now_ns
            if known is not None or file.key in self._removed_keys:
                continue
            process = watch_process(
                file.pid,
                file.start_ticks,
                now_ns,
                ring=file,
                pidfd=self.early_pidfds.pop(file.key, None),
            )
            if process.has_ended():
                snapshot = process.snapshot
                pulse_ns = int(1e9 * snapshot.pulse_s) if snapshot else 0
                is_old = snapshot is None or pulse_ns > _STALE_RING_NS
                if is_old and process.pidfd is None and self._is_first_scan:
                    file.remove_files()  # an earlier run left it
                    process.close()
                    continue
                process.record_exit(now_ns)
                process.exited_at_ns = now_ns - pulse_ns  # the process lived at least until then
                self.on_exit()
            self._add_process(process)
            new_processes.append(process)
        return new_processes

    def _add_process(self, process: WatchedProcess) -> None:
        self.watched[process.key] = process
        if process.pidfd is not None:
            self.selector.register(process.pidfd, selectors.EVENT_READ, process.key)

    def _record_ranks(self) -> None:
        """Records which ranks were seen, and drops the shells around ranks that have a ring."""
        jobs = set()
        recorded = set()
        unrecorded = []
        for process in self.watched.values():
            known = process.identity
            if known is None:
                continue
            rank = (known.job, known.restart, known.rank)
            jobs.add(known.job)
            self._known_ranks.add(rank)
            if process.ring is not None:
                recorded.add(rank)
            else:
                unrecorded.append((process, rank))
        self._known_ranks = {rank for rank in self._known_ranks if rank[0] in jobs}
        for process, rank in unrecorded:
            if rank in recorded:
                self._drop_process(process)
                self.finished_keys.append(process.key)

    def _remove_files(self, process: WatchedProcess) -> None:
        if process.ring is not None and process.key not in self._removed_keys:
            self._removed_keys.add(process.key)
            process.ring.remove_files()

    def _drop_process(self, process: WatchedProcess) -> None:
        if process.pidfd is not None:
            self.selector.unregister(process.pidfd)
        process.close()
        del self.watched[process.key]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingRank:
    """A process that a launcher started as a rank."""

    pid: int
    start_ticks: int
    launch: identity.LaunchInfo


@dataclass(frozen=True, slots=True)
class _Launcher:
    """A process that started ranks, and the identity of a recorded one."""

    pid: int
    known: ProcessIdentity
    numbers_tasks: bool  # mpirun or srun, whose tasks are the ranks


@dataclass(slots=True)
class SiblingFinder:
    """Finds the siblings of recorded ranks. It keeps the launchers, which are expensive to find."""

    proc: str = processes.PROC_ROOT
    _launchers: dict[_LauncherKey, _Launcher] = field(default_factory=dict)

    def find_siblings(
        self,
        recorded: Mapping[int, ProcessIdentity],
        known_ranks: Collection[_RankKey],
    ) -> list[SiblingRank]:
        """The ranks that the launchers of ``recorded`` started, without the ``known_ranks``. The ranks of
        a world inside a rank are left out: the job in their environment is not the recorded one.
        """
        launchers = {}
        distinct: dict[Hashable, _Launcher] = {}  # one for each job of a launcher
        for pid, known in recorded.items():
            key = (pid, known.job, known.rank)
            found = self._launchers.get(key) or find_launcher(pid, known, self.proc)
            if found is not None:
                launchers[key] = found
                job = (known.job, known.restart, known.world_size)
                distinct[found.pid, found.numbers_tasks, job] = found
        self._launchers = launchers
        seen_ranks = set(known_ranks)
        ranks = []
        for launcher in distinct.values():
            for child in processes.list_children(launcher.pid, self.proc):
                if child in recorded:
                    continue
                launch = _read_launch(child, launcher.known, launcher.numbers_tasks, self.proc)
                if launch is None or launch.rank is None:
                    continue
                rank = (launch.job, launch.restart, launch.rank)
                if rank in seen_ranks:
                    continue
                try:
                    stat = processes.read_stat(child, self.proc)
                    command = " ".join(processes.read_cmdline(child, self.proc))
                except (OSError, ValueError):  # the process has just ended
                    continue
                if stat.state not in "ZX" and _AGENT_COMMAND_MARK not in command:
                    sibling = SiblingRank(pid=child, start_ticks=stat.start_ticks, launch=launch)
                    ranks.append(sibling)
                    seen_ranks.add(rank)
        return ranks


def find_launcher(pid: int, known: ProcessIdentity, proc: str) -> _Launcher | None:
    """The launcher of a recorded rank; None if it cannot be read, or if the rank's environment does not
    name the rank.

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
    """The launcher's variables of a process; None if they do not make it a rank of this job."""
    try:
        environ = processes.read_environ(pid, proc)
    except OSError:
        return None
    launch = identity.parse_task(environ) if from_task else identity.parse_environ(environ)
    if launch is None or launch.rank is None:
        return None
    if from_task:  # a task's variables do not name the job
        launch = replace(launch, job=known.job, restart=known.restart)
    of_job = (launch.job, launch.restart, launch.world_size)
    return launch if of_job == (known.job, known.restart, known.world_size) else None
