"""One watched process: reads its ring and its /proc entry, and composes its updates. The identity of a
rank without a ring is read from /proc, and so is the reason why its calls are not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hangwatch.model.calls import Call, decode_fields
from hangwatch.model.ranks import ExitInfo, Lifecycle
from hangwatch.protocol.heartbeat import ProcessIdentity, ProcessUpdate
from hangwatch.ring import checks
from hangwatch.ring.layout import RingError
from hangwatch.ring.parts import STAMP
from hangwatch.ring.reader import RingReader, RingSnapshot

from ...environment import identity, run_dir
from ...environment.identity import LaunchInfo
from ..reporting import updates
from ..reporting.acked import AckedState, UnackedHistory
from ..reporting.calls import CallLog, ProcessTally
from ..system import processes
from ..system.processes import CpuActivity
from ..system.runtime import describe_error
from . import rings
from .flight_files import FlightFileReader, make_reader
from .rings import RingFile

FLOOD_DIVISOR = 4  # a ring is flooded if more than this fraction of it was written since last time
_ACTIVITY_INTERVAL_NS = 900_000_000  # between readings of /proc while the process makes calls
MAX_SEQ = 1 << 63  # no sequence number is as high
UNREADABLE_GRACE_NS = 2_000_000_000  # a ring that is being created may lack its identity
# Importing torch takes seconds, or much longer from a slow disk; the recorder starts at its end.
TORCH_IMPORT_S = 30.0
_PULSE_RESOLUTION_NS = 1_000_000
_TORCH_LIBRARY = "/torch/lib/libtorch"


@dataclass(slots=True, kw_only=True)
class WatchedProcess:
    """A rank with a ring, or one known from /proc alone (``ring`` is None)."""

    pid: int
    start_ticks: int
    key: str = field(init=False)
    activity: CpuActivity
    found_ns: int
    ring: RingFile | None = None
    reader: RingReader | None = None
    snapshot: RingSnapshot | None = None
    launch: LaunchInfo | None = None  # if its environment alone does not name its rank
    identity: ProcessIdentity | None = None
    pidfd: int | None = None
    exit: ExitInfo | None = None
    exited_at_ns: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # the latest message for each topic
    history: UnackedHistory = field(default_factory=UnackedHistory)
    call_log: CallLog = field(default_factory=CallLog)
    tally: ProcessTally = field(default_factory=ProcessTally)
    acked: AckedState | None = None
    composed: AckedState | None = None  # what the server will know once it has the last update
    exit_acked_ns: int = 0  # when the server acknowledged its exit
    flight_reader: FlightFileReader | None = None
    is_pyspy_probed: bool = False  # it was checked whether py-spy can sample it
    is_refused: bool = False  # the server refused what its ring holds, which is not read any more
    is_left_out: bool = False  # the server refused it without its ring, too: it is not reported
    is_flooded: bool = False  # a large part of its ring was written since the last reading
    _activity_read_ns: int = 0
    _pulse_ns: int = 0  # the newest pulse of the recorder's thread
    _paused_at_pulse_ns: int = 0  # `CpuActivity.paused_ns` at the time of that pulse
    _ring_inode: int = 0  # the file that the history is of

    def __post_init__(self) -> None:
        self.key = run_dir.format_process_key(self.pid, self.start_ticks)

    @property
    def ring_problem(self) -> str:
        """What is wrong with its ring; empty if nothing is."""
        return self.faults.get("ring", "")

    def read_state(self, now_ns: int) -> None:
        """Reads ring and /proc. What cannot be read keeps its last state and becomes a fault."""
        known_count = self.history.cursor
        if self.ring is not None:
            self._read_ring(self.ring, now_ns)
        if self.identity is None and (self.ring is None or self.ring_problem):
            with contextlib.suppress(OSError):  # the process has just ended
                launch = self.launch
                if launch is None:
                    launch = identity.parse_environ(processes.read_environ(self.pid))
                program = " ".join(processes.read_cmdline(self.pid))[:300]
                data = {**asdict(launch), "program": program}
                self.identity = parse_identity(data, pid=self.pid, start_ticks=self.start_ticks)
        if self.exit is not None:
            return
        # Calls that were made since the last reading show that the process runs.
        has_new_calls = self.history.cursor != known_count
        if not has_new_calls or now_ns - self._activity_read_ns >= _ACTIVITY_INTERVAL_NS:
            self._activity_read_ns = now_ns
            with contextlib.suppress(OSError, ValueError):  # the process has just ended
                caller_tid = self.history.newest_thread
                self.activity.update_activity(self.pid, now_ns, caller_tid)
        snapshot = self.snapshot
        # An older one was corrected when it was read.
        if snapshot is not None and snapshot.read_ns == now_ns:
            self.snapshot = self._leave_out_pauses(snapshot, now_ns)

    def _read_ring(self, ring: RingFile, now_ns: int) -> None:
        """Reads the ring. The history, the call log and the tally share the records that are new."""
        history = self.history
        known_count = history.cursor
        try:
            if self.is_refused:
                raise RingError("the server refuses a value in it, see the node agent's log")
            self.reader = ring.refresh_reader(self.reader)
            if self.reader.inode != self._ring_inode:  # the first one, or one after exec()
                self._ring_inode = self.reader.inode
                history.rewind_cursor()
                history.cursor = known_count = 0
            first_unread = history.first_unread
            snapshot = self.reader.read_snapshot(now_ns)
            delta = self.reader.read_delta(first_unread)
            if any(index >= first_unread for index in delta.retracted):
                # A retracted call may have been in progress when the snapshot was taken.
                snapshot = self.reader.read_snapshot(now_ns)
            for uid, seq in history.add_delta(delta):
                self.call_log.remove_call(uid, seq)
            history.forget_closed_streams(snapshot)
            history.check_history.read_entries(self.reader, now_ns)
            if self.snapshot is None or self.snapshot.identity is not snapshot.identity:
                recorded = parse_identity(
                    snapshot.identity, pid=self.pid, start_ticks=self.start_ticks
                )
                if recorded is not None and recorded != self.identity:
                    self.identity = recorded
        except Exception as error:  # a corrupt ring must not keep the other ranks from being read
            self._record_unreadable(ring, error, now_ns)
            return
        self.faults.pop("ring", None)
        # After a resync, the history alone gets the records that were read before.
        new_records = [record for record in delta.records if record[STAMP] > known_count]
        self.call_log.add_records(new_records)
        self.snapshot = snapshot
        self.is_flooded = len(new_records) * FLOOD_DIVISOR > self.reader.record_capacity
        try:
            self.tally.add_records(new_records, snapshot.streams, self.reader)
        except Exception as error:  # the state of the process is reported all the same
            problem = f"the performance of its calls is not reported: {describe_error(error)}"
            self.faults["performance"] = problem

    def _record_unreadable(self, ring: RingFile, error: Exception, now_ns: int) -> None:
        self.reader = None
        self.snapshot = None
        if now_ns - self.found_ns <= UNREADABLE_GRACE_NS and self.exit is None:
            return
        if isinstance(error, RingError):
            reason = str(error)
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        else:
            reason = f"corrupt: {describe_error(error)}"
        self.faults["ring"] = f"ring {ring.path.name} cannot be read: {reason}"

    def update_unrecorded(self, now_ns: int) -> None:
        """Updates the reason why it has no ring."""
        if self.identity is None or self.ring is not None or self.exit is not None:
            return
        # mpirun's and srun's tasks are recorded from init_process_group on, not when they import torch.
        watched_s = (now_ns - self.found_ns) / 1e9 if self.launch is None else 0.0
        reason = find_unrecorded_reason(self.pid, watched_s)
        if reason != self.identity.unrecorded:
            self.identity = replace(self.identity, unrecorded=reason)

    def has_ended(self) -> bool:
        """The process has ended, even if `record_exit` was not called yet."""
        if self.pidfd is not None:
            return bool(select.select([self.pidfd], [], [], 0)[0])
        return processes.read_live_stat(self.pid, self.start_ticks) is None

    def record_exit(self, now_ns: int) -> None:
        """Records that the process has ended, and how."""
        if self.exit is not None:
            return
        self.exit = rings.read_exit_info(self.pid, self.start_ticks, self.pidfd)
        self.exited_at_ns = now_ns
        self._close_pidfd()
        self.read_state(now_ns)
        self.is_flooded = False
        ring = self.snapshot
        was_exiting = (
            ring is not None and ring.lifecycle == Lifecycle.EXITING and not ring.exception
        )
        if self.exit == ExitInfo() and was_exiting:  # the status is lost, but Python was exiting
            self.exit = ExitInfo(exit_status=0)
        self.activity.state = "X"
        if self.exit.signal == signal.SIGABRT and self.flight_reader and self.identity:
            self.flight_reader.start_reading(self.identity.rank)

    @property
    def has_unsent_flight_file(self) -> bool:
        """The Flight Recorder file is being read, or the server does not have it yet."""
        reader = self.flight_reader
        if reader is None:
            return False
        if reader.thread is not None and reader.thread.is_alive():
            return True
        acked_key = self.acked.status_key if self.acked is not None else ()
        return reader.file is not None and reader.file not in acked_key

    def compose_update(self, now_ns: int) -> ProcessUpdate | None:
        """The update that is due, if any."""
        self.composed = self.acked
        if self.identity is None or self.is_left_out:
            return None
        if self.acked is None or self.acked.identity is not self.identity:
            # The identity will be sent, with the age of the process as of now.
            age_s = processes.measure_age_s(self.start_ticks)
            self.identity = replace(self.identity, started_s=age_s)
        fetch_calls = functools.partial(self.read_calls, now_ns)
        try:
            last_calls: dict[int, list[Call]] = {}
            is_exit_due = self.exit and not (self.acked and self.acked.includes_exit)
            if self.reader and is_exit_due:
                last_calls = self.reader.read_last_calls(now_ns)
            update, self.composed = updates.compose_update(
                self._make_update(now_ns),
                self.snapshot,
                self.acked,
                self.history,
                now_ns,
                fetch_calls,
                last_calls,
            )
            if update is not None:
                self.history.composed_streams = self.composed.streams
            return update
        except Exception as error:  # the ring is corrupt: the next update leaves it out
            if self.ring is None:
                raise
            self._record_unreadable(self.ring, error, now_ns)
            return None

    def _make_update(self, now_ns: int) -> ProcessUpdate:
        """What is known without the ring."""
        activity = self.activity
        return ProcessUpdate(
            key=self.key,
            identity=self.identity,
            state=activity.state,
            idle_s=(now_ns - activity.last_busy_ns) / 1e9,
            cpu_s=round(activity.cpu_s, 2),
            ended=self.exit,
            ended_s=(now_ns - self.exited_at_ns) / 1e9 if self.exit else 0.0,
            faults=tuple(self.faults.values()),
            flight_file=self.flight_reader.file if self.flight_reader else None,
        )

    def _leave_out_pauses(self, snapshot: RingSnapshot, now_ns: int) -> RingSnapshot:
        """The snapshot with a pulse that does not age while our py-spy pauses the process, which takes
        seconds if the process has thousands of threads.
        """
        pulse_ns = now_ns - int(1e9 * snapshot.pulse_s)
        if pulse_ns - self._pulse_ns >= _PULSE_RESOLUTION_NS:
            self._pulse_ns = pulse_ns
            self._paused_at_pulse_ns = self.activity.paused_ns
        paused_s = (self.activity.paused_ns - self._paused_at_pulse_ns) / 1e9
        if not paused_s or not snapshot.pulse_s:
            return snapshot
        pulse_s = max(_PULSE_RESOLUTION_NS / 1e9, snapshot.pulse_s - paused_s)
        return replace(snapshot, pulse_s=pulse_s)

    def read_calls(self, now_ns: int, uid: int, from_seq: int, max_calls: int) -> list[Call]:
        """The newest calls of a stream from ``from_seq`` on, oldest first, as far as known."""
        if self.reader is None:
            return []
        try:
            calls = self.reader.read_calls(uid, now_ns, from_seq=from_seq, max_calls=max_calls)
        except Exception:  # the ring is corrupt: `read_state` reports it
            return []
        if calls and (calls[0].seq <= from_seq or len(calls) >= max_calls):
            return calls
        return self.read_window(now_ns, uid, from_seq, MAX_SEQ)[-max_calls:]

    def read_window(
        self, now_ns: int, uid: int, first: int, last: int, step: int = 1
    ) -> list[Call]:
        """The calls of one stream from ``first`` to ``last`` at multiples of ``step``, oldest
        first: those in the ring, those in its check table, and older ones that were read from it.
        """
        reader = self.reader
        if reader is None:
            return []
        try:
            logged = self.call_log.list_calls(reader, now_ns, uid, first, last, step)
            found = {call.seq: call for call in logged}
            for call in checks.read_checked_calls(reader, uid, now_ns, from_seq=first):
                if call.seq <= last and call.seq % step == 0:
                    found[call.seq] = call
            most = reader.record_capacity
            recorded = reader.read_calls(
                uid, now_ns, max_calls=most, from_seq=first, to_seq=last, step=step
            )
            found.update({call.seq: call for call in recorded})
        except Exception:  # the ring is corrupt: `read_state` reports it
            return []
        return [found[seq] for seq in sorted(found)]

    def mark_acked(self, now_ns: int) -> None:
        """The server has the last update."""
        self.acked = self.composed
        if self.acked is not None:
            self.history.mark_acked(self.acked)
            if self.acked.includes_exit and not self.exit_acked_ns:
                self.exit_acked_ns = now_ns

    def reset_acked(self) -> None:
        """The server has lost everything that it knew about this process."""
        self.acked = self.composed = None
        self.history.rewind_cursor()

    def close(self) -> None:
        self._close_pidfd()
        self.reader = self.snapshot = None

    def _close_pidfd(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


WatchedByKey = Mapping[str, WatchedProcess]


def list_live_pids(watched: Iterable[WatchedProcess]) -> tuple[int, ...]:
    return tuple(process.pid for process in watched if process.exit is None)


def watch_process(
    pid: int,
    start_ticks: int,
    now_ns: int,
    *,
    ring: RingFile | None = None,
    launch: LaunchInfo | None = None,
    pidfd: int | None = None,
) -> WatchedProcess:
    """Starts to watch a process, which may have ended already. ``launch`` has its rank if it has no
    ring; ``pidfd`` is one that is open already.
    """
    watched = WatchedProcess(
        pid=pid,
        start_ticks=start_ticks,
        activity=CpuActivity(last_busy_ns=now_ns),
        found_ns=now_ns,
        ring=ring,
        launch=launch,
        pidfd=rings.open_pidfd(pid, start_ticks) if pidfd is None else pidfd,
        flight_reader=make_reader(pid, processes.measure_age_s(start_ticks)),
    )
    watched.read_state(now_ns)
    return watched


def parse_identity(
    data: Mapping[str, Any], *, pid: int, start_ticks: int
) -> ProcessIdentity | None:
    """The identity in a ring, or one with the fields of a `LaunchInfo`, without age; None while the
    rank is unknown. Raises ValueError.
    """
    if data.get("rank") is None:
        return None
    values = {"world_size": 0, **data, "pid": pid, "start_ticks": start_ticks}
    try:
        return ProcessIdentity(**decode_fields(ProcessIdentity, values))
    except TypeError as error:
        raise ValueError(f"malformed identity: {error!r}") from error


def find_unrecorded_reason(pid: int, watched_s: float, proc: str = processes.PROC_ROOT) -> str:
    """Why a rank is not recorded, with the remedy; empty if it may still be starting."""
    try:
        environ = processes.read_environ(pid, proc)
        if not environ.get("HANGWATCH_URL"):
            return "HANGWATCH_URL is not in its environment: have the launcher pass it on"
        if identity.is_switched_off(environ):
            return "HANGWATCH_DISABLE=1 is in its environment: remove it"
        if watched_s < TORCH_IMPORT_S:
            return ""
        if _TORCH_LIBRARY not in processes.read_text(f"{proc}/{pid}/maps"):
            return ""
        python = os.readlink(f"{proc}/{pid}/exe")
    except OSError:  # the process has ended
        return ""
    return (
        f"it uses torch without hangwatch: {python} -m pip install hangwatch, into the environment of"
        " its torch"
    )
