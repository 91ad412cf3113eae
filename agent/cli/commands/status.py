"""`hangwatch status`: every job on one line, with its open incidents.

The table of `hangwatch incidents` and the error for an unknown job are here as well.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from hangwatch.report.terminal import format_summary
from hangwatch.report.text import (
    TERMINAL_COLUMNS,
    Document,
    Paint,
    clean_text,
    format_age,
    seconds_since,
    truncate_end,
    wrap_text,
)

from ..arguments import add_query_options
from ..client import Client, open_client
from ..errors import HANG, OK, NotFoundError
from ..terminal import choose_paint, print_message, print_result, watch_view

_MIN_ID_WIDTH = 10
_MAX_LISTED = 8  # jobs or ids named in a message


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    parser.add_argument("--watch", action="store_true", help="refresh every second, until Ctrl-C")
    parser.set_defaults(run=run_status)


def run_status(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Returns `HANG` while an alert is open. Raises CliError."""
    paint = choose_paint(args, env)
    with open_client(args, env) as client:
        if args.watch:
            return watch_view(lambda: _print_status(client, args, paint), paint)
        return _print_status(client, args, paint)


def _print_status(client: Client, args: argparse.Namespace, paint: Paint) -> int:
    jobs = list(client.iter_items("jobs"))
    incidents = list(client.iter_items("incidents", job=args.job, status="open"))
    if args.job is not None:
        jobs = [job for job in jobs if job.get("job") == args.job]
        if not jobs and not incidents:
            check_job(client, args.job)
    lines = format_status(jobs, incidents, client.server_time, paint)
    print_result(args, {"jobs": jobs, "incidents": incidents}, lines)
    if not jobs and not args.json:
        print_message(
            f"no job has reported to {client.server}: start one with HANGWATCH_URL={client.server}"
            " torchrun …"
        )
    has_alert = any(incident.get("severity") == "alert" for incident in incidents)
    return HANG if has_alert else OK


def format_status(
    jobs: Sequence[Document], incidents: Sequence[Document], now: datetime, paint: Paint
) -> Iterator[str]:
    """A line for each job, followed by its open incidents; then the open incidents of jobs or
    attempts that are not among ``jobs``.
    """
    remaining = list(incidents)
    for job in jobs:
        yield from _format_job(job, paint)
        key = (job.get("job"), job.get("attempt"))
        job_incidents = [i for i in remaining if (i.get("job"), i.get("attempt")) == key]
        remaining = [i for i in remaining if (i.get("job"), i.get("attempt")) != key]
        for incident in job_incidents:
            yield from _format_open_incident(incident, now, paint)
        if not job_incidents or job.get("state") in ("lost", "failed", "finished"):
            yield from wrap_text(job.get("summary"), "  ")
    if remaining:
        yield "Still open, of earlier jobs or attempts:"
    for incident in remaining:
        yield from _format_open_incident(incident, now, paint)


def _format_job(job: Document, paint: Paint) -> Iterator[str]:
    """Name, state and facts of a job: on one line if they fit."""
    state = clean_text(job.get("state", "?"))
    name = clean_text(job.get("job", "?"))
    if job.get("attempt"):
        name += f" (attempt {clean_text(job['attempt'])})"
    facts = " · ".join(_list_job_facts(job))
    if state in ("stalled", "failed", "lost"):
        coloured_state = paint.as_error(state)
    elif state in ("running", "finished"):
        coloured_state = paint.as_success(state)
    else:
        coloured_state = paint.as_warning(state)
    if len(f"{name}  {state}  {facts}") <= TERMINAL_COLUMNS:
        yield f"{paint.bold(name)}  {coloured_state}  {facts}"
        return
    name = truncate_end(name, TERMINAL_COLUMNS - len(state) - 2)
    yield f"{paint.bold(name)}  {coloured_state}"
    yield from wrap_text(facts, "  ")


def _list_job_facts(job: Document) -> list[str]:
    """The ranks in each state, the step, and the age of the last report."""
    counts: list[str] = []
    for state, count in (job.get("states") or {}).items():
        if count:
            counts.append(f"{count} {clean_text(state)}")
    world_size = job.get("world_size", 0)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    facts = [f"{ranks}: {', '.join(counts) or 'none has reported'}"]
    if job.get("step") is not None:
        facts.append(f"step {clean_text(job['step'])}")
    if job.get("last_seen_s") is not None:
        facts.append(f"seen {format_age(float(job['last_seen_s']))} ago")
    return facts


def _colour_by_severity(text: str, severity: object, paint: Paint) -> str:
    """An alert is red, a warning yellow."""
    return paint.as_error(text) if severity == "alert" else paint.as_warning(text)


def _format_open_incident(incident: Document, now: datetime, paint: Paint) -> Iterator[str]:
    """Severity, kind, age and id on one line, then the summary."""
    severity = clean_text(incident.get("severity", "alert"))
    mark = _colour_by_severity(severity.upper(), severity, paint)
    line = f"  {mark}  {clean_text(incident.get('kind', '?'))}"
    onset_s = seconds_since(incident.get("onset_at"), now)
    if onset_s is not None:
        line += f"  for {format_age(onset_s)}"
    incident_id = clean_text(incident.get("id", ""))
    yield f"{line}  {paint.dim(incident_id)}"
    yield from wrap_text(format_summary(incident), "    ")


def format_incidents(documents: Sequence[Document], now: datetime, paint: Paint) -> Iterator[str]:
    """A table, with each incident's summary under its row."""
    ids = [clean_text(incident.get("id", "?")) for incident in documents]
    id_width = find_unique_prefix_width(ids)
    job_width = max(10, TERMINAL_COLUMNS - id_width - 38)
    yield paint.dim(f"{'ID':{id_width}}  {'STATUS':8}  {'AGE':>7}  {'KIND':15}  JOB")
    for incident_id, incident in zip(ids, documents, strict=True):
        status = f"{clean_text(incident.get('status', '?')):8}"
        if incident.get("status") == "open":
            status = _colour_by_severity(status, incident.get("severity"), paint)
        opened_s = seconds_since(incident.get("opened_at"), now)
        age = "?" if opened_s is None else format_age(opened_s)
        kind = clean_text(incident.get("kind", "?"))
        job = truncate_end(clean_text(incident.get("job", "?")), job_width)
        yield f"{incident_id[:id_width]:{id_width}}  {status}  {age:>7}  {kind:15}  {job}"
        yield from wrap_text(incident.get("summary"), "  ")


def find_unique_prefix_width(ids: Iterable[str]) -> int:
    """The number of leading characters by which all these ids differ."""
    ordered = sorted(set(ids))
    width = _MIN_ID_WIDTH
    for first, second in itertools.pairwise(ordered):
        common_count = 0
        for a, b in zip(first, second, strict=False):
            if a != b:
                break
            common_count += 1
        width = max(width, common_count + 1)
    longest = max(map(len, ordered), default=width)
    return min(width, longest)


def check_job(client: Client, job: str) -> None:
    """Raises NotFoundError, which lists the known jobs, for an unknown one."""
    names = [known.get("job", "?") for known in client.iter_items("jobs")]
    if not names:
        raise NotFoundError(f"no job {job!r} has reported; none has so far")
    if job not in names:
        known_jobs = abbreviate_list(sorted(set(map(clean_text, names))))
        raise NotFoundError(f"no job {job!r} has reported; known: {known_jobs}")


def abbreviate_list(names: list[str]) -> str:
    text = ", ".join(names[:_MAX_LISTED])
    if len(names) > _MAX_LISTED:
        text += f" and {len(names) - _MAX_LISTED} more"
    return text
