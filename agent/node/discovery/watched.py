"""One process under watch: its ring and its /proc entry, read together."""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import Call
from hangwatch.model.ranks import ExitInfo, Lifecycle
from hangwatch.protocol.heartbeat import ProcessIdentity, ProcessUpdate
from hangwatch.ring import checks
from hangwatch.ring.layout import RingError
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import RingSnapshot

from ...environment import identity, run_dir
from ..reporting import performance, updates
from ..system import processes
from . import exits
from .rings import RingFile

_FLOOD = 4  # a part of the ring
UNREADABLE_NS = (
    2_000_000_000  # a ring may be without its identity for so long while it is being made
)


@dataclass(slots=True, kw_only=True)
class Watched:
    """A rank with a ring, or one known from /proc alone (``ring`` is None)."""

    pid: int
    start_ticks: int
    proc: str
    activity: processes.Activity
    found_ns: int
    ring: RingFile | None = None
    reader: RingReader | None = None
    file: int = 0  # the number of what it reads
    snapshot: RingSnapshot | None = None
    identity: ProcessIdentity | None = None
    pidfd: int | None = None
    ended: ExitInfo | None = None
    ended_ns: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by topic: the last word on it
    stacks_refused: str | None = None  # why py-spy does not serve here; None while it does
    history: updates.History = field(default_factory=updates.History)
    tally: performance.Tally = field(default_factory=performance.Tally)
    told: updates.Told | None = None
    reported_ns: int = 0  # when the server acknowledged its end
    paused: bool = False  # by our own samples, again and again
    flooded: bool = False  # a good part of its ring was written since the look before
    _problem: str = ""

    @property
    def key(self) -> str:
        return run_dir.process_key(self.pid, self.start_ticks)

    @property
    def problem(self) -> str:
        """What is wrong with its ring, if anything."""
        return self._problem

    def read(self, now_ns: int) -> None:
        """Looks at the ring and at /proc. What cannot be read stays as it was, and why becomes a
        fault.
        """
        if self.ring is not None:
            self._read_ring(self.ring, now_ns)
        if self.identity is None and (self.ring is None or self._problem):
            self.identity = identity_from_proc(self.pid, self.start_ticks, self.proc)
        if self.ended is None:
            with contextlib.suppress(OSError, ValueError):  # it ends just now: its pidfd tells
                self.activity.look(self.pid, now_ns, self.proc)

    def _read_ring(self, ring: RingFile, now_ns: int) -> None:
        try:
            status = ring.stat()
            if self.reader is None or (status is not None and status.st_ino != self.file):
                self.file, self.reader = ring.open()
            elif status is not None and status.st_size < len(
                self.reader.data
            ):  # reading on would be a SIGBUS
                raise RingError("truncated: it was cut short while its process lives")
            snapshot = ring.snapshot(self.reader, now_ns)
            news = self.reader.read_delta(self.history.cursor)
            self.history.take(news)
            self.history.checks.take(self.reader, now_ns)
            if self.snapshot is None or self.snapshot.identity is not snapshot.identity:
                self._identify(snapshot)
        except (
            Exception
        ) as error:  # whatever nonsense is in there: the other ranks are read all the same
            self._unreadable(ring, error, now_ns)
            return
        self._problem = ""
        self.faults.pop("ring", None)
        self.snapshot = snapshot
        self.flooded = len(news.records) * _FLOOD > self.reader.record_capacity
        try:
            self.tally.take(news.records, snapshot.streams, self.reader)
        except Exception as error:  # what is told of its state does not suffer
            self.faults["performance"] = (
                f"how its calls perform is not told: {type(error).__name__}: {error}"
            )

    def _identify(self, snapshot: RingSnapshot) -> None:
        told = updates.read_identity(snapshot.identity, pid=self.pid, start_ticks=self.start_ticks)
        if told is not None and (self.identity is None or not updates.same(told, self.identity)):
            self.identity = told

    def _unreadable(self, ring: RingFile, error: Exception, now_ns: int) -> None:
        self.reader = None
        self.snapshot = None
        if now_ns - self.found_ns > UNREADABLE_NS or self.ended is not None:
            if isinstance(error, RingError):
                reason = str(error)
            else:
                reason = (
                    isinstance(error, OSError) and error.strerror
                ) or f"corrupt: {type(error).__name__}: {error}"
            self._problem = f"ring {ring.path.name} cannot be read: {reason}"
            self.faults["ring"] = self._problem

    def over(self) -> bool:
        """It has ended, though `end` may not have noted it yet."""
        if self.pidfd is not None:
            return bool(select.select([self.pidfd], [], [], 0)[0])
        return not processes.alive(self.pid, self.start_ticks, self.proc)

    def end(self, now_ns: int) -> None:
        """Notes that it has ended, and how."""
        if self.ended is not None:
            return
        self.ended = exits.how_it_ended(self.pid, self.start_ticks, self.pidfd, self.proc)
        self.ended_ns = now_ns
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.read(now_ns)
        self.flooded = False
        if (
            self.ended == ExitInfo()
            and self.snapshot
            and self.snapshot.lifecycle == Lifecycle.EXITING
            and not self.snapshot.exception
        ):
            self.ended = ExitInfo(exit_status=0)
        self.activity.state = "X"

    def compose(self, now_ns: int) -> tuple[ProcessUpdate | None, updates.Told | None]:
        """What the server must be told of it now, and what it will then know."""
        if self.identity is None:
            return None, self.told
        reader = self.reader
        if (
            self.told is None or self.told.identity is not self.identity
        ):  # it will be told, with its age as of now
            self.identity = replace(self.identity, started_s=age_s(self.start_ticks, self.proc))
        view = updates.View(
            key=self.key,
            identity=self.identity,
            snapshot=self.snapshot,
            state="S" if self.paused and self.activity.state == "t" else self.activity.state,
            idle_s=(now_ns - self.activity.busy_ns) / 1e9,
            cpu_s=round(self.activity.cpu_s, 2),
            ended=self.ended,
            ended_s=(now_ns - self.ended_ns) / 1e9 if self.ended else 0.0,
            faults=tuple(self.faults.values()),
        )
        try:
            tails = (
                reader.read_last_calls(now_ns)
                if reader and self.ended and not (self.told and self.told.end)
                else {}
            )
            return updates.compose(
                view,
                self.told,
                self.history,
                now_ns,
                lambda *asked: self.calls(now_ns, *asked),
                tails,
            )
        except Exception as error:  # as above; next time without its ring
            if self.ring is None:
                raise
            self._unreadable(self.ring, error, now_ns)
            return None, self.told

    def calls(self, now_ns: int, uid: int, from_seq: int, most: int) -> list[Call]:
        """Calls of one sequence that the ring still has, oldest first; before them those of which
        its checks still tell.
        """
        try:
            found = (
                self.reader.read_calls(uid, now_ns, from_seq=from_seq, max_calls=most)
                if self.reader
                else []
            )
            examined = (
                checks.read_checked_calls(self.reader, uid, now_ns, from_seq=from_seq)
                if self.reader
                else []
            )
            return [call for call in examined if not found or call.seq < found[0].seq] + found
        except Exception:  # as above: `read` says so
            return []

    def acknowledged(self, told: updates.Told | None, now_ns: int) -> None:
        self.told = told
        if told is not None:
            self.history.acknowledged(told)
            if told.end and not self.reported_ns:
                self.reported_ns = now_ns

    def forget(self) -> None:
        """The server knows nothing of it any more."""
        self.told = None
        self.history.rewind()

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.reader = self.snapshot = None


