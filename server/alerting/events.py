"""The events for which alerts are sent, and when one is due."""

from __future__ import annotations

from datetime import datetime

from hangwatch.model.kind_spec import Severity

from ..incidents.records import IncidentRecord

OPENED, REMINDER, RESOLVED = "opened", "reminder", "resolved"
PLANNED = "planned"  # ranks may be ended for it, which was not known when it opened
ABORTING, ABORTED = "aborting", "aborted"  # before ranks are ended, and afterwards


def take_due_event(
    record: IncidentRecord, *, ready: bool, hangs_on: bool, now: datetime, repeat_after: float
) -> str | None:
    """The event for which an alert is due now, if any. The record then counts as alerted.

    ``ready``: its evidence is complete. ``hangs_on``: its job still exists. ``repeat_after`` is in
    seconds; 0 means that no reminder is sent.
    """
    incident = record.incident
    if not record.is_own:
        return None
    if record.is_open and record.alerted_severity not in (Severity.ALERT, incident.severity):
        if not ready:
            return None
        record.alerted_severity, record.alerted_at = incident.severity, now
        return OPENED
    if record.alerted_severity is not Severity.ALERT:
        return None
    if not record.is_open:
        event = None if record.is_resolution_announced else RESOLVED
        record.is_resolution_announced = True
        return event
    at = record.alerted_at
    is_due = at is None or (now - at).total_seconds() >= repeat_after
    if not (hangs_on and repeat_after and is_due):
        return None
    record.alerted_at, record.reminders = now, record.reminders + 1
    return f"{REMINDER}-{record.reminders}"
