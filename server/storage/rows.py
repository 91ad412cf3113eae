"""Rows of the database: what one write contains, and the conversion to and from the model."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import msgspec
import sqlalchemy as sa

from hangwatch.model.kind_spec import Severity
from hangwatch.report.document_parsing import parse_incident
from hangwatch.report.documents import build_incident_document

from ..core.job_views import AttemptView
from ..incidents.records import IncidentRecord

Row = dict[str, Any]


def format_timestamp(moment: datetime) -> str:
    """A UTC time that sorts as text."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")


def make_incident_row(record: IncidentRecord) -> Row:
    """The row of a record as it is now, for a later `Store.save_changes` in another thread."""
    incident = record.incident
    kept = {
        "members": record.members,
        "alerted": record.alerted_severity.value if record.alerted_severity else None,
        "closed": record.is_resolution_announced,
        "aborted": record.is_aborted,
        "reminders": record.reminders,
        "told_at": record.alerted_at.isoformat() if record.alerted_at else None,
    }
    body = msgspec.json.encode(build_incident_document(incident)).decode()
    memory = json.dumps(kept)
    return {
        "id": incident.id,
        "job": incident.job,
        "attempt": incident.attempt,
        "kind": incident.kind.value,
        "status": incident.status,
        "opened_at": format_timestamp(incident.opened_at),
        "body": body,
        "memory": memory,
        "size": len(body) + len(memory),
    }


def make_attempt_row(attempt: AttemptView) -> Row:
    return {
        "job": attempt.job,
        "number": attempt.attempt,
        "restart": attempt.restart,
        "world_size": attempt.world_size,
        "hosts": json.dumps(attempt.hosts),
        "state": attempt.state,
        "opened_at": format_timestamp(attempt.opened_at),
        "heard_at": format_timestamp(attempt.last_seen_at),
    }


def parse_incident_row(row: sa.Row[Any], *, is_own: bool = True) -> IncidentRecord:
    kept = json.loads(row.memory)
    incident = parse_incident(json.loads(row.body))
    return IncidentRecord(
        incident=incident,
        members={int(rank): str(key) for rank, key in kept["members"].items()},
        alerted_severity=Severity(kept["alerted"]) if kept["alerted"] else None,
        is_resolution_announced=kept.get("closed", incident.status != "open"),
        reminders=kept.get("reminders", 0),
        alerted_at=datetime.fromisoformat(kept["told_at"]) if kept.get("told_at") else None,
        is_own=is_own,
    )


def parse_attempt_row(row: sa.Row[Any]) -> AttemptView:
    return AttemptView(
        job=row.job,
        attempt=row.number,
        server=row.server or None,
        state=row.state,
        world_size=row.world_size,
        hosts=json.loads(row.hosts),
        opened_at=datetime.fromisoformat(row.opened_at),
        last_seen_at=datetime.fromisoformat(row.heard_at),
        restart=row.restart,
    )
