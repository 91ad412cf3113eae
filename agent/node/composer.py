"""Composes heartbeats, and removes what the server has acknowledged from what is still to be sent."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

from hangwatch.protocol.heartbeat import PROTOCOL_VERSION, AgentCost, Heartbeat, ProcessUpdate

from .discovery.watchlist import Watchlist
from .reporting.acked import AckedState
from .reporting.calls import PerformanceReporter
from .reporting.updates import is_progressing, make_terse_update
from .reporting.uplink import HeartbeatOutcome, Outbox
from .requests.commands import AbortTracker
from .requests.live import LiveRequests
from .system import daemon

COST_INTERVAL_HEARTBEATS = 20


@dataclass(slots=True, kw_only=True)
class ProcessUpdates:
    """The updates of all processes in one heartbeat, and what the server will know once it has
    acknowledged them; both by process key.
    """

    updates: dict[str, ProcessUpdate | None] = field(default_factory=dict)
    acked_states: dict[str, AckedState | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightHeartbeat:
    """A heartbeat that was handed to the uplink."""

    heartbeat: Heartbeat
    acked_states: dict[str, AckedState | None] = field(default_factory=dict)


class HeartbeatComposer:
    """Composes one heartbeat after the other from everything that waits to be sent."""

    def __init__(
        self,
        watchlist: Watchlist,
        outbox: Outbox,
        abort_tracker: AbortTracker,
        live_requests: LiveRequests,
        owner: str = "",
        server_count: int = 1,
    ) -> None:
        self._watchlist = watchlist
        self._outbox = outbox
        self._abort_tracker = abort_tracker
        self._live_requests = live_requests
        self._performance_reporter = PerformanceReporter()
        self._host = socket.gethostname()
        self.agent_id = secrets.token_hex(8)
        self._owner, self._server_count = owner, server_count
        self._number = 0
        self._terse_until_ns = 0
        self.is_full_due = (
            True  # the next heartbeat holds everything, since the server knows nothing
        )

    def compose_heartbeat(self, now_ns: int, *, is_last: bool = False) -> InFlightHeartbeat:
        self._number += 1
        gone = list(self._watchlist.finished_keys)
        if is_last:
            watched = self._watchlist.watched
            gone += [key for key, process in watched.items() if process.exit is not None]
        parts = self._compose_updates(now_ns)
        is_brief = False
        if parts.updates and not self.is_full_due and not gone and now_ns < self._terse_until_ns:
            is_brief = self._are_all_progressing(parts)
        if is_brief:
            parts = self._shorten_updates(parts)
        tallies = {key: process.tally for key, process in self._watchlist.watched.items()}
        heartbeat = Heartbeat(
            version=PROTOCOL_VERSION,
            host=self._host,
            agent=self.agent_id,
            owner=self._owner,
            servers=self._server_count,
            number=self._number,
            full=self.is_full_due,
            brief=is_brief,
            gone=tuple(gone),
            processes=tuple([part for part in parts.updates.values() if part is not None]),
            samples=self._outbox.pending_samples(now_ns),
            calls=self._outbox.pending_calls(),
            hardware=self._outbox.pending_hardware(now_ns),
            aborts=self._abort_tracker.pending_replies(),
            sent_s=round(now_ns / 1e9, 3),
            traces=self._live_requests.build_trace_replies(self._watchlist.watched, now_ns),
            recordings=self._live_requests.next_recording_replies(),
            cost=self._measure_cost(),
            performance=self._performance_reporter.next_report(now_ns, tallies, flush=is_last),
        )
        return InFlightHeartbeat(heartbeat=heartbeat, acked_states=parts.acked_states)

    def _compose_updates(self, now_ns: int) -> ProcessUpdates:
        parts = ProcessUpdates()
        recordings = self._live_requests.recording_worker
        for key, process in self._watchlist.watched.items():
            process.is_paused = recordings.is_pausing(key)
            parts.updates[key], parts.acked_states[key] = process.compose_update(now_ns)
        return parts

    def _are_all_progressing(self, parts: ProcessUpdates) -> bool:
        return all(
            is_progressing(
                process.snapshot, process.acked, parts.updates[key], parts.acked_states[key]
            )
            for key, process in self._watchlist.watched.items()
        )

    def _shorten_updates(self, parts: ProcessUpdates) -> ProcessUpdates:
        shortened = ProcessUpdates()
        for key, process in self._watchlist.watched.items():
            shortened.updates[key], shortened.acked_states[key] = make_terse_update(
                process.snapshot, process.acked, parts.updates[key], parts.acked_states[key]
            )
        return shortened

    def _measure_cost(self) -> AgentCost | None:
        if self._number % COST_INTERVAL_HEARTBEATS != 1:
            return None
        return daemon.measure_cost(self._outbox.dropped_count)

    def apply_outcome(self, outcome: HeartbeatOutcome, now_ns: int) -> None:
        """Applies what a reply says about later heartbeats: how long positions may be left out, and
        the server's clock.
        """
        self._performance_reporter.apply_outcome(outcome)
        if outcome.reply is not None:
            self._terse_until_ns = now_ns + int((outcome.reply.details_s or 0.0) * 1e9)

    def mark_acked(self, flight: InFlightHeartbeat, now_ns: int) -> None:
        """The server knows what this heartbeat said about processes."""
        self.is_full_due = False
        for key, acked in flight.acked_states.items():
            process = self._watchlist.watched.get(key)
            if process is not None:
                process.mark_acked(acked, now_ns)

    def mark_extras_delivered(self, flight: InFlightHeartbeat) -> None:
        """The server has everything else of this heartbeat, or will never accept it."""
        heartbeat = flight.heartbeat
        self._outbox.mark_delivered(heartbeat)
        self._abort_tracker.mark_delivered(heartbeat.aborts)
        self._live_requests.mark_delivered(heartbeat)
        self._performance_reporter.mark_delivered(heartbeat.performance)
        self._watchlist.finished_keys = [
            key for key in self._watchlist.finished_keys if key not in heartbeat.gone
        ]

    def request_full(self) -> None:
        """The server has lost what it knew: the next heartbeat holds everything."""
        self.is_full_due = True
        for process in self._watchlist.watched.values():
            process.reset_acked()
