"""Composes heartbeats, and removes what the server has acknowledged from what is still to be sent."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
from dataclasses import dataclass, field

from hangwatch.protocol.heartbeat import AgentCost, Heartbeat

from .discovery.watchlist import Watchlist
from .reporting.calls import PerformanceReporter
from .reporting.updates import make_terse_update
from .reporting.uplink import HeartbeatOutcome, Outbox
from .requests.traces import TraceRequests
from .system import processes

COST_INTERVAL_HEARTBEATS = 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class HeartbeatComposer:
    """Composes one heartbeat after the other from everything that waits to be sent."""

    watchlist: Watchlist
    outbox: Outbox
    traces: TraceRequests
    host: str
    owner: str
    server_count: int
    agent_id: str = field(default_factory=lambda: secrets.token_hex(8))
    is_full_due: bool = True  # the server knows nothing yet: the next heartbeat holds everything
    _number: int = 0
    _terse_until_ns: int = 0
    _performance_reporter: PerformanceReporter = field(default_factory=PerformanceReporter)

    def compose_heartbeat(self, now_ns: int, *, is_last: bool = False) -> Heartbeat:
        self._number += 1
        watched = self.watchlist.watched
        gone = list(self.watchlist.finished_keys)
        if is_last:
            gone += [key for key, process in watched.items() if process.exit is not None]
        updates = {key: process.compose_update(now_ns) for key, process in watched.items()}
        is_brief = False
        if updates and not self.is_full_due and not gone and now_ns < self._terse_until_ns:
            terse = {}
            for key, process in watched.items():
                made = make_terse_update(
                    process.snapshot, process.acked, updates[key], process.composed
                )
                if made is not None:
                    terse[key] = made
            is_brief = len(terse) == len(watched)
            if is_brief:
                for key, (update, acked) in terse.items():
                    updates[key] = update
                    watched[key].composed = acked
        tallies = {key: process.tally for key, process in watched.items()}
        cost = None
        if self._number % COST_INTERVAL_HEARTBEATS == 1:
            # CPU time, with that of helper processes, and resident memory (proc(5))
            own = resource.getrusage(resource.RUSAGE_SELF)
            helpers = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = own.ru_utime + own.ru_stime + helpers.ru_utime + helpers.ru_stime
            memory = 0
            with contextlib.suppress(ValueError, IndexError):
                memory = int(processes.read_text("/proc/self/statm").split()[1]) * _PAGE_BYTES
            dropped = self.outbox.dropped_count
            cost = AgentCost(cpu_s=round(cpu_s, 3), memory=memory, dropped=dropped)
        return Heartbeat(
            host=self.host,
            agent=self.agent_id,
            owner=self.owner,
            servers=self.server_count,
            number=self._number,
            full=self.is_full_due,
            brief=is_brief,
            gone=tuple(gone),
            processes=tuple([update for update in updates.values() if update is not None]),
            **self.outbox.list_pending(now_ns),
            sent_s=round(now_ns / 1e9, 3),
            traces=self.traces.build_replies(watched, now_ns),
            cost=cost,
            performance=self._performance_reporter.next_report(now_ns, tallies, flush=is_last),
        )

    def apply_outcome(self, outcome: HeartbeatOutcome, now_ns: int) -> None:
        """Applies how long positions may be left out, and the server's clock."""
        self._performance_reporter.apply_outcome(outcome)
        if outcome.reply is not None:
            self._terse_until_ns = now_ns + int((outcome.reply.details_s or 0.0) * 1e9)

    def mark_acked(self, now_ns: int) -> None:
        """The server knows what the last heartbeat reported of processes."""
        self.is_full_due = False
        for process in self.watchlist.watched.values():
            process.mark_acked(now_ns)

    def mark_extras_delivered(self, heartbeat: Heartbeat) -> None:
        """The server has everything else of this heartbeat, or will never accept it."""
        self.outbox.mark_delivered(heartbeat)
        self.traces.mark_delivered(heartbeat.traces)
        self._performance_reporter.mark_delivered()
        self.watchlist.finished_keys = [
            key for key in self.watchlist.finished_keys if key not in heartbeat.gone
        ]

    def request_full(self) -> None:
        """The server has lost what it knew: the next heartbeat holds everything."""
        self.is_full_due = True
        for process in self.watchlist.watched.values():
            process.reset_acked()
