"""Which processes are watched: found in the run dir and in /proc, until all there is to say of them
has been said.
"""

from __future__ import annotations

import os
import selectors
import time
from pathlib import Path

from ..system import processes
from ..system.log import AgentLog
from . import rings, siblings
from .watched import WatchedProcess, watch_process

_STALE_RING_NS = 30_000_000_000  # a dead ring found at the start that is older is another run's
_SIBLING_SCAN_INTERVAL_NS = 2_000_000_000
# a folder's time tells of all that came into it, but for what comes within the same tick of the
# kernel's clock
_MTIME_SETTLE_NS = 1_000_000_000
_KEEP_ENDED_NS = 30_000_000_000  # after its end was acknowledged, its calls can still be asked for
_ACK_TIMEOUT_NS = 60_000_000_000  # the end is not acknowledged: the files go, the report stays


class Watchlist:
    """Finds processes, notices their ends, removes their files. Knows nothing of the server."""

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        log: AgentLog,
        *,
        proc: str = processes.PROC_ROOT,
        early_pidfds: dict[str, int] | None = None,
    ) -> None:
        self.watched: dict[str, WatchedProcess] = {}
        self.finished_keys: list[
            str
        ] = []  # of these there will be no more to say; taken out by who has told it
        self._folder = folder
        self._selector = selector
        self._log = log
        self._proc = proc
        self._known_ranks: set[tuple[str, int, int]] = (
            set()
        )  # ranks that were ever seen, of the jobs that still are
        self._removed_keys: set[str] = set()
        self._early_pidfds = early_pidfds or {}  # pidfds that were opened before the first scan
        self._is_first_scan = True
        self._next_sibling_scan_ns = 0
        self._listed_mtime_ns = 0  # the folder's time, once all that it tells of is in the list

    @property
    def has_alive(self) -> bool:
        return any(w.exit is None for w in self.watched.values())

    def scan_processes(self, now_ns: int) -> list[WatchedProcess]:
        """Looks for new processes and gives them; drops those that turned out to be no ranks of
        their own.
        """
        fresh = self._scan_rings(now_ns)
        if now_ns >= self._next_sibling_scan_ns:
            self._next_sibling_scan_ns = now_ns + _SIBLING_SCAN_INTERVAL_NS
            fresh += self._scan_siblings(now_ns)
        self._record_ranks()
        self._drop_wrappers()
        while self._early_pidfds:
            os.close(self._early_pidfds.popitem()[1])  # the ring went away meanwhile
        self._is_first_scan = False
        return [w for w in fresh if w.key in self.watched]

    def read_processes(self, now_ns: int) -> bool:
        """Reads all that live; True where one was found to have ended, for want of a pidfd."""
        ended = False
        for w in self.watched.values():
            if w.exit is not None:
                continue
            w.read_state(now_ns)
            if w.ring_problem:
                self._log.warn_once(w.ring_problem)
            if w.pidfd is None and w.has_ended():
                self.record_exit(w, now_ns)
                ended = True
        self._record_ranks()
        return ended

    def record_exit(self, w: WatchedProcess, now_ns: int) -> None:
        """A process has ended."""
        if w.pidfd is not None:
            self._selector.unregister(w.pidfd)
        w.record_exit(now_ns)

    def clean_up(self, now_ns: int) -> None:
        """Removes the files of processes whose end the server knows, and in time the memory of
        them.
        """
        for w in list(self.watched.values()):
            if w.exit is None:
                continue
            if w.identity is None:  # nobody could be told who that was
                self._remove_files(w)
                self._drop_process(w)
                continue
            if w.exit_acked_ns or now_ns - w.exited_at_ns > _ACK_TIMEOUT_NS:
                self._remove_files(w)
            if w.exit_acked_ns and now_ns - w.exit_acked_ns > _KEEP_ENDED_NS:
                self._drop_process(w)
                self.finished_keys.append(w.key)

    def remove_ended_files(self) -> None:
        """Removes the files of all that have ended, reported or not."""
        for w in self.watched.values():
            if w.exit is not None:
                self._remove_files(w)

    def close(self) -> None:
        for w in self.watched.values():
            w.close()

    def _scan_rings(self, now_ns: int) -> list[WatchedProcess]:
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
            if changed_ns == self._listed_mtime_ns:
                return []
            files, foreign = rings.find_ring_files(self._folder)
        except OSError as error:
            self._log.warn_once(f"the run dir {self._folder} cannot be read: {error.strerror}")
            return []
        self._listed_mtime_ns = changed_ns if time.time_ns() - changed_ns > _MTIME_SETTLE_NS else 0
        for name in foreign:
            self._log.warn_once(f"{self._folder / name} is left alone: its name is no process's")
        self._removed_keys &= {file.key for file in files}
        fresh: list[WatchedProcess] = []
        for file in files:
            held = self.watched.get(file.key)
            if held is not None and held.ring is None:
                held.ring, held.found_ns = file, now_ns
            elif (
                held is None
                and file.key not in self._removed_keys
                and (found := self._adopt_ring(file, now_ns)) is not None
            ):
                fresh.append(found)
        return fresh

    def _adopt_ring(self, file: rings.RingFile, now_ns: int) -> WatchedProcess | None:
        w = watch_process(
            file.pid,
            file.start_ticks,
            now_ns,
            ring=file,
            proc=self._proc,
            pidfd=self._early_pidfds.pop(file.key, None),
        )
        if w.has_ended():
            pulse_ns = int(1e9 * w.snapshot.pulse_s) if w.snapshot else 0
            if (
                w.pidfd is None
                and self._is_first_scan
                and (w.snapshot is None or pulse_ns > _STALE_RING_NS)
            ):
                file.remove_files()  # left by an earlier run, whose server knows or never will
                w.close()
                return None
            w.record_exit(now_ns)
            w.exited_at_ns = now_ns - pulse_ns  # it lived until then at least
        self._add_process(w)
        return w

    def _scan_siblings(self, now_ns: int) -> list[WatchedProcess]:
        ranks = [w.pid for w in self.watched.values() if w.exit is None and w.ring is not None]
        found = [
            watch_process(sibling.pid, sibling.start_ticks, now_ns, proc=self._proc)
            for sibling in siblings.find_siblings(ranks, self._known_ranks, self._proc)
            if f"{sibling.pid}-{sibling.start_ticks}" not in self.watched
        ]
        for w in found:
            self._add_process(w)
        return found

    def _add_process(self, w: WatchedProcess) -> None:
        self.watched[w.key] = w
        if w.pidfd is not None:
            self._selector.register(w.pidfd, selectors.EVENT_READ, w.key)

    def _record_ranks(self) -> None:
        jobs = {w.identity.job for w in self.watched.values() if w.identity}
        self._known_ranks = {known for known in self._known_ranks if known[0] in jobs}
        self._known_ranks |= {
            (i.job, i.restart, i.rank) for w in self.watched.values() if (i := w.identity)
        }

    def _drop_wrappers(self) -> None:
        """A shell that stood in for a rank, now that the rank itself is there."""
        real = {
            (i.job, i.restart, i.rank)
            for w in self.watched.values()
            if w.ring is not None and (i := w.identity)
        }
        for w in list(self.watched.values()):
            if (
                w.ring is None
                and w.identity
                and (w.identity.job, w.identity.restart, w.identity.rank) in real
            ):
                if w.pidfd is not None:
                    self._selector.unregister(w.pidfd)
                self._drop_process(w)
                self.finished_keys.append(w.key)

    def _remove_files(self, w: WatchedProcess) -> None:
        if w.ring is not None and w.key not in self._removed_keys:
            self._removed_keys.add(w.key)
            w.ring.remove_files()

    def _drop_process(self, w: WatchedProcess) -> None:
        w.close()
        del self.watched[w.key]
