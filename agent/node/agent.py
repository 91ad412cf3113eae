"""The node agent's loop: scans processes, sends heartbeats, executes the server's commands, and exits
after its ranks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from hangwatch.protocol import codec
from hangwatch.protocol.heartbeat import Heartbeat, HeartbeatReply

from ..environment import run_dir
from ..transport.client import ServerTarget
from .composer import HeartbeatComposer
from .discovery.watched import list_live_pids
from .discovery.watchlist import Watchlist
from .hardware.monitor import HardwareMonitor
from .reporting.uplink import HeartbeatOutcome, OutageTracker, Outbox, Uplink
from .requests.builder import RecorderBuilder
from .requests.commands import AbortTracker, CommandExecutor, CommandPoll
from .requests.recordings import RecordingWorker
from .requests.traces import TraceRequests
from .schedule import ProcessScanner, ReportSchedule
from .stacks.cuda_gdb import CudaGdb, KernelReader, locate_cuda_gdb
from .stacks.pyspy import PySpy
from .stacks.sampler import StackSampler
from .system.runtime import AgentLog, WakeupSelector

HEARTBEAT_INTERVAL_NS = 500_000_000  # used until the server sets another one
_MIN_FULL_INTERVAL_NS = 1_000_000_000  # a server may request everything again and again
_ABSENT_SERVER_TIMEOUT_S = 30.0  # how long the agent stays with something left to report
_LAST_HEARTBEAT_TIMEOUT_S = 2.0  # short, since whatever stops this agent waits for it
_MAX_READING_AGE_NS = 150_000_000  # a more recent reading is sent as it is
# A scan is delayed by up to this much so that it coincides with a heartbeat: waking twice costs more
# than either.
_SCAN_ALIGNMENT_NS = 50_000_000


class NodeAgent:
    """Watches one run dir in the thread that calls `run_loop`; other threads only wake it."""

    def __init__(
        self,
        folder: Path,
        targets: Sequence[ServerTarget],
        pyspy: PySpy,
        log: AgentLog,
        *,
        linger_s: float,
        early_pidfds: dict[str, int],
        owner: str,
    ) -> None:
        """``early_pidfds``: pidfds that are open already, by process key; it closes them."""
        self._wakeup = WakeupSelector()
        wake = self._wakeup.wake
        self._uplink = Uplink(targets, wake, warn_once=log.warn_once)
        self._recordings = RecordingWorker(pyspy, wake)
        preempt_recording = self._recordings.preempt_recording
        sampler = StackSampler(pyspy, wake, preempt_recording)
        cuda_gdb = CudaGdb(path=locate_cuda_gdb())
        kernels = KernelReader(cuda_gdb, wake, sampler.locks, preempt_recording)
        self._hardware = HardwareMonitor(wake)
        now_ns = time.monotonic_ns()
        self._schedule = ReportSchedule(now_ns)
        self._outbox = Outbox(on_reply=self._schedule.hasten)
        self._watchlist = Watchlist(
            folder,
            self._wakeup.selector,
            log,
            on_exit=self._schedule.hasten,
            early_pidfds=early_pidfds,
        )
        self._watched = self._watchlist.watched
        self._scanner = ProcessScanner(
            self._watchlist, sampler, RecorderBuilder(log), linger_s, now_ns
        )
        traces = TraceRequests()
        self._composer = HeartbeatComposer(
            self._watchlist,
            self._outbox,
            traces,
            host=socket.gethostname(),
            owner=owner,
            server_count=len(targets),
        )
        self._command_poll = CommandPoll(self._composer.agent_id, wake)
        self._commands = CommandExecutor(
            watched=self._watched,
            sampler=sampler,
            recordings=self._recordings,
            kernels=kernels,
            hardware=self._hardware,
            traces=traces,
            outbox=self._outbox,
            log=log,
            abort_tracker=AbortTracker(log.warn_once),
        )
        self._outage = OutageTracker(folder / run_dir.NOTICE_NAME, log)
        self._in_flight: Heartbeat | None = None
        self._next_full_ns = 0
        self.is_stop_requested = False

    def request_stop(self) -> None:
        """Makes `run_loop` return soon, after a last heartbeat. May be called in a signal handler."""
        self.is_stop_requested = True
        self._wakeup.wake()

    def run_loop(self) -> None:
        """Runs until all ranks have exited and that was reported, or until `request_stop`."""
        while not self.is_stop_requested:
            now_ns = time.monotonic_ns()
            if now_ns >= self._scan_due_ns:
                self._scan_processes(now_ns)
            self._collect_results()
            outcome = self._uplink.take_outcome()
            if outcome is not None:
                self._handle_outcome(outcome, now_ns)
            is_due = self._schedule.is_due(now_ns, may_hasten=not self._outage.is_failing)
            if is_due and not self._uplink.is_busy:
                self._post_heartbeat(now_ns)
            if self._may_exit(now_ns):
                break
            due_ns = self._scan_due_ns
            if not self._uplink.is_busy:
                due_ns = min(due_ns, self._schedule.next_ns)
            for key in self._wakeup.wait((due_ns - now_ns) / 1e9):
                process = self._watched.get(key)
                if process is not None:
                    self._watchlist.record_exit(process, time.monotonic_ns())
        # A last heartbeat reports what is known by now.
        if self._uplink.is_busy:
            outcome = self._uplink.take_outcome(_LAST_HEARTBEAT_TIMEOUT_S)
            if outcome is not None:
                self._handle_outcome(outcome, time.monotonic_ns())
        self._collect_results()
        if not self._uplink.is_busy:
            heartbeat = self._composer.compose_heartbeat(time.monotonic_ns(), is_last=True)
            self._uplink.post_heartbeat(codec.encode_message(heartbeat), urgent=True)
            outcome = self._uplink.take_outcome(_LAST_HEARTBEAT_TIMEOUT_S)
            if outcome is not None and outcome.reply is not None:
                self._composer.mark_acked(time.monotonic_ns())
        self._command_poll.close()
        self._recordings.close()
        self._watchlist.close()
        self._uplink.close()

    @property
    def _scan_due_ns(self) -> int:
        next_scan_ns = self._scanner.next_scan_ns
        delay_ns = self._schedule.next_ns - next_scan_ns
        if not self._uplink.is_busy and 0 <= delay_ns < _SCAN_ALIGNMENT_NS:
            return self._schedule.next_ns
        return next_scan_ns

    def _scan_processes(self, now_ns: int, *, must_read: bool = False) -> None:
        self._scanner.scan_processes(now_ns, must_read=must_read)
        self._outage.write_user_notice(now_ns)
        self._hardware.update_baseline(list_live_pids(self._watched.values()), now_ns)
        if self._outage.is_failing or self._scanner.is_steady:
            return
        self._schedule.apply_scan(
            self._watched.values(),
            now_ns,
            has_urgent_changes=self._scanner.has_urgent_changes,
        )

    def _collect_results(self) -> None:
        for command in self._command_poll.take_commands():
            self._commands.execute_command(command, time.monotonic_ns())
        self._commands.collect_results()

    def _post_heartbeat(self, now_ns: int) -> None:
        reading_age_ns = now_ns - self._scanner.last_read_ns
        if self._composer.is_full_due or reading_age_ns > _MAX_READING_AGE_NS:
            self._scan_processes(now_ns, must_read=True)
        self._in_flight = self._composer.compose_heartbeat(now_ns)
        if self._in_flight.full:
            self._next_full_ns = now_ns + _MIN_FULL_INTERVAL_NS
        is_urgent = self._schedule.start_report(
            self._watched.values(), now_ns + HEARTBEAT_INTERVAL_NS
        )
        self._uplink.post_heartbeat(
            codec.encode_message(self._in_flight),
            urgent=is_urgent,
            patient=self._schedule.is_infrequent,
        )

    def _handle_outcome(self, outcome: HeartbeatOutcome, now_ns: int) -> None:
        heartbeat, self._in_flight = self._in_flight, None
        assert heartbeat is not None
        if outcome.reply is not None:
            self._outage.record_success(str(self._uplink.target))
            self._composer.mark_extras_delivered(heartbeat)
            self._composer.apply_outcome(outcome, now_ns)
            self._apply_reply(outcome.reply, now_ns)
            return
        retry_s = self._outage.record_failure(outcome, now_ns)
        self._schedule.delay(now_ns + int(retry_s * 1e9))
        if not outcome.is_refused:
            return
        refused = self._watched.get(outcome.refused_key)
        if refused is not None and not refused.is_left_out:
            # The server would refuse the other ranks of the host as well.
            refused.is_left_out = refused.is_refused
            refused.is_refused = True
            return
        # The same heartbeat would be refused again: the next one omits the extras of this one, and
        # the one after that omits everything in it.
        self._composer.mark_extras_delivered(heartbeat)
        if self._outage.consecutive_refusals > 1:
            self._composer.mark_acked(now_ns)

    def _apply_reply(self, reply: HeartbeatReply, now_ns: int) -> None:
        self._schedule.apply_reply(
            reply, self._watched.values(), now_ns, is_steady=self._scanner.is_steady
        )
        if reply.resync:
            due_ns = self._schedule.next_ns if self._composer.is_full_due else now_ns
            self._schedule.delay(max(due_ns, self._next_full_ns))
            self._composer.request_full()
        else:
            self._composer.mark_acked(now_ns)
        self._command_poll.permit(reply.poll_s, self._uplink.target)
        for command in reply.commands:
            self._commands.execute_command(command, now_ns)

    def _may_exit(self, now_ns: int) -> bool:
        idle_s = self._scanner.idle_s(now_ns)
        if self._watchlist.has_alive or idle_s < self._scanner.linger_s:
            return False
        is_waiting = bool(self._outbox or self._commands.abort_tracker) or self._uplink.is_busy
        for process in self._watched.values():
            if process.identity is not None:
                is_waiting |= not process.exit_acked_ns or process.has_unsent_flight_file
        if is_waiting and idle_s < _ABSENT_SERVER_TIMEOUT_S:
            return False
        return not self._watchlist.scan_processes(now_ns)
