"""The node agent's loop: reads, tells the server what changed, does what the server asks, and
leaves after its ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hangwatch.protocol import codec, heartbeat

from ..environment import run_dir
from .discovery.changes import ChangeDetector
from .discovery.watched import WatchedProcess
from .discovery.watchlist import Watchlist
from .reporting import performance, terse, updates
from .reporting.outbox import Outbox
from .reporting.uplink import HeartbeatOutcome, ServerTarget, Uplink, draw_backoff_s
from .requests.aborts import AbortTracker
from .requests.builder import RecorderBuilder
from .requests.live import LiveRequests
from .stacks import faulthandler_dumps
from .stacks.pyspy import PySpy
from .stacks.sampler import SampleOrder, StackSampler
from .system import cost, processes
from .system.log import AgentLog

COST_INTERVAL_HEARTBEATS = 20  # heartbeats
_MAX_READ_AGE_NS = 150_000_000  # what was read so lately is told as it is
# a look waits so long for the heartbeat that tells of it: to be woken twice costs more than either
_SCAN_ALIGNMENT_NS = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """All of the agent's own times, in seconds."""

    scan_interval_s: float = 0.5  # between two looks
    fast_scan_interval_s: float = 0.2  # the same while processes come, or where a ring fills fast
    startup_window_s: float = 10.0  # after which no more processes are expected
    heartbeat_interval_s: float = 0.5  # until the server says another one
    linger_s: float = 3.0  # without a live process
    first_process_timeout_s: float = 5.0  # without a first one
    absent_server_timeout_s: float = 30.0  # with something left to report
    user_notice_after_s: float = 3.0  # without the server, until the user is told
    last_heartbeat_timeout_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightHeartbeat:
    """A heartbeat that was handed to the uplink."""

    heartbeat: heartbeat.Heartbeat
    acked_states: dict[str, updates.AckedState | None] = field(default_factory=dict)


