"""What changes when this server gets a job from another server of its database, or loses one to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hangwatch.protocol.heartbeat import get_family
from hangwatch.tracking.attempt_choice import FormerAttempt
from hangwatch.tracking.fleet import Fleet

from ..core.clock import Clock
from ..core.job_views import AttemptView
from ..incidents.registry import IncidentRegistry
from ..storage.persistence import PersistenceWorker
from ..storage.store import JobHistory
from .retention import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandover:
    clock: Clock
    fleet: Fleet
    incidents: IncidentRegistry
    persistence: PersistenceWorker
    retention: Retention

    def adopt_job(self, history: JobHistory) -> None:
        """As after a restart of the server that had the job."""
        self.incidents.load_records(history.incidents)
        self.incidents.changed.update(record.incident.id for record in history.incidents)
        self.persistence.resume_deliveries(history.deliveries)
        unknown = [a for a in history.attempts if self.fleet.latest_attempt(a.job) is None]
        restore_former_attempts(self.fleet, unknown, self.clock)

    def give_up_job(self, family: str) -> None:
        """Forgets the job's ranks and closes nothing: the other server has its incidents now."""
        for attempt in list(self.fleet.attempts.values()):
            if get_family(attempt.job) == family:
                self.retention.drop_attempt(attempt)
        for record in self.incidents.records.values():
            if record.is_live and get_family(record.incident.job) == family:
                record.is_own = False
                self.persistence.forget_incident(record.incident.id)


def restore_former_attempts(fleet: Fleet, attempts: Iterable[AttemptView], clock: Clock) -> None:
    """The next attempt's number follows that of the last one."""
    for stored in attempts:
        fleet.former_attempts[stored.job] = FormerAttempt(
            number=stored.attempt,
            restart=stored.restart,
            last_seen_at=clock.monotonic_at(stored.last_seen_at),
            is_finished=stored.state in ("finished", "failed"),
        )
