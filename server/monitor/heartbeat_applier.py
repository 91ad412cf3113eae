"""Applies one heartbeat to everything that depends on it, and builds the reply."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.diagnosis import EvidenceRequest, choose_window
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CommandReply

from ..core import load
from ..core.limits import is_large
from ..recovery.aborter import Aborter
from ..shared_state import SharedState
from .cadence import ReportScheduler


@dataclass(slots=True, kw_only=True)
class HeartbeatApplier:
    """Applies heartbeats. One that may change a verdict sets ``shared.has_changes``."""

    shared: SharedState
    aborter: Aborter | None
    report_scheduler: ReportScheduler

    def apply_heartbeat(
        self, beat: heartbeat.Heartbeat, urgent: bool = False
    ) -> heartbeat.HeartbeatReply:
        shared, scheduler = self.shared, self.report_scheduler
        fleet, counters = shared.fleet, shared.counters
        now = shared.now()
        counters.heartbeats += 1
        if counters.heartbeats % load.COLLECT_EVERY_HEARTBEATS == 0:
            load.collect_new_objects()
        beat, unrequested = shared.commands.drop_unrequested(beat)
        counters.unrequested += unrequested
        is_known = beat.agent in shared.agents
        is_complete = fleet.apply_heartbeat(beat, now)
        needs_resync = not is_complete or not (is_known or beat.full or beat.number == 1)
        counters.resyncs += needs_resync
        shared.performance.apply_heartbeat(beat, fleet, now)
        evidence: tuple[CommandReply, ...] = (*beat.samples, *beat.calls, *beat.hardware)
        shared.commands.mark_answered(beat.agent, {reply.request for reply in evidence})
        shared.dumps.apply_samples(beat.samples, now)
        shared.recordings.apply_replies(beat.recordings, now)
        shared.traces.apply_heartbeat(beat, now)
        if beat.aborts and self.aborter is not None:
            self.aborter.orders.apply_replies(beat.aborts)
        # The next diagnosis of a large attempt may start seconds later, and this agent's next heartbeat
        # may be as late: what it will need is requested now.
        for process in fleet.list_processes(beat.agent) if beat.processes else ():
            attempt, rank = process.attempt, process.rank
            requests: list[EvidenceRequest] = []
            if process.needs_wait_sample:
                attempt.has_urgent_changes = True
                requests.append(EvidenceRequest(rank=rank, stacks=True))
            for stream, divergence in process.iter_new_sides():
                window = choose_window(divergence)
                requests.append(EvidenceRequest.for_calls(rank, stream, window))
            if requests and is_large(attempt.rank_count):
                shared.commands.request_evidence(attempt, requests, now)
        if beat.processes or evidence or beat.aborts:
            shared.has_changes.set()
        scheduler.record_heartbeat(beat.agent, urgent, now)
        commands = shared.commands.take_unsent(beat.agent)
        return scheduler.make_reply(beat.agent, now, commands=commands, needs_resync=needs_resync)

    def refuse_heartbeat(self, agent_id: str | None) -> None:
        """Counts a heartbeat refused because of the load. Its agent and ranks are not lost."""
        self.shared.counters.refused += 1
        if agent_id is not None:
            self.shared.fleet.mark_refused(agent_id, self.shared.now())
