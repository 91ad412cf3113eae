"""The loop that diagnoses every job at short intervals, then reports what changed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from hangwatch.tracking.fleet import Fleet

from ..core.clock import Clock
from ..core.garbage_collection import GarbageScheduler
from ..core.waiting import wait_for_event
from ..incidents.registry import IncidentRegistry
from ..ingest.command_queue import CommandQueue
from ..recovery.aborter import Aborter
from .announcer import IncidentAnnouncer
from .diagnoser import Diagnoser
from .heartbeat_applier import HeartbeatApplier
from .report_scheduler import ReportScheduler
from .retention import Retention
from .state_publisher import StatePublisher

ROUND_INTERVAL_S = 0.25
MIN_PAUSE_S = 0.05  # before the next round, if a heartbeat arrives during the interval


@dataclass(slots=True, kw_only=True)
class DiagnosisLoop:
    """Everything runs on the event loop's thread, except that `AttemptReader` reads large attempts
    in another.
    """

    clock: Clock
    fleet: Fleet
    incidents: IncidentRegistry
    commands: CommandQueue
    heartbeats: HeartbeatApplier
    diagnoser: Diagnoser
    announcer: IncidentAnnouncer
    states: StatePublisher
    retention: Retention
    report_scheduler: ReportScheduler
    aborter: Aborter | None
    last_round_at: float = 0.0
    _garbage: GarbageScheduler = field(default_factory=GarbageScheduler)

    async def run(self) -> None:
        """Runs rounds until the task is cancelled."""
        reader = self.diagnoser.reader
        has_changes = self.heartbeats.has_changes
        while True:
            started_at = time.perf_counter()
            reader.large_attempts_s = 0.0
            await self.run_round()
            spent_s = time.perf_counter() - started_at - reader.large_attempts_s
            has_changes.clear()
            if await wait_for_event(ROUND_INTERVAL_S, has_changes):
                # However many hosts report, most of the time is left for their heartbeats.
                await asyncio.sleep(max(MIN_PAUSE_S, 2 * spent_s))

    async def run_round(self) -> None:
        """Diagnoses each current attempt and reports all changes. What fails for one job or incident
        does not stop the others.
        """
        await self._diagnose_attempts()
        now = self.clock.monotonic()
        isolate = self.diagnoser.counters.failures.isolate
        with isolate("resolving the incidents of finished jobs"):
            self.incidents.resolve_finished_jobs(self.fleet, now)
        if self.aborter is not None:
            with isolate("the recovery of jobs"):
                await self.aborter.advance_recoveries(self.heartbeats.intervals.recent_s)
        await self.announcer.publish_changes(self.last_round_at)
        self.announcer.send_due_alerts(now)
        for attempt in list(self.fleet.attempts.values()):
            with isolate(f"the display of job {attempt.job}"):
                await self.states.publish_changes(attempt)
        with isolate("dropping what is no longer needed"):
            self.commands.drop_expired(now, self.heartbeats.intervals.max_gap_s)
            self.retention.drop_expired(now)
            self._garbage.update(len(self.fleet.processes), now)
            self.retention.start_dropping_processes()
        with isolate("scheduling reports"):
            self.report_scheduler.start_round(now)
        self.last_round_at = now

    async def _diagnose_attempts(self) -> None:
        now = self.clock.monotonic()
        current = [a for a in self.fleet.attempts.values() if self.fleet.is_current(a, now)]
        current_keys = {attempt.key for attempt in current}
        for attempt in current:
            with self.diagnoser.counters.failures.isolate(f"the incidents of job {attempt.job}"):
                if self.diagnoser.is_due(attempt, now):
                    await self.diagnoser.diagnose_attempt(attempt)
                    self.incidents.resolve_earlier_attempts(attempt, now, current_keys)
