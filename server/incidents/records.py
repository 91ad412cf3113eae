"""An incident and what only the server keeps about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from hangwatch.model.incidents import Incident, Recovery
from hangwatch.model.kinds import Severity
from hangwatch.model.ranks import AttemptKey
from hangwatch.tracking.attempt import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSummary:
    """The alert verdicts that concerned an incident at the last diagnosis, at time ``at``.

    ``accused`` are the culprits of those that have the same cause, and not only the same
    consequences.
    """

    at: float
    accused: frozenset[int]
    waiting: frozenset[int]


@dataclass(slots=True, kw_only=True)
class IncidentRecord:
    """An incident, and what only the server keeps about it. Times in seconds are monotonic."""

    incident: Incident
    # The HOST/PROCESS of each rank distinguishes a rerun of a job from the same run.
    members: dict[int, str] = field(default_factory=dict)
    alerted_severity: Severity | None = None  # the last alert's severity
    alerted_at: datetime | None = None  # the time of the last alert
    reminders: int = 0
    is_resolution_announced: bool = False
    is_own: bool = True  # False for an incident of another server in the same database
    opened_at: float = 0.0
    onset_at: float = 0.0
    last_seen_at: float = 0.0  # the time of the last verdict that concerned it
    is_restored: bool = False  # True: older than this server's start, and not confirmed since
    alert_summary: AlertSummary | None = None

    @property
    def attempt_key(self) -> AttemptKey:
        return AttemptKey(self.incident.job, self.incident.attempt)

    @property
    def is_open(self) -> bool:
        return self.incident.is_open

    @property
    def is_live(self) -> bool:
        """Whether this server updates it."""
        return self.is_own and self.is_open

    @property
    def is_aborted(self) -> bool:
        """Whether ranks were or will be ended for it, which explains all that happens since."""
        recovery = self.incident.recovery
        if recovery is None or recovery.announced_at is None:
            return False
        return self.is_open or any(abort.result != "left" for abort in recovery.aborts)

    @property
    def recovery(self) -> Recovery:
        """The recovery of an incident that has one."""
        assert self.incident.recovery is not None
        return self.incident.recovery

    def belongs_to(self, attempt: Attempt) -> bool:
        """A restored incident belongs to the attempt that has one of its processes: after a restart
        of the server, attempts may be numbered differently.
        """
        if not self.is_restored:
            return self.incident.attempt == attempt.number
        return any(get_member_key(attempt, rank) == member for rank, member in self.members.items())


def get_member_key(attempt: Attempt, rank: int) -> str | None:
    """``HOST/PROCESS`` of a rank; None if the rank is not known."""
    process = attempt.processes.get(rank)
    return None if process is None else f"{process.host}/{process.key}"
