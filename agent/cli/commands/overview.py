"""Jobs and incidents as lines of text: pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from hangwatch.report.sites import Document
from hangwatch.report.terminal import format_summary
from hangwatch.report.text import (
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    format_age,
    seconds_since,
    truncate_end,
    wrap_text,
)

_MIN_ID_WIDTH = 10


def format_status(
    jobs: Sequence[Document], incidents: Sequence[Document], now: datetime, paint: Paint
) -> Iterator[str]:
    """Each job in a line, its open incidents under it; then those of jobs that the server no longer
    follows.
    """
    left = list(incidents)
    for job in jobs:
        yield from _format_job(job, paint)
        mine = [
            i
            for i in left
            if (i.get("job"), i.get("attempt")) == (job.get("job"), job.get("attempt"))
        ]
        left = [i for i in left if i not in mine]
        for incident in mine:
            yield from _format_open_incident(incident, now, paint)
        if not mine or job.get("state") in ("lost", "failed", "finished"):
            yield from wrap_text(job.get("summary"), "  ")
    if left:
        yield "Still open, of earlier jobs or attempts:"
    for incident in left:
        yield from _format_open_incident(incident, now, paint)


def _format_job(job: Document, paint: Paint) -> Iterator[str]:
    state = clean_text(job.get("state", "?"))
    colour = (
        paint.as_error
        if state in ("stalled", "failed", "lost")
        else paint.as_success
        if state in ("running", "finished")
        else paint.as_warning
    )
    counts = [f"{n} {clean_text(name)}" for name, n in (job.get("states") or {}).items() if n]
    world = job.get("world_size", 0)
    parts = [f"{world} rank{'' if world == 1 else 's'}: {', '.join(counts) or 'none heard of'}"]
    if job.get("step") is not None:
        parts.append(f"step {clean_text(job['step'])}")
    if job.get("last_seen_s") is not None:
        parts.append(f"heard {format_age(float(job['last_seen_s']))} ago")
    name = clean_text(job.get("job", "?")) + (
        f" (attempt {clean_text(job['attempt'])})" if job.get("attempt") else ""
    )
    told = " · ".join(parts)
    if len(f"{name}  {state}  {told}") <= TERMINAL_COLUMNS:
        yield f"{paint.bold(name)}  {colour(state)}  {told}"
    else:
        yield (
            f"{paint.bold(truncate_end(name, TERMINAL_COLUMNS - len(state) - 2))}  {colour(state)}"
        )
        yield from wrap_text(told, "  ")


def _format_open_incident(incident: Document, now: datetime, paint: Paint) -> Iterator[str]:
    severity = clean_text(incident.get("severity", "alert"))
    onset = seconds_since(incident.get("onset_at"), now)
    mark = (paint.as_error if severity == "alert" else paint.as_warning)(severity.upper())
    since = "" if onset is None else f"  for {format_age(onset)}"
    yield (
        f"  {mark}  {clean_text(incident.get('kind', '?'))}{since} "
        f" {paint.dim(clean_text(incident.get('id', '')))}"
    )
    yield from wrap_text(format_summary(incident), "    ")


def format_incidents(documents: Sequence[Document], now: datetime, paint: Paint) -> Iterator[str]:
    """A table, each incident's summary under its row."""
    ids = [clean_text(i.get("id", "?")) for i in documents]
    width = find_unique_prefix_width(ids)
    yield paint.dim(f"{'ID':{width}}  {'STATUS':8}  {'AGE':>7}  {'KIND':15}  JOB")
    for name, incident in zip(ids, documents, strict=True):
        opened = seconds_since(incident.get("opened_at"), now)
        state = f"{clean_text(incident.get('status', '?')):8}"
        if incident.get("status") == "open":
            state = (paint.as_error if incident.get("severity") == "alert" else paint.as_warning)(
                state
            )
        ago = "?" if opened is None else format_age(opened)
        kind, job = clean_text(incident.get("kind", "?")), clean_text(incident.get("job", "?"))
        yield (
            f"{name[:width]:{width}}  {state}  {ago:>7}  {kind:15} "
            f" {truncate_end(job, max(10, TERMINAL_COLUMNS - width - 38))}"
        )
        yield from wrap_text(incident.get("summary"), "  ")


def find_unique_prefix_width(ids: Iterable[str]) -> int:
    """How many characters tell these ids apart."""
    ordered = sorted(set(ids))
    width = _MIN_ID_WIDTH
    for a, b in itertools.pairwise(ordered):
        same = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        width = max(width, same + 1)
    return min(width, max(map(len, ordered), default=width))
