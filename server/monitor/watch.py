"""Wires the parts that work on the shared state: heartbeats in; verdicts, incidents and alerts out."""

from __future__ import annotations

from ..ingest.heartbeat_queue import HeartbeatQueue
from ..recovery.aborter import Aborter, AbortOrders
from ..settings import Settings
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker
from .cadence import ReportScheduler
from .diagnoser import Diagnoser
from .diagnosis_loop import DiagnosisLoop, Retention
from .heartbeat_applier import HeartbeatApplier
from .job_claims import JobClaims, restore_former_attempts
from .publisher import ChangePublisher


class Watch:
    """Its attributes are the parts that HTTP routes and pages use."""

    def __init__(
        self, settings: Settings, shared: SharedState, persistence: PersistenceWorker
    ) -> None:
        """Restores incidents and former attempts from the database."""
        self.shared, self.persistence = shared, persistence
        store = persistence.store
        shared.incidents.load_records(store.load_incidents())
        restore_former_attempts(shared, store.load_latest_attempts())
        self.report_scheduler = ReportScheduler(
            shared=shared, configured_limits=settings.diagnosis_limits
        )
        aborter = None
        if (rules := settings.abort_rules) is not None:
            aborter = Aborter(
                shared=shared,
                rules=rules,
                orders=AbortOrders(shared=shared),
                persistence=persistence,
            )
        self.heartbeats = HeartbeatApplier(
            shared=shared, aborter=aborter, report_scheduler=self.report_scheduler
        )
        self.heartbeat_queue = HeartbeatQueue(self.heartbeats.apply_heartbeat, shared.load)
        self.diagnoser = Diagnoser(
            shared=shared,
            report_scheduler=self.report_scheduler,
            heartbeat_queue=self.heartbeat_queue,
        )
        publisher = ChangePublisher(
            shared=shared,
            persistence=persistence,
            diagnoser=self.diagnoser,
            repeat_after_s=settings.repeat_interval,
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
            publisher=publisher,
            retention=retention,
            aborter=aborter,
            job_claims=self.job_claims,
        )
