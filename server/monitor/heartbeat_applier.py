"""Applies one heartbeat to everything that depends on it, and builds the reply."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat
from hangwatch.tracking.fleet import Fleet

from ..core import load
from ..core.clock import Clock
from ..core.supervision import Counters
from ..ingest.command_queue import CommandQueue
from ..ingest.heartbeat_checks import drop_foreign_reports
from ..ondemand.dumps import DumpRegistry
from ..ondemand.recordings import RecordingRegistry
from ..ondemand.traces import TraceRegistry
from ..performance.totals import PerformanceTotals
from ..recovery.aborter import Aborter
from .report_scheduler import AgentRegistry, ReportIntervals, ReportScheduler


@dataclass(slots=True, kw_only=True)
class OnDemandEvidence:
    """The stacks, recordings and traces that users requested."""

    dumps: DumpRegistry
    recordings: RecordingRegistry
    traces: TraceRegistry

    def apply_heartbeat(self, beat: heartbeat.Heartbeat, now: float) -> None:
        self.dumps.apply_samples(beat.samples, now)
        self.recordings.apply_replies(beat.recordings, now)
        self.traces.apply_heartbeat(beat, now)


@dataclass(slots=True, kw_only=True)
class HeartbeatApplier:
    """Applies heartbeats. One that may change a verdict sets ``has_changes``."""

    clock: Clock
    fleet: Fleet
    agents: AgentRegistry
    counters: Counters
    performance: PerformanceTotals
    commands: CommandQueue
    on_demand: OnDemandEvidence
    aborter: Aborter | None
    report_scheduler: ReportScheduler
    intervals: ReportIntervals
    has_changes: asyncio.Event = field(default_factory=asyncio.Event)

    def apply_heartbeat(
        self, beat: heartbeat.Heartbeat, urgent: bool = False
    ) -> heartbeat.HeartbeatReply:
        now = self.clock.monotonic()
        self.counters.heartbeats += 1
        if self.counters.heartbeats % load.COLLECT_EVERY_HEARTBEATS == 0:
            load.collect_new_objects()
        beat, foreign = drop_foreign_reports(beat, self.fleet, now)
        self.counters.foreign_reports += foreign
        is_known = beat.agent in self.agents
        self.counters.agents_cpu_s += self.agents.record_heartbeat(beat, now)
        is_complete = self.fleet.apply_heartbeat(beat, now)
        needs_resync = not is_complete or not (is_known or beat.full or beat.number == 1)
        self.counters.resyncs += needs_resync
        self.performance.apply_heartbeat(beat, self.fleet, now)
        self._apply_replies(beat, now)
        if beat.processes or beat.samples or beat.calls or beat.hardware or beat.aborts:
            self.has_changes.set()
        return self._build_reply(beat, urgent, needs_resync, now)

    def refuse_heartbeat(self, agent_id: str | None) -> None:
        """Counts a heartbeat that was refused because of the load: its agent is alive all the same,
        and its ranks are not lost.
        """
        self.counters.refused += 1
        if agent_id is not None:
            self.fleet.mark_refused(agent_id, self.clock.monotonic())

    def _apply_replies(self, beat: heartbeat.Heartbeat, now: float) -> None:
        """Applies the replies to earlier commands."""
        answered = {sample.request for sample in beat.samples}
        answered.update(calls.request for calls in beat.calls)
        answered.update(reply.request for reply in beat.hardware)
        self.commands.mark_answered(beat.agent, answered)
        self.on_demand.apply_heartbeat(beat, now)
        if beat.aborts and self.aborter is not None:
            self.aborter.orders.apply_replies(beat.aborts)

    def _build_reply(
        self, beat: heartbeat.Heartbeat, urgent: bool, needs_resync: bool, now: float
    ) -> heartbeat.HeartbeatReply:
        if beat.processes:
            self.report_scheduler.request_urgent_evidence(beat.agent, now)
        self.report_scheduler.record_heartbeat(beat.agent, urgent, now)
        commands = self.commands.take_unsent(beat.agent)
        commands += self.on_demand.traces.build_commands(beat.agent, now)
        turn = self.report_scheduler.schedule_next(beat.agent, self.intervals.interval_s, now)
        return heartbeat.HeartbeatReply(
            interval_s=turn.interval_s,
            steady_s=self.intervals.steady_s if turn.may_be_steady else None,
            news_s=self.intervals.change_report_s,
            details_s=turn.details_s,
            urgent=turn.urgent,
            poll_s=self.intervals.poll_s,
            resync=needs_resync,
            commands=commands,
            clock_s=round(now, 6),
        )
