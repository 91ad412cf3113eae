"""Jobs and incidents as lines of text: pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from hangwatch.report.terminal import Document, sentence
from hangwatch.report.text import WIDTH, Paint, age, clean, seconds_since, short, wrapped

_SHORTEST_ID = 10


def status(jobs: Sequence[Document], incidents: Sequence[Document], now: datetime, paint: Paint) -> Iterator[str]:
    """Each job in a line, its open incidents under it; then those of jobs that the server no longer follows."""
    left = list(incidents)
    for job in jobs:
        yield from _job(job, paint)
        mine = [i for i in left if (i.get("job"), i.get("attempt")) == (job.get("job"), job.get("attempt"))]
        left = [i for i in left if i not in mine]
        for incident in mine:
            yield from _open(incident, now, paint)
        if not mine or job.get("state") in ("lost", "failed", "finished"):
            yield from wrapped(job.get("summary"), "  ")
    if left:
        yield "Still open, of earlier jobs or attempts:"
    for incident in left:
        yield from _open(incident, now, paint)


def _job(job: Document, paint: Paint) -> Iterator[str]:
    state = clean(job.get("state", "?"))
    colour = paint.bad if state in ("stalled", "failed", "lost") else paint.good if state in ("running", "finished") else paint.warn
    counts = [f"{n} {clean(name)}" for name, n in (job.get("states") or {}).items() if n]
    world = job.get("world_size", 0)
    parts = [f"{world} rank{'' if world == 1 else 's'}: {', '.join(counts) or 'none heard of'}"]
    if job.get("step") is not None:
        parts.append(f"step {clean(job['step'])}")
    if job.get("last_seen_s") is not None:
        parts.append(f"heard {age(float(job['last_seen_s']))} ago")
    name = clean(job.get("job", "?")) + (f" (attempt {clean(job['attempt'])})" if job.get("attempt") else "")
    told = " · ".join(parts)
    if len(f"{name}  {state}  {told}") <= WIDTH:
        yield f"{paint.bold(name)}  {colour(state)}  {told}"
    else:
        yield f"{paint.bold(short(name, WIDTH - len(state) - 2))}  {colour(state)}"
        yield from wrapped(told, "  ")


def _open(incident: Document, now: datetime, paint: Paint) -> Iterator[str]:
    severity = clean(incident.get("severity", "alert"))
    onset = seconds_since(incident.get("onset_at"), now)
    mark = (paint.bad if severity == "alert" else paint.warn)(severity.upper())
    since = "" if onset is None else f"  for {age(onset)}"
    yield f"  {mark}  {clean(incident.get('kind', '?'))}{since}  {paint.dim(clean(incident.get('id', '')))}"
    yield from wrapped(sentence(incident), "    ")


def incidents(found: Sequence[Document], now: datetime, paint: Paint) -> Iterator[str]:
    """A table, each incident's summary under its row."""
    ids = [clean(i.get("id", "?")) for i in found]
    width = unique_prefix(ids)
    yield paint.dim(f"{'ID':{width}}  {'STATUS':8}  {'AGE':>7}  {'KIND':15}  JOB")
    for name, incident in zip(ids, found, strict=True):
        opened = seconds_since(incident.get("opened_at"), now)
        state = f"{clean(incident.get('status', '?')):8}"
        if incident.get("status") == "open":
            state = (paint.bad if incident.get("severity") == "alert" else paint.warn)(state)
        ago = "?" if opened is None else age(opened)
        kind, job = clean(incident.get("kind", "?")), clean(incident.get("job", "?"))
        yield f"{name[:width]:{width}}  {state}  {ago:>7}  {kind:15}  {short(job, max(10, WIDTH - width - 38))}"
        yield from wrapped(incident.get("summary"), "  ")


def unique_prefix(ids: Iterable[str]) -> int:
    """How many characters tell these ids apart."""
    ordered = sorted(set(ids))
    width = _SHORTEST_ID
    for a, b in itertools.pairwise(ordered):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        width = max(width, same + 1)
    return min(width, max(map(len, ordered), default=width))
