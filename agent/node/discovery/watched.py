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
from ..reporting import updates
from ..reporting.acked import AckedState, UnackedHistory
from ..reporting.call_tally import ProcessTally
from ..reporting.ring_metadata import parse_identity
from ..system import processes
from . import exits
from .rings import RingFile

_FLOOD_DIVISOR = 4  # a part of the ring
UNREADABLE_GRACE_NS = (
    2_000_000_000  # a ring may be without its identity for so long while it is being made
)


@dataclass(slots=True, kw_only=True)
class WatchedProcess:
    """A rank with a ring, or one known from /proc alone (``ring`` is None)."""

    pid: int
    start_ticks: int
    proc: str
    activity: processes.CpuActivity
    found_ns: int
    ring: RingFile | None = None
    reader: RingReader | None = None
    ring_inode: int = 0  # the number of what it reads
    snapshot: RingSnapshot | None = None
    identity: ProcessIdentity | None = None
    pidfd: int | None = None
    exit: ExitInfo | None = None
    exited_at_ns: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by topic: the last word on it
    stacks_refused: str | None = None  # why py-spy does not serve here; None while it does
    history: UnackedHistory = field(default_factory=UnackedHistory)
    tally: ProcessTally = field(default_factory=ProcessTally)
    acked: AckedState | None = None
    exit_acked_ns: int = 0  # when the server acknowledged its end
    is_paused: bool = False  # by our own samples, again and again
    is_flooded: bool = False  # a good part of its ring was written since the look before
    _ring_problem: str = ""

    @property
    def key(self) -> str:
        return run_dir.format_process_key(self.pid, self.start_ticks)

    @property
    def ring_problem(self) -> str:
        """What is wrong with its ring, if anything."""
        return self._ring_problem

    def read_state(self, now_ns: int) -> None:
        """Looks at the ring and at /proc. What cannot be read stays as it was, and why becomes a
        fault.
        """
        if self.ring is not None:
            self._read_ring(self.ring, now_ns)
        if self.identity is None and (self.ring is None or self._ring_problem):
            self.identity = identity_from_proc(self.pid, self.start_ticks, self.proc)
        if self.exit is None:
            with contextlib.suppress(OSError, ValueError):  # it ends just now: its pidfd tells
                self.activity.update_activity(self.pid, now_ns, self.proc)

    def _read_ring(self, ring: RingFile, now_ns: int) -> None:
        try:
            status = ring.stat_file()
            if self.reader is None or (status is not None and status.st_ino != self.ring_inode):
                self.ring_inode, self.reader = ring.open_reader()
            elif status is not None and status.st_size < len(
                self.reader.data
            ):  # reading on would be a SIGBUS
                raise RingError("truncated: it was cut short while its process lives")
            snapshot = ring.read_snapshot(self.reader, now_ns)
            news = self.reader.read_delta(self.history.cursor)
            self.history.add_delta(news)
            self.history.check_history.read_entries(self.reader, now_ns)
            if self.snapshot is None or self.snapshot.identity is not snapshot.identity:
                self._update_identity(snapshot)
        except (
            Exception
        ) as error:  # whatever nonsense is in there: the other ranks are read all the same
            self._record_unreadable(ring, error, now_ns)
            return
        self._ring_problem = ""
        self.faults.pop("ring", None)
        self.snapshot = snapshot
        self.is_flooded = len(news.records) * _FLOOD_DIVISOR > self.reader.record_capacity
        try:
            self.tally.add_records(news.records, snapshot.streams, self.reader)
        except Exception as error:  # what is told of its state does not suffer
            self.faults["performance"] = (
                f"how its calls perform is not told: {type(error).__name__}: {error}"
            )

    def _update_identity(self, snapshot: RingSnapshot) -> None:
        told = parse_identity(snapshot.identity, pid=self.pid, start_ticks=self.start_ticks)
        if told is not None and (
            self.identity is None or not updates.is_same_identity(told, self.identity)
        ):
            self.identity = told

    def _record_unreadable(self, ring: RingFile, error: Exception, now_ns: int) -> None:
        self.reader = None
        self.snapshot = None
        if now_ns - self.found_ns > UNREADABLE_GRACE_NS or self.exit is not None:
            if isinstance(error, RingError):
                reason = str(error)
            else:
                reason = (
                    isinstance(error, OSError) and error.strerror
                ) or f"corrupt: {type(error).__name__}: {error}"
            self._ring_problem = f"ring {ring.path.name} cannot be read: {reason}"
            self.faults["ring"] = self._ring_problem

    def has_ended(self) -> bool:
        """It has ended, though `end` may not have noted it yet."""
        if self.pidfd is not None:
            return bool(select.select([self.pidfd], [], [], 0)[0])
        return not processes.is_alive(self.pid, self.start_ticks, self.proc)

    def record_exit(self, now_ns: int) -> None:
        """Notes that it has ended, and how."""
        if self.exit is not None:
            return
        self.exit = exits.read_exit_info(self.pid, self.start_ticks, self.pidfd, self.proc)
        self.exited_at_ns = now_ns
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.read_state(now_ns)
        self.is_flooded = False
        if (
            self.exit == ExitInfo()
            and self.snapshot
            and self.snapshot.lifecycle == Lifecycle.EXITING
            and not self.snapshot.exception
        ):
            self.exit = ExitInfo(exit_status=0)
        self.activity.state = "X"

    def compose_update(self, now_ns: int) -> tuple[ProcessUpdate | None, AckedState | None]:
        """What the server must be told of it now, and what it will then know."""
        if self.identity is None:
            return None, self.acked
        reader = self.reader
        if (
            self.acked is None or self.acked.identity is not self.identity
        ):  # it will be told, with its age as of now
            self.identity = replace(
                self.identity, started_s=process_age_s(self.start_ticks, self.proc)
            )
        view = updates.ProcessView(
            key=self.key,
            identity=self.identity,
            snapshot=self.snapshot,
            state="S" if self.is_paused and self.activity.state == "t" else self.activity.state,
            idle_s=(now_ns - self.activity.last_busy_ns) / 1e9,
            cpu_s=round(self.activity.cpu_s, 2),
            exit=self.exit,
            exit_age_s=(now_ns - self.exited_at_ns) / 1e9 if self.exit else 0.0,
            faults=tuple(self.faults.values()),
        )
        try:
            tails = (
                reader.read_last_calls(now_ns)
                if reader and self.exit and not (self.acked and self.acked.includes_exit)
                else {}
            )
            return updates.compose_update(
                view,
                self.acked,
                self.history,
                now_ns,
                lambda *asked: self.read_calls(now_ns, *asked),
                tails,
            )
        except Exception as error:  # as above; next time without its ring
            if self.ring is None:
                raise
            self._record_unreadable(self.ring, error, now_ns)
            return None, self.acked

    def read_calls(self, now_ns: int, uid: int, from_seq: int, most: int) -> list[Call]:
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

    def mark_acked(self, acked: AckedState | None, now_ns: int) -> None:
        self.acked = acked
        if acked is not None:
            self.history.mark_acked(acked)
            if acked.includes_exit and not self.exit_acked_ns:
                self.exit_acked_ns = now_ns

    def reset_acked(self) -> None:
        """The server knows nothing of it any more."""
        self.acked = None
        self.history.rewind_cursor()

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.reader = self.snapshot = None


