"""An incident as one archive, to attach to a bug report."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from hangwatch import __version__
from hangwatch.model.incidents import Incident
from hangwatch.model.ranks import RankState, format_ranks
from hangwatch.report.documents import build_incident_document
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import RankView
from ..monitor import views

MAX_DETAILED_RANKS = 4000  # the largest job whose bundle has all data about every rank


def describe_ranks(
    attempt: Attempt, states: Mapping[int, RankState], incident: Incident, now: float
) -> list[RankView]:
    """All ranks. For a large job: the culprits and the first waiting ranks, without the members of
    their groups.
    """
    is_large = len(states) > MAX_DETAILED_RANKS
    involved = (*incident.culprits, *incident.waiting)[: MAX_DETAILED_RANKS // 4]
    return [
        views.describe_rank(attempt, rank, states[rank], now, members=not is_large)
        for rank in (involved if is_large else states)
        if rank in states
    ]


def build_archive(incident: Incident, ranks: Sequence[RankView]) -> bytes:
    """A zip archive: incident.json, ranks.json, stacks.txt."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("incident.json", json.dumps(build_incident_document(incident), indent=1))
        archive.writestr("ranks.json", json.dumps(msgspec.to_builtins(ranks), indent=1))
        archive.writestr("stacks.txt", "\n".join(iter_stack_lines(incident)) + "\n")
        archive.writestr("VERSION", __version__ + "\n")
    return buffer.getvalue()


def iter_stack_lines(incident: Incident) -> Iterator[str]:
    """All stacks as text, innermost frame first."""
    yield f"# {incident.summary}"
    for entry in incident.stacks:
        yield ""
        role = "culprit" if set(entry.ranks) & set(incident.culprits) else "waiting"
        yield (
            f"rank {format_ranks(entry.ranks)} ({role}), {entry.thread or 'no thread'},"
            f" {entry.source}, {entry.taken_at.isoformat()}"
        )
        if entry.error is not None:
            yield f"    {entry.error}"
        for frame in entry.frames:
            yield f"    {frame.function} ({frame.file}:{frame.line})"
            if frame.text:
                yield f"        {frame.text}"