class NodeAgent:
    """Watches one run dir. Everything happens in the thread that calls `run`; others only wake it."""

    def __init__(
        self,
        folder: Path,
        target: ServerTarget,
        pyspy: PySpy,
        log: AgentLog,
        *,
        proc: str = processes.PROC_ROOT,
        timing: AgentTiming | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        early_pidfds: dict[str, int] | None = None,
    ) -> None:
        """``held``: pidfds, by key, of processes that were held before there was time to watch
        them; they are closed here.
        """
        self._folder = folder
        self._log = log
        self._proc = proc
        self._timing = timing or AgentTiming()
        self._clock = clock
        self._host = socket.gethostname()
        self._id = secrets.token_hex(8)
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ)
        self._watchlist = Watchlist(
            folder, self._selector, log, proc=proc, early_pidfds=early_pidfds
        )
        self._live_requests = LiveRequests(pyspy, self.wake_loop)
        self._sampler = StackSampler(
            pyspy, self.wake_loop, self._live_requests.recording_worker.preempt_recording
        )
        self._recorder_builder = RecorderBuilder(log)
        self._uplink = Uplink(target, self.wake_loop)
        self._outbox = Outbox()
        self._abort_tracker = AbortTracker()
        self._performance_reporter = performance.PerformanceReporter()
        self._probed_keys: set[str] = set()
        self._handled_command_ids: deque[str] = deque(
            maxlen=1024
        )  # those that were taken up: the server may repeat itself
        self._in_flight: InFlightHeartbeat | None = None
        self._heartbeat_number = 0
        self._send_full = True
        self._is_urgent = False
        self._change_detector = ChangeDetector()
        self._has_urgent_changes = False  # it is urgent
        self._server_is_waiting = False  # the server waits for it
        self._terse_until_ns = 0
        self._consecutive_failures = self._consecutive_refusals = 0
        self._server_lost_ns = 0
        self._server_problem = ""
        self._user_notified = False
        self._stop_requested = False
        now = clock()
        self._next_scan_ns = self._next_heartbeat_ns = now
        self._last_read_ns = 0
        self._last_found_ns = now  # a process was found
        self._last_alive_ns = now
        self._had_live_process = False

    def wake_loop(self) -> None:
        """Makes the loop look around; from any thread, or a signal handler."""
        with contextlib.suppress(BlockingIOError):  # full: it will look in any case
            os.write(self._wake_write_fd, b"\0")

    def request_stop(self) -> None:
        """Ends `run` soon, after a last heartbeat."""
        self._stop_requested = True
        self.wake_loop()

    def run_loop(self) -> None:
        """Until every rank has gone and their end is told, or `stop`."""
        while not self._stop_requested:
            now = self._clock()
            if now >= self._scan_due_ns:
                self._scan_processes(now)
            self._collect_results()
            if (outcome := self._uplink.take_outcome()) is not None:
                self._handle_outcome(outcome, now)
            if not self._uplink.is_busy and now >= self._next_heartbeat_ns - (
                self._urgent_lead_ns if self._is_urgent else 0
            ):
                self._post_heartbeat(now)
            if self._may_exit(now):
                break
            self._wait_for_events(now)
        self._send_last_heartbeat()
        self._live_requests.recording_worker.close()
        self._watchlist.close()
        self._uplink.close()

    @property
    def _scan_due_ns(self) -> int:
        together = (
            not self._uplink.is_busy
            and self._next_scan_ns
            <= self._next_heartbeat_ns
            < self._next_scan_ns + _SCAN_ALIGNMENT_NS
        )
        return self._next_heartbeat_ns if together else self._next_scan_ns

    @property
    def _urgent_lead_ns(self) -> int:
        """How much earlier than planned an urgent heartbeat may go: at any time, but not while the
        server is away.
        """
        return 0 if self._consecutive_failures else 60_000_000_000

    def _wait_for_events(self, now: int) -> None:
        until = (
            self._scan_due_ns
            if self._uplink.is_busy
            else min(self._scan_due_ns, self._next_heartbeat_ns)
        )
        for key, _ in self._selector.select(max(0.0, (until - now) / 1e9)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):  # somebody else emptied it
                    os.read(self._wake_read_fd, 4096)
            elif (w := self._watchlist.watched.get(key.data)) is not None:
                self._watchlist.record_exit(w, self._clock())
                self._is_urgent = True

    def _scan_processes(self, now: int) -> None:
        fresh = self._watchlist.scan_processes(now)
        self._is_urgent |= any(w.exit is not None for w in fresh)
        self._is_urgent |= self._watchlist.read_processes(now)
        self._last_read_ns = now
        if (
            not self._consecutive_failures
            and (news := self._change_detector.check_changes(self._watchlist.watched.values()))
            is not None
        ):
            within_s, self._has_urgent_changes = news
            self._next_heartbeat_ns = min(self._next_heartbeat_ns, now + int(within_s * 1e9))
        if fresh:
            self._last_found_ns = now
        brisk = now - self._last_found_ns < self._timing.startup_window_s * 1e9 or any(
            w.is_flooded for w in self._watchlist.watched.values()
        )
        self._next_scan_ns = now + int(
            (self._timing.fast_scan_interval_s if brisk else self._timing.scan_interval_s) * 1e9
        )
        self._watchlist.clean_up(now)
        self._write_user_notice(now)
        for w in self._watchlist.watched.values():
            ready = (
                w.key not in self._probed_keys
                and w.exit is None
                and w.snapshot is not None
                and w.identity is not None
            )
            if ready and self._sampler.submit_order(self._make_sample_order(w)):
                self._probed_keys.add(w.key)
            if w.snapshot is not None:
                self._recorder_builder.update_build(w.snapshot.identity)
        self._probed_keys &= self._watchlist.watched.keys()
        if self._watchlist.has_alive:
            self._last_alive_ns, self._had_live_process = now, True

    def _make_sample_order(
        self, w: WatchedProcess, request_id: str | None = None, native: bool = False
    ) -> SampleOrder:
        registration = (
            faulthandler_dumps.FaulthandlerRegistration.from_identity(w.snapshot.identity)
            if w.snapshot
            else None
        )
        path = w.ring.stacks_path if w.ring else None
        return SampleOrder(
            key=w.key, pid=w.pid, start_ticks=w.start_ticks, request_id=request_id, native=native,
            registration=registration, stacks_path=path,
        )  # fmt: skip

    def _collect_results(self) -> None:
        self._is_urgent |= self._live_requests.collect_results()
        for result in self._sampler.take_results():
            w = self._watchlist.watched.get(result.key)
            if result.was_continued:
                self._log.warning(f"py-spy left process {result.key} stopped: it was continued")
            if w is not None and result.refusal:
                fallback = (
                    faulthandler_dumps.FaulthandlerRegistration.from_identity(w.snapshot.identity)
                    if w.snapshot
                    else None
                )
                w.faults["stacks"] = result.refusal + (
                    " (until then stacks come from faulthandler)" if fallback else ""
                )
                self._log.warn_once(result.refusal)
            if result.sample is not None:
                self._outbox.add_sample(result.sample, result.taken_ns)
                self._is_urgent = True
        self._is_urgent |= self._abort_tracker.check_exits(self._watchlist.watched, self._clock())

    def _post_heartbeat(self, now: int) -> None:
        if now - self._last_read_ns > _MAX_READ_AGE_NS:
            self._scan_processes(now)
        self._in_flight = self._compose_heartbeat(now)
        urgent, self._is_urgent, self._has_urgent_changes = (
            self._is_urgent or self._has_urgent_changes or self._server_is_waiting,
            False,
            False,
        )
        self._change_detector.mark_reported(self._watchlist.watched.values())
        self._next_heartbeat_ns = now + int(self._timing.heartbeat_interval_s * 1e9)
        self._uplink.post_heartbeat(
            self._in_flight.heartbeat.number,
            codec.encode_message(self._in_flight.heartbeat),
            urgent=urgent,
            patient=self._change_detector.is_enabled,
        )

    def _compose_heartbeat(self, now: int, *, leaving: bool = False) -> InFlightHeartbeat:
        told: dict[str, updates.AckedState | None] = {}
        parts: dict[str, heartbeat.ProcessUpdate | None] = {}
        for key, w in self._watchlist.watched.items():
            w.is_paused = self._live_requests.recording_worker.is_pausing(key)
            parts[key], told[key] = w.compose_update(now)
        self._heartbeat_number += 1
        gone = self._watchlist.finished_keys + [
            key for key, w in self._watchlist.watched.items() if leaving and w.exit is not None
        ]
        brief = bool(parts) and not self._send_full and not gone and now < self._terse_until_ns
        if brief := brief and all(
            terse.is_progressing(w.snapshot, w.acked, parts[k], told[k])
            for k, w in self._watchlist.watched.items()
        ):
            shortened = {
                k: terse.make_terse_update(w.snapshot, w.acked, parts[k], told[k])
                for k, w in self._watchlist.watched.items()
            }
            parts, told = (
                {k: part for k, (part, _) in shortened.items()},
                {k: known for k, (_, known) in shortened.items()},
            )
        beat = heartbeat.Heartbeat(
            host=self._host, agent=self._id, number=self._heartbeat_number, full=self._send_full, brief=brief, gone=tuple(gone),
            processes=tuple([part for part in parts.values() if part is not None]), samples=self._outbox.pending_samples(now),
            calls=self._outbox.pending_calls(), aborts=self._abort_tracker.pending_replies(), sent_s=round(now / 1e9, 3),
            traces=self._live_requests.build_trace_replies(self._watchlist.watched, now), recordings=self._live_requests.next_recording_replies(),
            cost=cost.measure_cost(self._outbox.dropped_count) if self._heartbeat_number % COST_INTERVAL_HEARTBEATS == 1 else None,
            performance=self._performance_reporter.next_report(now, {key: w.tally for key, w in self._watchlist.watched.items()}, flush=leaving),
        )  # fmt: skip
        return InFlightHeartbeat(heartbeat=beat, acked_states=told)

    def _handle_outcome(self, outcome: HeartbeatOutcome, now: int) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is None or outcome.number != flight.heartbeat.number:
            return
        if outcome.reply is None:
            self._handle_failure(flight, outcome, now)
            return
        self._handle_recovery()
        self._mark_extras_delivered(flight)
        reply = outcome.reply
        self._performance_reporter.apply_outcome(outcome)
        self._next_heartbeat_ns = now + int(reply.interval_s * 1e9)
        self._change_detector.apply_reply(self._watchlist.watched.values(), reply.news_s)
        self._server_is_waiting = reply.urgent
        self._terse_until_ns = now + int((reply.details_s or 0.0) * 1e9)
        if reply.resync:
            for w in self._watchlist.watched.values():
                w.reset_acked()
            self._last_read_ns = 0
            if not self._send_full:
                self._next_heartbeat_ns = now
            self._send_full = True
        else:
            self._mark_acked(flight, now)
        for command in reply.commands:
            self._execute_command(command, now)

    def _mark_acked(self, flight: InFlightHeartbeat, now: int) -> None:
        self._send_full = False
        for key, told in flight.acked_states.items():
            if (w := self._watchlist.watched.get(key)) is not None:
                w.mark_acked(told, now)

    def _mark_extras_delivered(self, flight: InFlightHeartbeat) -> None:
        self._outbox.mark_delivered(flight.heartbeat.samples, flight.heartbeat.calls)
        self._abort_tracker.mark_delivered(flight.heartbeat.aborts)
        self._live_requests.mark_delivered(flight.heartbeat)
        self._performance_reporter.mark_delivered(flight.heartbeat.performance)
        self._watchlist.finished_keys = [
            key for key in self._watchlist.finished_keys if key not in flight.heartbeat.gone
        ]

    def _handle_failure(
        self, flight: InFlightHeartbeat, outcome: HeartbeatOutcome, now: int
    ) -> None:
        self._consecutive_failures += 1
        self._next_heartbeat_ns = now + int(
            (outcome.retry_after_s + draw_backoff_s(self._consecutive_failures)) * 1e9
        )
        if outcome.is_refused:
            # The same again would be refused again: first without what was added to it, then
            # without all of it.
            self._consecutive_refusals += 1
            self._mark_extras_delivered(flight)
            if self._consecutive_refusals > 1:
                self._mark_acked(flight, now)
        if not self._server_lost_ns:
            self._server_lost_ns = now
            self._server_problem = outcome.problem
            self._log.warning(f"{outcome.problem}; the job runs on, heartbeats are tried again")

    def _handle_recovery(self) -> None:
        self._consecutive_failures = self._consecutive_refusals = 0
        if self._server_lost_ns:
            self._server_lost_ns = 0
            self._log.info(f"{self._uplink.target} answers again")
            with contextlib.suppress(OSError):  # a rank has taken it
                (self._folder / run_dir.NOTICE_NAME).unlink()

    def _write_user_notice(self, now: int) -> None:
        """Leaves a line for a rank to print, once the server has been away for a while: the ranks
        have the user's terminal.
        """
        if (
            self._user_notified
            or not self._server_lost_ns
            or (now - self._server_lost_ns) / 1e9 < self._timing.user_notice_after_s
        ):
            return
        self._user_notified = True
        path = self._folder / run_dir.NOTICE_NAME
        try:
            path.with_suffix(".new").write_text(
                f"{self._server_problem}; the job runs on, unwatched until the server answers\n"
            )
            path.with_suffix(".new").replace(path)
        except OSError as error:
            self._log.warn_once(f"the notice for the user cannot be written: {error.strerror}")

    def _execute_command(self, command: heartbeat.Command, now: int) -> None:
        if command.id in self._handled_command_ids:
            return
        self._handled_command_ids.append(command.id)
        w = self._watchlist.watched.get(command.key)
        if command.ask in (heartbeat.CommandKind.TRACE, heartbeat.CommandKind.RECORD):
            self._live_requests.execute_command(command, w, now)
            return
        if command.ask is heartbeat.CommandKind.CALLS:
            calls = (
                tuple(w.read_calls(now, command.uid, command.from_seq, command.most)) if w else ()
            )
            self._outbox.add_calls(
                heartbeat.CallsReply(
                    key=command.key, request=command.id, uid=command.uid, calls=calls
                )
            )
            self._is_urgent = True
            return
        if command.ask is heartbeat.CommandKind.ABORT:
            self._log.info(f"the server orders process {command.key} to be ended")
            self._abort_tracker.abort_process(command, w, now)
            self._is_urgent = True
            return
        why = (
            "this node agent knows no such process"
            if w is None
            else "the process has ended"
            if w.exit
            else None
        )
        if why is None and w is not None:
            if self._sampler.submit_order(self._make_sample_order(w, command.id, command.native)):
                return
            why = "too many stack dumps are waiting on this node: ask again later"
        failed = heartbeat.StackReply(
            key=command.key, request=command.id, source="py-spy", native=command.native, error=why
        )
        self._outbox.add_sample(failed, now)
        self._is_urgent = True

    def _may_exit(self, now: int) -> bool:
        idle = (now - self._last_alive_ns) / 1e9
        if self._watchlist.has_alive or idle < (
            self._timing.linger_s
            if self._had_live_process or self._watchlist.watched
            else self._timing.first_process_timeout_s
        ):
            return False
        unreported = any(
            w.identity is not None and not w.exit_acked_ns for w in self._watchlist.watched.values()
        )
        waiting = self._outbox or self._abort_tracker or self._live_requests or self._uplink.is_busy
        if (unreported or waiting) and idle < self._timing.absent_server_timeout_s:
            return False
        return not self._watchlist.scan_processes(now)

    def _send_last_heartbeat(self) -> None:
        """Sends what is known. Whoever ended this agent will not wait long."""
        if (
            self._uplink.is_busy
            and (outcome := self._uplink.take_outcome(self._timing.last_heartbeat_timeout_s))
            is not None
        ):
            self._handle_outcome(outcome, self._clock())
        self._collect_results()
        if not self._uplink.is_busy:
            flight = self._compose_heartbeat(self._clock(), leaving=True)
            self._uplink.post_heartbeat(
                flight.heartbeat.number, codec.encode_message(flight.heartbeat), urgent=True
            )
            if (
                last := self._uplink.take_outcome(self._timing.last_heartbeat_timeout_s)
            ) is not None and last.reply is not None:
                self._mark_acked(flight, self._clock())
        if not self._watchlist.has_alive:
            self._watchlist.remove_ended_files()
