"""Wires the parts that work on the shared state: heartbeats in; verdicts, incidents and alerts out.
Applies each heartbeat to everything that depends on it.
"""

from __future__ import annotations

from hangwatch.diagnosis import EvidenceRequest, choose_window
from hangwatch.protocol.heartbeat import Heartbeat, HeartbeatReply

from ..core import load
from ..core.limits import is_large
from ..ingest.heartbeat_queue import HeartbeatQueue
from ..recovery.aborter import Aborter
from ..settings import Settings
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker
from .cadence import ReportScheduler
from .diagnoser import Diagnoser
from .diagnosis_loop import DiagnosisLoop, Retention
from .job_claims import JobClaims, restore_former_attempts


class Watch:
    """Its attributes are the parts that HTTP routes and pages use."""

    def __init__(
        self, settings: Settings, shared: SharedState, persistence: PersistenceWorker
    ) -> None:
        """Restores incidents and former attempts from the database."""
        self.shared = shared
        self.persistence = persistence
        store = persistence.store
        shared.incidents.load_records(store.load_incidents())
        restore_former_attempts(shared, store.load_latest_attempts())
        self.report_scheduler = ReportScheduler(
            shared=shared, configured_limits=settings.diagnosis_limits
        )
        self.aborter: Aborter | None = None
        if (rules := settings.abort_rules) is not None:
            self.aborter = Aborter(shared=shared, rules=rules, persistence=persistence)
        self.heartbeat_queue = HeartbeatQueue(self.apply_heartbeat, shared.load)
        self.diagnoser = Diagnoser(
            shared=shared,
            report_scheduler=self.report_scheduler,
            heartbeat_queue=self.heartbeat_queue,
        )
        retention = Retention(shared=shared, diagnoser=self.diagnoser)
        self.job_claims: JobClaims | None = None  # None: no other server shares the database
        if (locks := store.job_locks) is not None:
            self.job_claims = JobClaims(
                shared=shared,
                persistence=persistence,
                locks=locks,
                drop_attempt=retention.drop_attempt,
            )
        self.loop = DiagnosisLoop(
            shared=shared,
            diagnoser=self.diagnoser,
            persistence=persistence,
            retention=retention,
            aborter=self.aborter,
            job_claims=self.job_claims,
            repeat_after_s=settings.repeat_interval,
        )

    def apply_heartbeat(self, beat: Heartbeat, urgent: bool = False) -> HeartbeatReply:
        """Applies one heartbeat and builds the reply. Sets ``shared.has_changes`` if it may change a verdict."""
        shared = self.shared
        scheduler = self.report_scheduler
        fleet = shared.fleet
        counters = shared.counters
        now = shared.now()
        counters.heartbeats += 1
        if counters.heartbeats % load.COLLECT_EVERY_HEARTBEATS == 0:
            load.collect_new_objects()
        beat, unrequested = shared.commands.accept_replies(beat)
        counters.unrequested += unrequested
        is_known = beat.agent in shared.agents
        is_complete = fleet.apply_heartbeat(beat, now)
        needs_resync = not is_complete or not (is_known or beat.full or beat.number == 1)
        counters.resyncs += needs_resync
        shared.performance.apply_heartbeat(beat, fleet, now)
        shared.dumps.apply_samples(beat.samples, now)
        shared.recordings.apply_replies(beat.recordings, now)
        shared.traces.apply_heartbeat(beat, now)
        if beat.aborts and self.aborter is not None:
            self.aborter.apply_replies(beat.aborts)
        # The next diagnosis of a large attempt may start seconds later, and this agent's next heartbeat
        # may be as late: what it will need is requested now.
        for process in fleet.list_processes(beat.agent) if beat.processes else ():
            attempt = process.attempt
            rank = process.rank
            requests = []
            if process.needs_wait_sample:
                attempt.has_urgent_changes = True
                requests.append(EvidenceRequest(rank=rank, stacks=True))
            for stream, divergence in process.iter_new_sides():
                window = choose_window(divergence)
                requests.append(EvidenceRequest.for_calls(rank, stream, window))
            if requests and is_large(attempt.rank_count):
                shared.commands.request_evidence(attempt, requests, now)
        evidence = (beat.samples, beat.kernels, beat.calls, beat.hardware)
        if beat.processes or beat.aborts or any(evidence):
            shared.has_changes.set()
        scheduler.record_heartbeat(beat.agent, urgent, now)
        commands = shared.commands.take_unsent(beat.agent)
        return scheduler.make_reply(beat.agent, now, commands=commands, needs_resync=needs_resync)
