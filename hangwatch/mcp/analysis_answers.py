"""What the offline diagnosis of files says."""

from __future__ import annotations

from collections.abc import Sequence

from .answers import Document, drop_empty
from .incident_answers import explain_incident
from .quoting import Answer, quote_lines

_MAX_VERDICTS = 8
_MAX_NOTES = 12


def describe_analysis(verdicts: Sequence[Document], notes: Sequence[str]) -> Answer:
    """The verdicts from dumps or bundles, and ``notes`` on files and ranks that were left out."""
    return drop_empty(
        {
            "verdicts": [explain_incident(verdict) for verdict in verdicts[:_MAX_VERDICTS]],
            "answer": "" if verdicts else "no hang: all calls that can be compared agree",
            "verdicts_not_shown": max(0, len(verdicts) - _MAX_VERDICTS) or None,
            "notes": quote_lines(notes[:_MAX_NOTES]) if notes else None,
        }
    )