def watch(
    pid: int,
    start_ticks: int,
    now_ns: int,
    *,
    ring: RingFile | None = None,
    proc: str = processes.PROC,
    pidfd: int | None = None,
) -> Watched:
    """Begins to watch a process, which may have ended already; ``pidfd`` where one is open."""
    watched = Watched(
        pid=pid,
        start_ticks=start_ticks,
        proc=proc,
        activity=processes.Activity(busy_ns=now_ns),
        found_ns=now_ns,
        ring=ring,
        pidfd=exits.open_pidfd(pid, start_ticks, proc) if pidfd is None else pidfd,
    )
    watched.read(now_ns)
    return watched


def age_s(start_ticks: int, proc: str = processes.PROC) -> float:
    """How long ago a process was started."""
    return round(max(0.0, processes.uptime_s(proc) - start_ticks / processes.TICKS), 2)


def identity_from_proc(
    pid: int, start_ticks: int, proc: str = processes.PROC
) -> ProcessIdentity | None:
    """Who a process is, by what its launcher put into its environment; None where that made it no
    rank.
    """
    try:
        launch = identity.from_environ(processes.read_environ(pid, proc))
        program = " ".join(processes.read_cmdline(pid, proc))[:300]
    except OSError:
        return None
    if launch.rank is None:
        return None
    return ProcessIdentity(
        job=launch.job,
        restart=launch.restart,
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        pid=pid,
        start_ticks=start_ticks,
        program=program,
        on_hang=launch.on_hang,
        started_s=age_s(start_ticks, proc),
    )
