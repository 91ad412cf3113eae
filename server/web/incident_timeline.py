"""The timeline of an incident: onset, opening, stacks, recovery and resolution, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from hangwatch.model.incidents import Incident, MergedStack
from hangwatch.report import recovery, terminal
from hangwatch.report.document_parsing import parse_time
from hangwatch.report.documents import build_recovery_document
from hangwatch.report.text import name_ranks, truncate_end

MAX_RANKS_LENGTH = 60  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    at: datetime
    after_s: float  # since the onset
    text: str


def build_timeline(incident: Incident) -> list[TimelineEntry]:
    started = ""
    if incident.waiting:
        started = (
            f": {truncate_end(name_ranks(incident.waiting), MAX_RANKS_LENGTH)} started waiting"
        )
    recovery_document = {"recovery": build_recovery_document(incident.recovery)}
    events = [
        (incident.onset_at, f"Onset{started}"),
        (incident.opened_at, f"Incident opened: {incident.severity.value} {incident.kind.value}"),
        *_iter_stack_events(incident),
        *((parse_time(at), text) for at, text in recovery.iter_recovery_events(recovery_document)),
    ]
    if incident.resolved_at is not None:
        reason = "the job made progress or ended"
        if incident.resolution:
            reason = terminal.RESOLUTIONS[incident.resolution]
        events.append((incident.resolved_at, f"Resolved: {reason}"))
    events.sort(key=lambda event: event[0])
    return [
        TimelineEntry(at=at, after_s=(at - incident.onset_at).total_seconds(), text=text)
        for at, text in events
    ]


def _iter_stack_events(incident: Incident) -> Iterator[tuple[datetime, str]]:
    """Stacks taken within the same second, from the same source, are one event."""
    batches: dict[tuple[datetime, str, bool], list[MergedStack]] = {}
    for stack in incident.stacks:
        key = stack.taken_at.replace(microsecond=0), stack.source, stack.error is None
        batches.setdefault(key, []).append(stack)
    for (_, source, is_success), stacks in batches.items():
        ranks = truncate_end(
            name_ranks(rank for stack in stacks for rank in stack.ranks), MAX_RANKS_LENGTH
        )
        what = "Stacks taken of" if is_success else "Failed to take stacks of"
        yield min(stack.taken_at for stack in stacks), f"{what} {ranks} ({source})"
