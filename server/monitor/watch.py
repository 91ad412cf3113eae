"""Composes the server's live state: heartbeats in; verdicts, incidents, alerts and events out.

All of it runs on the event loop's thread. Only database writes, and work that takes long for large
attempts, run in other threads; heartbeats are queued meanwhile, so that the state does not change.
"""

from __future__ import annotations

from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..alerting.alerter import Alerter
from ..core.clock import Clock
from ..core.events import EventLog
from ..core.load import Load
from ..core.supervision import Counters
from ..incidents.registry import IncidentRegistry
from ..ingest.command_queue import CommandQueue
from ..ingest.heartbeat_queue import HeartbeatQueue
from ..ondemand.dumps import DumpRegistry
from ..ondemand.recordings import RecordingRegistry
from ..ondemand.traces import TraceRegistry
from ..performance.totals import PerformanceTotals
from ..recovery.aborter import Aborter, AbortOrders
from ..settings import Settings
from ..storage.persistence import PersistenceWorker
from ..storage.store import Store
from .announcer import IncidentAnnouncer
from .diagnoser import AttemptReader, Diagnoser, DiagnosisBackoff
from .diagnosis_loop import DiagnosisLoop, Retention
from .heartbeat_applier import HeartbeatApplier, OnDemandEvidence
from .job_claims import JobClaims, JobHandover, restore_former_attempts
from .report_scheduler import AgentRegistry, ReportIntervals, ReportScheduler
from .state_publisher import StatePublisher


class Watch:
    """The live state. Its attributes are the parts that HTTP routes and pages use."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock,
        store: Store,
        alerter: Alerter,
        events: EventLog,
    ) -> None:
        """Restores incidents and former attempts from the database."""
        self.clock, self.store, self.alerter, self.events = clock, store, alerter, events
        self.fleet, self.agents = Fleet(), AgentRegistry()
        self.performance, self.counters, self.load = PerformanceTotals(), Counters(), Load()
        self.incidents = IncidentRegistry(clock=clock)
        self.incidents.load_records(store.load_incidents())
        restore_former_attempts(self.fleet, store.load_latest_attempts(), clock)
        self.commands = CommandQueue(clock=clock)
        self.on_demand = OnDemandEvidence(
            dumps=DumpRegistry(clock=clock, command_queue=self.commands),
            recordings=RecordingRegistry(clock=clock, command_queue=self.commands),
            traces=TraceRegistry(clock=clock),
        )
        self.intervals = ReportIntervals(
            configured_limits=settings.diagnosis_limits, load=self.load, agents=self.agents
        )
        self.persistence = PersistenceWorker(
            store=store,
            clock=clock,
            alerter=alerter,
            fleet=self.fleet,
            incidents=self.incidents,
            retention_days=settings.retention_days,
            retention_mb=settings.retention_mb,
            failed_work=self.counters.failures,
        )
        announcer = IncidentAnnouncer(
            clock=clock,
            fleet=self.fleet,
            incidents=self.incidents,
            commands=self.commands,
            persistence=self.persistence,
            events=events,
            failures=self.counters.failures,
            repeat_after_s=settings.repeat_interval,
        )
        aborter = None
        if (rules := settings.abort_rules) is not None:
            aborter = Aborter(
                rules=rules,
                clock=clock,
                store=store,
                incidents=self.incidents,
                fleet=self.fleet,
                orders=AbortOrders(clock=clock, incidents=self.incidents, commands=self.commands),
                persistence=self.persistence,
                is_evidence_complete=announcer.is_evidence_complete,
            )
        report_scheduler = ReportScheduler(
            fleet=self.fleet,
            commands=self.commands,
            traces=self.on_demand.traces,
            load=self.load,
        )
        self.heartbeats = HeartbeatApplier(
            clock=clock,
            fleet=self.fleet,
            agents=self.agents,
            counters=self.counters,
            performance=self.performance,
            commands=self.commands,
            on_demand=self.on_demand,
            aborter=aborter,
            report_scheduler=report_scheduler,
            intervals=self.intervals,
        )
        self.heartbeat_queue = HeartbeatQueue(self.heartbeats.apply_heartbeat, self.load)
        reader = AttemptReader(self.heartbeat_queue)
        backoff = DiagnosisBackoff(settings.stall_after)
        self.diagnoser = Diagnoser(
            clock=clock,
            incidents=self.incidents,
            commands=self.commands,
            report_scheduler=report_scheduler,
            intervals=self.intervals,
            backoff=backoff,
            reader=reader,
            counters=self.counters,
        )
        self.states = StatePublisher(
            clock=clock,
            fleet=self.fleet,
            incidents=self.incidents,
            persistence=self.persistence,
            events=events,
            backoff=backoff,
            reader=reader,
            intervals=self.intervals,
        )
        retention = Retention(
            fleet=self.fleet,
            agents=self.agents,
            on_attempt_dropped=self._forget_attempt,
            on_agent_dropped=self._forget_agent,
        )
        self.loop = DiagnosisLoop(
            clock=clock,
            fleet=self.fleet,
            incidents=self.incidents,
            commands=self.commands,
            heartbeats=self.heartbeats,
            diagnoser=self.diagnoser,
            announcer=announcer,
            states=self.states,
            retention=retention,
            report_scheduler=report_scheduler,
            aborter=aborter,
        )
        self.job_claims: JobClaims | None = None  # None: no other server shares the database
        if store.job_locks is not None:
            handover = JobHandover(
                clock=clock,
                fleet=self.fleet,
                incidents=self.incidents,
                persistence=self.persistence,
                retention=retention,
            )
            self.job_claims = JobClaims(
                clock=clock,
                store=store,
                locks=store.job_locks,
                fleet=self.fleet,
                adopt_job=handover.adopt_job,
                give_up_job=handover.give_up_job,
            )

    def _forget_attempt(self, attempt: Attempt) -> None:
        self.states.forget_attempt(attempt)
        self.diagnoser.forget_attempt(attempt.key)
        self.performance.attempts.pop(attempt.key, None)
        self.persistence.forget_attempt(attempt.key)

    def _forget_agent(self, agent_id: str) -> None:
        self.heartbeats.report_scheduler.forget_agent(agent_id)
        self.performance.forget_agent(agent_id)
