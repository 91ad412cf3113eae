"""When the absence of its verdict means that an incident is resolved. Pure."""

from __future__ import annotations

from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import KINDS
from hangwatch.tracking.attempt import Attempt

from .records import IncidentRecord

# Without its verdict for this long, an incident is resolved if the job is alive.
VERDICT_ABSENT_S = 2.0
# The same after a restart of the server, while the state of the attempt is still arriving.
AFTER_RESTART_ABSENT_S = 10.0
# The absence of a verdict only means something this long after the last heartbeat.
RECENT_HEARTBEAT_S = 5.0


def has_reported_since(record: IncidentRecord, attempt: Attempt) -> bool:
    """A rank of the incident was reported since the last verdict on it. Otherwise the absence of a
    verdict means nothing.
    """
    if attempt.last_seen_at < record.last_seen_at:
        return False
    incident = record.incident
    ranks = (*incident.culprits, *incident.waiting)
    processes = (attempt.processes.get(rank) for rank in ranks)
    return any(p is not None and p.reports.last_seen_at >= record.last_seen_at for p in processes)


def has_made_progress(record: IncidentRecord, attempt: Attempt, now: float) -> bool:
    """The verdict is absent because the job made progress, and not because it ended or does not
    report.
    """
    incident = record.incident
    if KINDS[incident.kind].is_call_error and not incident.waiting:
        return False  # progress does not refute it: no rank was blocked by it
    processes = list(attempt.processes.values())
    if attempt.is_finished:
        is_clean = all(p.exit is not None and p.exit.exit_status == 0 for p in processes)
        return is_clean or incident.severity is Severity.WARNING
    has_failure = any(
        p.exception is not None or (p.exit is not None and p.exit.has_failed) for p in processes
    )
    if has_failure or now - attempt.last_seen_at > RECENT_HEARTBEAT_S:
        return False
    absent_s = now - max(record.last_seen_at, attempt.opened_at)
    return absent_s >= (AFTER_RESTART_ABSENT_S if record.is_restored else VERDICT_ABSENT_S)
