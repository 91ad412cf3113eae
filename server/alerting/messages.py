"""The text and content of alerts. Pure."""

from __future__ import annotations

from datetime import datetime

from hangwatch.model.incidents import Incident, Resolution
from hangwatch.report import recovery as recovery_text
from hangwatch.report.documents import build_incident_document
from hangwatch.report.text import (
    clean_document,
    clean_text,
    format_coarse_age,
    name_ranks,
    truncate_end,
)

from .events import ABORTED, ABORTING, OPENED, PLANNED, REMINDER, RESOLVED
from .message import AlertMessage

MAX_RANKS_LENGTH = 60  # characters
_RESOLVED_TITLES: dict[Resolution | None, str] = {
    Resolution.ENDED: "ENDED WITH ITS JOB",
    Resolution.ABORTED: "ENDED BY HANGWATCH",
}


def format_sentence(incident: Incident) -> str:
    """``job run7: SUMMARY [train.py:41 in step]``"""
    sentence = f"job {incident.job}: {incident.summary}"
    if incident.site is None or str(incident.site) in incident.summary:
        return sentence
    return f"{sentence} [{incident.site}]"


def compose_message(incident: Incident, event: str, url: str, now: datetime) -> AlertMessage:
    """The verdict in one sentence, with the culprit's line and a link. The body is the incident's
    document. What receives it may show it as it is, so that no text in it has control characters.
    """
    kind = event.partition("-")[0]
    body = clean_document({**build_incident_document(incident), "url": url})
    lines = [
        incident.advice if kind == OPENED else "",
        recovery_text.format_recovery(body) if kind != RESOLVED else "",
    ]
    return AlertMessage(
        id=f"{incident.id}.{event}",
        event=kind,
        title=clean_text(f"{_format_label(incident, kind, now)} {format_sentence(incident)}"),
        advice="\n".join(clean_text(line) for line in lines if line),
        body=body,
    )


def _format_label(incident: Incident, kind: str, now: datetime) -> str:
    """What happened to the incident, in upper case."""
    age_s = ((incident.resolved_at or now) - incident.opened_at).total_seconds()
    age = format_coarse_age(age_s)
    ranks = name_ranks(incident.recovery.ranks if incident.recovery else [])
    ranks = truncate_end(ranks, MAX_RANKS_LENGTH)
    labels = {
        OPENED: incident.severity.value.upper(),
        REMINDER: f"STILL OPEN after {age}:",
        RESOLVED: f"{_RESOLVED_TITLES.get(incident.resolution, 'RESOLVED')} after {age}:",
        PLANNED: f"ABORT PLANNED of {ranks}:",
        ABORTING: f"ABORTING {ranks}:",
        ABORTED: f"ABORTED {ranks}:",
    }
    return labels[kind]
