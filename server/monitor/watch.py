"""Composes the server's live state: heartbeats in; verdicts, incidents, alerts and events out.

All of it runs on the event loop's thread. Only database writes, and work that takes long for large
attempts, run in other threads; heartbeats are queued meanwhile, so that the state does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.limits import Limits
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..alerting.alerter import Alerter
from ..core.clock import Clock
from ..core.events import EventLog
from ..core.load import Load
from ..incidents.registry import IncidentRegistry
from ..ingest.command_queue import CommandQueue
from ..ingest.heartbeat_queue import HeartbeatQueue
from ..ondemand.dumps import DumpRegistry
from ..ondemand.recordings import RecordingRegistry
from ..ondemand.tracing import TraceRegistry
from ..performance.aggregation import PerformanceTotals
from ..recovery.abort_orders import AbortOrders
from ..recovery.aborter import Aborter
from ..recovery.policy import Rules
from ..storage.persistence import PersistenceWorker
from ..storage.store import Store
from .agent_registry import AgentRegistry
from .announcer import IncidentAnnouncer
from .attempt_reader import AttemptReader
from .backoff import DiagnosisBackoff
from .counters import Counters
from .diagnoser import Diagnoser
from .diagnosis_loop import DiagnosisLoop
from .heartbeat_applier import HeartbeatApplier, OnDemandEvidence
from .job_claims import JobClaims
from .job_handover import JobHandover, build_job_claims, restore_former_attempts
from .report_intervals import ReportIntervals
from .report_scheduler import ReportScheduler
from .retention import Retention
from .state_publisher import StatePublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """``repeat_after_s`` is the time between reminders of a job that still hangs; 0 for none.
    Without ``abort_rules`` no rank is ended.
    """

    limits: Limits
    repeat_after_s: float = 0.0
    retention_days: float = 90.0
    retention_mb: float = 1024.0
    abort_rules: Rules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The parts of the live state that HTTP routes and pages use."""

    clock: Clock
    store: Store
    alerter: Alerter
    events: EventLog
    fleet: Fleet
    agents: AgentRegistry
    incidents: IncidentRegistry
    commands: CommandQueue
    on_demand: OnDemandEvidence
    performance: PerformanceTotals
    counters: Counters
    load: Load
    intervals: ReportIntervals
    persistence: PersistenceWorker
    heartbeats: HeartbeatApplier
    heartbeat_queue: HeartbeatQueue
    states: StatePublisher
    diagnoser: Diagnoser
    loop: DiagnosisLoop
    job_claims: JobClaims | None  # of servers that share a database


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedState:
    """The objects that several parts of the live state read and change."""

    clock: Clock
    store: Store
    alerter: Alerter
    events: EventLog
    incidents: IncidentRegistry
    commands: CommandQueue
    fleet: Fleet = field(default_factory=Fleet)
    agents: AgentRegistry = field(default_factory=AgentRegistry)
    performance: PerformanceTotals = field(default_factory=PerformanceTotals)
    counters: Counters = field(default_factory=Counters)
    load: Load = field(default_factory=Load)


def build_watch(
    options: WatchOptions, *, clock: Clock, store: Store, alerter: Alerter, events: EventLog
) -> Watch:
    """Builds the live state and restores incidents and former attempts from the database."""
    shared = _SharedState(
        clock=clock,
        store=store,
        alerter=alerter,
        events=events,
        incidents=IncidentRegistry(clock=clock),
        commands=CommandQueue(clock=clock),
    )
    shared.incidents.load_records(store.load_incidents())
    restore_former_attempts(shared.fleet, store.load_latest_attempts(), clock)
    announcer = _build_announcer(options, shared)
    heartbeats = _build_heartbeat_applier(options, shared, announcer)
    heartbeat_queue = HeartbeatQueue(heartbeats.apply_heartbeat, shared.load)
    reader = AttemptReader(heartbeat_queue)
    loop = _build_diagnosis_loop(options, shared, announcer, heartbeats, reader)
    return Watch(
        clock=clock,
        store=store,
        alerter=alerter,
        events=events,
        fleet=shared.fleet,
        agents=shared.agents,
        incidents=shared.incidents,
        commands=shared.commands,
        on_demand=heartbeats.on_demand,
        performance=shared.performance,
        counters=shared.counters,
        load=shared.load,
        intervals=heartbeats.intervals,
        persistence=announcer.persistence,
        heartbeats=heartbeats,
        heartbeat_queue=heartbeat_queue,
        states=loop.states,
        diagnoser=loop.diagnoser,
        loop=loop,
        job_claims=build_job_claims(
            JobHandover(
                clock=clock,
                fleet=shared.fleet,
                incidents=shared.incidents,
                persistence=announcer.persistence,
                retention=loop.retention,
            ),
            store,
        ),
    )


