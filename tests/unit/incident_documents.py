"""Incidents for tests, from the fields of their JSON documents."""

from __future__ import annotations

from datetime import datetime, timezone

from hangwatch.model.incidents import Incident
from hangwatch.report.documents import format_time, parse_document

MOMENT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def make_incident(**fields: object) -> Incident:
    """An open ``missing_rank`` alert on rank 1, for which rank 0 waits, changed by ``fields``."""
    document: dict[str, object] = {
        "id": "01J00000000000000000000000",
        "job": "run7",
        "attempt": 0,
        "kind": "missing_rank",
        "severity": "alert",
        "status": "open",
        "onset_at": MOMENT,
        "opened_at": MOMENT,
        "summary": "rank 1 has not entered all_reduce",
        "advice": "Look at its stack.",
        "culprits": [1],
        "waiting": [0],
        **fields,
    }
    for name, value in document.items():
        if isinstance(value, datetime):
            document[name] = format_time(value)
    return parse_document(Incident, document)
