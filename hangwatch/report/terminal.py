"""An incident as lines of text for a terminal of 80 columns, from the API's JSON documents. Pure.

Everything that a job reports (names of functions, files, messages) is untrusted: `clean_text`
removes what could control a terminal. Documents are read leniently, since the server may be newer.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from hangwatch.model.kinds import select_kinds

from . import recovery
from .call_table import format_calls, format_divergence
from .hardware import format_hardware
from .process_text import format_devices, format_processes, format_waits
from .sites import Document, format_line, format_site
from .stack_text import format_stacks
from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    format_age,
    seconds_since,
    truncate_end,
    wrap_text,
)

# Why an incident is resolved: the API's value, and its text.
RESOLUTIONS = {
    "progress": "the job made progress",
    "ended": "the job ended",
    "restarted": "a later attempt of the job runs",
    "unheard": "the job has not reported for a day",
    "aborted": "the job ended after hangwatch had aborted ranks of it",
}

_KINDS_WITHOUT_SITE = select_kinds(lambda spec: not spec.has_culprit_line)


def format_incident(
    document: Document, now: datetime, paint: Paint = PLAIN_PAINT, full: bool = False
) -> Iterator[str]:
    """One incident: the verdict, the advice, the calls side by side, stacks, waits, devices and
    processes. With ``full``, nothing is folded.
    """
    yield from format_headline(document, now, paint)
    summary = format_summary(document)
    for line in wrap_text(summary):
        yield paint.bold(line)
    site = document.get("site")
    if site and f":{site.get('line')}" not in summary:
        yield paint.bold(f"at {format_site(site)}")
    resolution = RESOLUTIONS.get(str(document.get("resolution")))
    if resolution:
        yield f"It was resolved: {resolution}."
    for paragraph in (document.get("advice"), recovery.format_recovery(document)):
        if paragraph:
            yield ""
            yield from wrap_text(paragraph)
    sections = (
        format_calls(document, paint),
        format_divergence(document, paint),
        format_stacks(document, paint, full),
        format_waits(document),
        format_devices(document),
        format_hardware(document),
        format_processes(document, paint),
    )
    for section in sections:
        for i, line in enumerate(section):
            if i == 0:
                yield ""
            yield line


def format_summary(document: Document) -> str:
    """The summary, with the line of a single culprit that is alive if the summary lacks it."""
    summary = clean_text(document.get("summary") or "")
    site = document.get("site")
    has_one_culprit = len(document.get("culprits") or []) == 1
    if not site or not has_one_culprit or document.get("kind") in _KINDS_WITHOUT_SITE:
        return summary
    line = format_line({"file": site.get("file", "?"), "line": site.get("line")})
    if line in summary:
        return summary
    return f"{summary}: it is at {line} in {clean_text(site.get('function', '?'))}"


def format_headline(document: Document, now: datetime, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """Severity, kind, job, age and id, in one line or, if that is too long, in two."""
    severity = clean_text(document.get("severity", "alert"))
    is_open = clean_text(document.get("status", "open")) == "open"
    job = truncate_end(clean_text(document.get("job", "?")), TERMINAL_COLUMNS // 2)
    parts = [clean_text(document.get("kind", "?")), f"job {job}"]
    if document.get("attempt"):
        parts.append(f"attempt {clean_text(document['attempt'])}")
    parts.append(_format_status(document, now))
    if not is_open:
        colour = paint.as_success
    elif severity == "alert":
        colour = paint.as_error
    else:
        colour = paint.as_warning
    text = f"  {' · '.join(parts)}"
    name = clean_text(document.get("id", ""))
    fits = len(severity) + len(text) + 2 + len(name) <= TERMINAL_COLUMNS
    headline = colour(severity.upper()) + text
    if name and fits:
        yield f"{headline}  {paint.dim(name)}"
        return
    yield headline
    if name:
        yield paint.dim(name)


def _format_status(document: Document, now: datetime) -> str:
    status = clean_text(document.get("status", "open"))
    onset_s = seconds_since(document.get("onset_at"), now)
    resolved_s = seconds_since(document.get("resolved_at"), now)
    if onset_s is None:
        return status
    if status == "open":
        return f"open for {format_age(onset_s)}"
    text = f"{status}, began {format_age(onset_s)} ago"
    if resolved_s is None:
        return text
    return f"{text}, lasted {format_age(onset_s - resolved_s)}"
