"""The events for which alerts are sent, and when one is due."""

from __future__ import annotations

from datetime import datetime

from hangwatch.model.kinds import Severity

from ..incidents.records import IncidentRecord

OPENED, REMINDER, RESOLVED = "opened", "reminder", "resolved"
PLANNED = "planned"  # ranks may be ended for it, which was not known when it opened
ABORTING, ABORTED = "aborting", "aborted"  # before ranks are ended, and afterwards


def take_due_event(
    case: IncidentRecord, *, ready: bool, hangs_on: bool, now: datetime, repeat_after: float
) -> str | None:
    """The event for which an alert is due now, if any. The record then counts as alerted.

    ``ready``: its evidence is complete. ``hangs_on``: its job still exists. ``repeat_after`` is in
    seconds; 0 means that no reminder is sent.
    """
    incident = case.incident
    if not case.own:
        return None
    if case.open and case.alerted not in (Severity.ALERT, incident.severity):
        if not ready:
            return None
        case.alerted, case.alerted_at = incident.severity, now
        return OPENED
    if case.alerted is not Severity.ALERT:
        return None
    if not case.open:
        event = None if case.closed else RESOLVED
        case.closed = True
        return event
    if (
        not hangs_on
        or not repeat_after
        or (case.alerted_at is not None and (now - case.alerted_at).total_seconds() < repeat_after)
    ):
        return None
    case.alerted_at, case.reminders = now, case.reminders + 1
    return f"{REMINDER}-{case.reminders}"