def watch_process(
    pid: int,
    start_ticks: int,
    now_ns: int,
    *,
    ring: RingFile | None = None,
    proc: str = processes.PROC_ROOT,
    pidfd: int | None = None,
) -> WatchedProcess:
    """Begins to watch a process, which may have ended already; ``pidfd`` where one is open."""
    watched = WatchedProcess(
        pid=pid,
        start_ticks=start_ticks,
        proc=proc,
        activity=processes.CpuActivity(last_busy_ns=now_ns),
        found_ns=now_ns,
        ring=ring,
        pidfd=exits.open_pidfd(pid, start_ticks, proc) if pidfd is None else pidfd,
    )
    watched.read_state(now_ns)
    return watched


def process_age_s(start_ticks: int, proc: str = processes.PROC_ROOT) -> float:
    """How long ago a process was started."""
    return round(max(0.0, processes.read_uptime_s(proc) - start_ticks / processes.TICKS_PER_S), 2)


def identity_from_proc(
    pid: int, start_ticks: int, proc: str = processes.PROC_ROOT
) -> ProcessIdentity | None:
    """Who a process is, by what its launcher put into its environment; None where that made it no
    rank.
    """
    try:
        launch = identity.parse_environ(processes.read_environ(pid, proc))
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
        started_s=process_age_s(start_ticks, proc),
    )
