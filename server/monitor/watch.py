"""Composes the server's live state: heartbeats in; verdicts, incidents, alerts and events out.

All of it runs on the event loop's thread. Only database writes, and work that takes long for large
attempts, run in other threads; heartbeats are queued meanwhile, so that the state does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.limits import Limits
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet, FormerAttempt

from ..alerting.alerter import Alerter
from ..core.clock import Clock
from ..core.events import EventLog
from ..core.limits import Load
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
    loop: DiagnosisLoop


def build_watch(
    options: WatchOptions, *, clock: Clock, store: Store, alerter: Alerter, events: EventLog
) -> Watch:
    """Builds the live state and restores incidents and former attempts from the database."""
    fleet, agents, load = Fleet(), AgentRegistry(), Load()
    performance, counters = PerformanceTotals(), Counters()
    incidents = IncidentRegistry(clock=clock)
    incidents.load_records(store.load_incidents())
    _restore_former_attempts(fleet, store, clock)
    commands = CommandQueue(clock=clock)
    on_demand = _build_on_demand_evidence(clock, commands)
    intervals = ReportIntervals(configured_limits=options.limits, load=load, agents=agents)
    report_scheduler = ReportScheduler(
        fleet=fleet, commands=commands, traces=on_demand.traces, load=load
    )
    persistence = PersistenceWorker(
        store=store,
        clock=clock,
        alert_sender=alerter,
        incidents=incidents,
        retention_days=options.retention_days,
        retention_mb=options.retention_mb,
        keep=lambda: announcer.list_pinned(),
    )
    announcer = IncidentAnnouncer(
        clock=clock,
        fleet=fleet,
        incidents=incidents,
        commands=commands,
        persistence=persistence,
        events=events,
        repeat_after_s=options.repeat_after_s,
    )
    aborter = None
    if options.abort_rules is not None:
        aborter = _build_aborter(options.abort_rules, announcer, persistence, store, commands)
    heartbeats = HeartbeatApplier(
        clock=clock,
        fleet=fleet,
        agents=agents,
        counters=counters,
        performance=performance,
        commands=commands,
        on_demand=on_demand,
        aborter=aborter,
        report_scheduler=report_scheduler,
        intervals=intervals,
    )
    heartbeat_queue = HeartbeatQueue(heartbeats.apply_heartbeat, load)
    reader = AttemptReader(heartbeat_queue)
    backoff = DiagnosisBackoff(options.limits.stall_after_s)
    diagnoser = Diagnoser(
        clock=clock,
        incidents=incidents,
        commands=commands,
        report_scheduler=report_scheduler,
        intervals=intervals,
        backoff=backoff,
        reader=reader,
        counters=counters,
    )
    states = StatePublisher(
        clock=clock,
        fleet=fleet,
        incidents=incidents,
        persistence=persistence,
        events=events,
        backoff=backoff,
        reader=reader,
        intervals=intervals,
    )
    loop = DiagnosisLoop(
        clock=clock,
        fleet=fleet,
        incidents=incidents,
        commands=commands,
        heartbeats=heartbeats,
        diagnoser=diagnoser,
        announcer=announcer,
        states=states,
        retention=_build_retention(
            fleet, agents, states, diagnoser, performance, persistence, report_scheduler
        ),
        report_scheduler=report_scheduler,
        aborter=aborter,
    )
    return Watch(
        clock=clock,
        store=store,
        alerter=alerter,
        events=events,
        fleet=fleet,
        agents=agents,
        incidents=incidents,
        commands=commands,
        on_demand=on_demand,
        performance=performance,
        counters=counters,
        load=load,
        intervals=intervals,
        persistence=persistence,
        heartbeats=heartbeats,
        heartbeat_queue=heartbeat_queue,
        states=states,
        loop=loop,
    )


def _build_on_demand_evidence(clock: Clock, commands: CommandQueue) -> OnDemandEvidence:
    return OnDemandEvidence(
        dumps=DumpRegistry(clock=clock, command_queue=commands),
        recordings=RecordingRegistry(clock=clock, command_queue=commands),
        traces=TraceRegistry(clock=clock),
    )


def _build_aborter(
    rules: Rules,
    announcer: IncidentAnnouncer,
    persistence: PersistenceWorker,
    store: Store,
    commands: CommandQueue,
) -> Aborter:
    clock, incidents = announcer.clock, announcer.incidents
    return Aborter(
        rules=rules,
        clock=clock,
        store=store,
        incidents=incidents,
        fleet=announcer.fleet,
        orders=AbortOrders(clock=clock, incidents=incidents, commands=commands),
        persistence=persistence,
        is_evidence_complete=announcer.is_evidence_complete,
    )


def _build_retention(
    fleet: Fleet,
    agents: AgentRegistry,
    states: StatePublisher,
    diagnoser: Diagnoser,
    performance: PerformanceTotals,
    persistence: PersistenceWorker,
    report_scheduler: ReportScheduler,
) -> Retention:
    """Builds the retention of the fleet, and has the other parts forget what it drops."""

    def drop_attempt(attempt: Attempt) -> None:
        states.forget_attempt(attempt)
        diagnoser.forget_attempt(attempt.key)
        performance.attempts.pop(attempt.key, None)
        persistence.forget_attempt(attempt.key)

    def drop_agent(agent_id: str) -> None:
        report_scheduler.forget_agent(agent_id)
        performance.forget_agent(agent_id)

    return Retention(
        fleet=fleet,
        agents=agents,
        on_attempt_dropped=drop_attempt,
        on_agent_dropped=drop_agent,
    )


def _restore_former_attempts(fleet: Fleet, store: Store, clock: Clock) -> None:
    now, wall = clock.monotonic(), clock.wall()
    for stored in store.load_latest_attempts():
        fleet.former_attempts[stored.job] = FormerAttempt(
            number=stored.attempt,
            restart=stored.restart,
            last_seen_at=now - (wall - stored.last_seen_at).total_seconds(),
            is_finished=stored.state in ("finished", "failed"),
        )
