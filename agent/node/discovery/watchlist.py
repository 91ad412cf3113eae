"""Which processes are watched: found in the run dir and in /proc, until all there is to say of them
has been said.
"""

from __future__ import annotations

import os
import selectors
import time
from pathlib import Path

from ..system import processes
from ..system.log import Log
from . import rings, siblings
from .watched import Watched, watch

_STALE_NS = 30_000_000_000  # a dead ring found at the start that is older is another run's
_SIBLINGS_NS = 2_000_000_000
# a folder's time tells of all that came into it, but for what comes within the same tick of the
# kernel's clock
_STILL_NS = 1_000_000_000
_KEEP_ENDED_NS = 30_000_000_000  # after its end was acknowledged, its calls can still be asked for
_GIVE_UP_NS = 60_000_000_000  # the end is not acknowledged: the files go, the report stays


class Watchlist:
    """Finds processes, notices their ends, removes their files. Knows nothing of the server."""

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        log: Log,
        *,
        proc: str = processes.PROC,
        held: dict[str, int] | None = None,
    ) -> None:
        self.watched: dict[str, Watched] = {}
        self.gone: list[
            str
        ] = []  # of these there will be no more to say; taken out by who has told it
        self._folder = folder
        self._selector = selector
        self._log = log
        self._proc = proc
        self._known: set[tuple[str, int, int]] = (
            set()
        )  # ranks that were ever seen, of the jobs that still are
        self._removed: set[str] = set()
        self._held = held or {}  # pidfds that were opened before the first scan
        self._first = True
        self._siblings_ns = 0
        self._listed_ns = 0  # the folder's time, once all that it tells of is in the list

    @property
    def alive(self) -> bool:
        return any(w.ended is None for w in self.watched.values())

    def scan(self, now_ns: int) -> list[Watched]:
        """Looks for new processes and gives them; drops those that turned out to be no ranks of
        their own.
        """
        fresh = self._scan_rings(now_ns)
        if now_ns >= self._siblings_ns:
            self._siblings_ns = now_ns + _SIBLINGS_NS
            fresh += self._scan_siblings(now_ns)
        self._note_ranks()
        self._drop_wrappers()
        while self._held:
            os.close(self._held.popitem()[1])  # the ring went away meanwhile
        self._first = False
        return [w for w in fresh if w.key in self.watched]

    def read(self, now_ns: int) -> bool:
        """Reads all that live; True where one was found to have ended, for want of a pidfd."""
        ended = False
        for w in self.watched.values():
            if w.ended is not None:
                continue
            w.read(now_ns)
            if w.problem:
                self._log.once(w.problem)
            if w.pidfd is None and w.over():
                self.end(w, now_ns)
                ended = True
        self._note_ranks()
        return ended

    def end(self, w: Watched, now_ns: int) -> None:
        """A process has ended."""
        if w.pidfd is not None:
            self._selector.unregister(w.pidfd)
        w.end(now_ns)

    def clean_up(self, now_ns: int) -> None:
        """Removes the files of processes whose end the server knows, and in time the memory of
        them.
        """
        for w in list(self.watched.values()):
            if w.ended is None:
                continue
            if w.identity is None:  # nobody could be told who that was
                self._remove(w)
                self._drop(w)
                continue
            if w.reported_ns or now_ns - w.ended_ns > _GIVE_UP_NS:
                self._remove(w)
            if w.reported_ns and now_ns - w.reported_ns > _KEEP_ENDED_NS:
                self._drop(w)
                self.gone.append(w.key)

    def remove_all(self) -> None:
        """Removes the files of all that have ended, reported or not."""
        for w in self.watched.values():
            if w.ended is not None:
                self._remove(w)

    def close(self) -> None:
        for w in self.watched.values():
            w.close()

    def _scan_rings(self, now_ns: int) -> list[Watched]:
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
            if changed_ns == self._listed_ns:
                return []
            files, foreign = rings.find(self._folder)
        except OSError as error:
            self._log.once(f"the run dir {self._folder} cannot be read: {error.strerror}")
            return []
        self._listed_ns = changed_ns if time.time_ns() - changed_ns > _STILL_NS else 0
        for name in foreign:
            self._log.once(f"{self._folder / name} is left alone: its name is no process's")
        self._removed &= {file.key for file in files}
        fresh: list[Watched] = []
        for file in files:
            held = self.watched.get(file.key)
            if held is not None and held.ring is None:
                held.ring, held.found_ns = file, now_ns
            elif (
                held is None
                and file.key not in self._removed
                and (found := self._adopt(file, now_ns)) is not None
            ):
                fresh.append(found)
        return fresh

    def _adopt(self, file: rings.RingFile, now_ns: int) -> Watched | None:
        w = watch(
            file.pid,
            file.start_ticks,
            now_ns,
            ring=file,
            proc=self._proc,
            pidfd=self._held.pop(file.key, None),
        )
        if w.over():
            pulse_ns = int(1e9 * w.snapshot.pulse_s) if w.snapshot else 0
            if w.pidfd is None and self._first and (w.snapshot is None or pulse_ns > _STALE_NS):
                file.remove()  # left by an earlier run, whose server knows or never will
                w.close()
                return None
            w.end(now_ns)
            w.ended_ns = now_ns - pulse_ns  # it lived until then at least
        self._add(w)
        return w

    def _scan_siblings(self, now_ns: int) -> list[Watched]:
        ranks = [w.pid for w in self.watched.values() if w.ended is None and w.ring is not None]
        found = [
            watch(sibling.pid, sibling.start_ticks, now_ns, proc=self._proc)
            for sibling in siblings.scan(ranks, self._known, self._proc)
            if f"{sibling.pid}-{sibling.start_ticks}" not in self.watched
        ]
        for w in found:
            self._add(w)
        return found

    def _add(self, w: Watched) -> None:
        self.watched[w.key] = w
        if w.pidfd is not None:
            self._selector.register(w.pidfd, selectors.EVENT_READ, w.key)

    def _note_ranks(self) -> None:
        jobs = {w.identity.job for w in self.watched.values() if w.identity}
        self._known = {known for known in self._known if known[0] in jobs}
        self._known |= {
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
                self._drop(w)
                self.gone.append(w.key)

    def _remove(self, w: Watched) -> None:
        if w.ring is not None and w.key not in self._removed:
            self._removed.add(w.key)
            w.ring.remove()

    def _drop(self, w: Watched) -> None:
        w.close()
        del self.watched[w.key]