def _build_announcer(options: WatchOptions, shared: _SharedState) -> IncidentAnnouncer:
    """Builds the announcer of incidents and the worker that stores them."""
    persistence = PersistenceWorker(
        store=shared.store,
        clock=shared.clock,
        alert_sender=shared.alerter,
        incidents=shared.incidents,
        retention_days=options.retention_days,
        retention_mb=options.retention_mb,
        keep=lambda: announcer.list_pinned(),
    )
    announcer = IncidentAnnouncer(
        clock=shared.clock,
        fleet=shared.fleet,
        incidents=shared.incidents,
        commands=shared.commands,
        persistence=persistence,
        events=shared.events,
        repeat_after_s=options.repeat_after_s,
    )
    return announcer


def _build_heartbeat_applier(
    options: WatchOptions, shared: _SharedState, announcer: IncidentAnnouncer
) -> HeartbeatApplier:
    clock, commands = shared.clock, shared.commands
    on_demand = OnDemandEvidence(
        dumps=DumpRegistry(clock=clock, command_queue=commands),
        recordings=RecordingRegistry(clock=clock, command_queue=commands),
        traces=TraceRegistry(clock=clock),
    )
    aborter = None
    if options.abort_rules is not None:
        aborter = _build_aborter(options.abort_rules, shared, announcer)
    return HeartbeatApplier(
        clock=clock,
        fleet=shared.fleet,
        agents=shared.agents,
        counters=shared.counters,
        performance=shared.performance,
        commands=commands,
        on_demand=on_demand,
        aborter=aborter,
        report_scheduler=ReportScheduler(
            fleet=shared.fleet, commands=commands, traces=on_demand.traces, load=shared.load
        ),
        intervals=ReportIntervals(
            configured_limits=options.limits, load=shared.load, agents=shared.agents
        ),
    )


def _build_aborter(rules: Rules, shared: _SharedState, announcer: IncidentAnnouncer) -> Aborter:
    clock, incidents = shared.clock, shared.incidents
    return Aborter(
        rules=rules,
        clock=clock,
        store=shared.store,
        incidents=incidents,
        fleet=shared.fleet,
        orders=AbortOrders(clock=clock, incidents=incidents, commands=shared.commands),
        persistence=announcer.persistence,
        is_evidence_complete=announcer.is_evidence_complete,
    )


def _build_diagnosis_loop(
    options: WatchOptions,
    shared: _SharedState,
    announcer: IncidentAnnouncer,
    heartbeats: HeartbeatApplier,
    reader: AttemptReader,
) -> DiagnosisLoop:
    backoff = DiagnosisBackoff(options.limits.stall_after_s)
    diagnoser = Diagnoser(
        clock=shared.clock,
        incidents=shared.incidents,
        commands=shared.commands,
        report_scheduler=heartbeats.report_scheduler,
        intervals=heartbeats.intervals,
        backoff=backoff,
        reader=reader,
        counters=shared.counters,
    )
    states = StatePublisher(
        clock=shared.clock,
        fleet=shared.fleet,
        incidents=shared.incidents,
        persistence=announcer.persistence,
        events=shared.events,
        backoff=backoff,
        reader=reader,
        intervals=heartbeats.intervals,
    )
    return DiagnosisLoop(
        clock=shared.clock,
        fleet=shared.fleet,
        incidents=shared.incidents,
        commands=shared.commands,
        heartbeats=heartbeats,
        diagnoser=diagnoser,
        announcer=announcer,
        states=states,
        retention=_build_retention(
            shared, states, diagnoser, announcer.persistence, heartbeats.report_scheduler
        ),
        report_scheduler=heartbeats.report_scheduler,
        aborter=heartbeats.aborter,
    )


def _build_retention(
    shared: _SharedState,
    states: StatePublisher,
    diagnoser: Diagnoser,
    persistence: PersistenceWorker,
    report_scheduler: ReportScheduler,
) -> Retention:
    """Builds the retention of the fleet, and has the other parts forget what it drops."""
    performance = shared.performance

    def drop_attempt(attempt: Attempt) -> None:
        states.forget_attempt(attempt)
        diagnoser.forget_attempt(attempt.key)
        performance.attempts.pop(attempt.key, None)
        persistence.forget_attempt(attempt.key)

    def drop_agent(agent_id: str) -> None:
        report_scheduler.forget_agent(agent_id)
        performance.forget_agent(agent_id)

    return Retention(
        fleet=shared.fleet,
        agents=shared.agents,
        on_attempt_dropped=drop_attempt,
        on_agent_dropped=drop_agent,
    )
