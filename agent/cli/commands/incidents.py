"""What the server knows: `hangwatch status` prints every job on one line, with its open incidents,
`hangwatch incidents` lists incidents, `hangwatch show` prints one of them, and `hangwatch report`
saves one as an HTML file, for a ticket or a colleague.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from hangwatch.model.kinds import VerdictKind
from hangwatch.report.terminal import format_incident, format_summary
from hangwatch.report.text import (
    TERMINAL_COLUMNS,
    Document,
    abbreviate_list,
    as_bold,
    as_dim,
    as_error,
    as_success,
    as_warning,
    by_severity,
    clean_member,
    clean_text,
    format_age,
    seconds_since,
    truncate_end,
    wrap_text,
)

from ..arguments import add_query_options, parse_positive
from ..client import Client, build_path, open_client
from ..errors import OK, CliError, NotFoundError, UsageError, choose_exit_code
from ..terminal import page_lines, print_message, print_result, watch_view

_MIN_ID_WIDTH = 10
_MAX_IDS_NAMED = 8  # in a message
_MAX_PAGE_SIZE = 100  # the API's limit
_STDOUT = "-"


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    parser.add_argument("--watch", action="store_true", help="refresh every second, until Ctrl-C")


def run_status(args: argparse.Namespace) -> int:
    """Returns `HANG` while an alert is open. Raises CliError."""
    with open_client(args) as client:

        def print_status() -> int:
            jobs = list(client.iter_items("jobs"))
            incidents = list(client.iter_items("incidents", job=args.job, status="open"))
            if args.job is not None:
                jobs = [job for job in jobs if job.get("job") == args.job]
                if not jobs and not incidents:
                    client.check_job(args.job)
            lines = format_status(jobs, incidents, client.server_time)
            print_result(args, {"jobs": jobs, "incidents": incidents}, lines)
            if not jobs and not args.json:
                print_message(
                    f"no job has reported to {client.server}: start one with"
                    f" HANGWATCH_URL={client.server} torchrun …"
                )
            return choose_exit_code(incidents)

        return watch_view(args, print_status)


def format_status(
    jobs: Sequence[Document], incidents: Sequence[Document], now: datetime
) -> Iterator[str]:
    """A line for each job, followed by its open incidents; then the open incidents of jobs or
    attempts that are not among ``jobs``.
    """
    remaining = list(incidents)
    for job in jobs:
        yield from _format_job(job)
        has_incident = False
        for incident in tuple(remaining):
            if all(incident.get(key) == job.get(key) for key in ("job", "attempt")):
                yield from _format_open_incident(incident, now)
                remaining.remove(incident)
                has_incident = True
        if not has_incident or job.get("state") in ("lost", "failed", "finished"):
            yield from wrap_text(job.get("summary"), "  ")
    if remaining:
        yield "Still open, of earlier jobs or attempts:"
    for incident in remaining:
        yield from _format_open_incident(incident, now)


def _format_job(job: Document) -> Iterator[str]:
    """Name, state and facts of a job: on one line if they fit."""
    name = clean_member(job, "job")
    if job.get("attempt"):
        name += f" (attempt {clean_member(job, 'attempt')})"
    states = job.get("states") or {}
    counts = [f"{count} {clean_text(state)}" for state, count in states.items() if count]
    world_size = job.get("world_size", 0)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    facts = f"{ranks}: {', '.join(counts) or 'none has reported'}"
    if job.get("step") is not None:
        facts += f" · step {clean_member(job, 'step')}"
    if job.get("last_seen_s") is not None:
        facts += f" · seen {format_age(float(job['last_seen_s']))} ago"
    state = clean_member(job, "state")
    if state in ("stalled", "failed", "lost"):
        coloured_state = as_error(state)
    elif state in ("running", "finished"):
        coloured_state = as_success(state)
    else:
        coloured_state = as_warning(state)
    if len(f"{name}  {state}  {facts}") <= TERMINAL_COLUMNS:
        yield f"{as_bold(name)}  {coloured_state}  {facts}"
        return
    name = truncate_end(name, TERMINAL_COLUMNS - len(state) - 2)
    yield f"{as_bold(name)}  {coloured_state}"
    yield from wrap_text(facts, "  ")


def _format_open_incident(incident: Document, now: datetime) -> Iterator[str]:
    severity = clean_member(incident, "severity", "alert")
    mark = by_severity(severity.upper(), severity)
    line = f"  {mark}  {clean_member(incident, 'kind')}"
    onset_s = seconds_since(incident.get("onset_at"), now)
    if onset_s is not None:
        line += f"  for {format_age(onset_s)}"
    yield f"{line}  {as_dim(clean_member(incident, 'id', ''))}"
    yield from wrap_text(format_summary(incident), "    ")


def add_incidents_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    parser.add_argument("--status", choices=("open", "resolved"), help="only these")
    parser.add_argument(
        "--kind",
        choices=[kind.value for kind in VerdictKind],
        metavar="KIND",
        help="only this kind, such as missing_rank",
    )
    parser.add_argument(
        "--limit",
        type=parse_positive,
        default=20,
        metavar="N",
        help="at most N incidents (default: 20)",
    )


def run_incidents(args: argparse.Namespace) -> int:
    """Prints a table. Raises CliError."""
    with open_client(args) as client:
        # The API cannot filter by kind: a page that is filtered here must not end at the limit.
        page_size = min(args.limit, _MAX_PAGE_SIZE) if args.kind is None else None
        items = client.iter_items("incidents", job=args.job, status=args.status, limit=page_size)
        matching = (item for item in items if args.kind in (None, item.get("kind")))
        incidents = list(itertools.islice(matching, args.limit))
        if args.job is not None and not incidents:
            client.check_job(args.job)
    if incidents or args.json:
        lines = format_incidents(incidents, client.server_time)
        print_result(args, {"items": incidents, "next": None}, lines)
    else:
        has_filter = args.job or args.status or args.kind
        print_message("no incident matches" if has_filter else "no incident")
    return OK


def format_incidents(documents: Sequence[Document], now: datetime) -> Iterator[str]:
    """A table, with each incident's summary under its row."""
    ids = [clean_member(incident, "id") for incident in documents]
    id_width = find_unique_prefix_width(ids)
    job_width = max(10, TERMINAL_COLUMNS - id_width - 38)
    yield as_dim(f"{'ID':{id_width}}  {'STATUS':8}  {'AGE':>7}  {'KIND':15}  JOB")
    for incident_id, incident in zip(ids, documents, strict=True):
        status = f"{clean_member(incident, 'status'):8}"
        if incident.get("status") == "open":
            status = by_severity(status, incident.get("severity"))
        opened_s = seconds_since(incident.get("opened_at"), now)
        age = "?" if opened_s is None else format_age(opened_s)
        kind = clean_member(incident, "kind")
        job = truncate_end(clean_member(incident, "job"), job_width)
        yield f"{incident_id[:id_width]:{id_width}}  {status}  {age:>7}  {kind:15}  {job}"
        yield from wrap_text(incident.get("summary"), "  ")


def find_unique_prefix_width(ids: Iterable[str]) -> int:
    """The number of leading characters by which all these ids differ."""
    distinct_ids = set(ids)
    longest = max(map(len, distinct_ids), default=_MIN_ID_WIDTH)
    for width in range(_MIN_ID_WIDTH, longest):
        if len({name[:width] for name in distinct_ids}) == len(distinct_ids):
            return width
    return longest


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    _add_id(parser)
    parser.add_argument("--full", action="store_true", help="show all frames, also of libraries")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="refresh every second until Ctrl-C; waits for an incident",
    )
    parser.add_argument(
        "--no-pager", action="store_true", help="print all at once, not through PAGER or less"
    )


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="its id, or the beginning of it (default: the newest incident)",
    )


def run_show(args: argparse.Namespace) -> int:
    """Prints one incident in full. Raises CliError."""
    with open_client(args) as client:

        def print_incident() -> int:
            document = find_incident(client, args.id, args.job)
            lines = format_incident(document, client.server_time, full=args.full)
            if args.json or args.watch or args.no_pager:
                print_result(args, document, lines)
            else:
                page_lines(lines)
            return OK

        return watch_view(args, print_incident)


def find_incident(client: Client, id_prefix: str | None, job: str | None) -> Document:
    """The incident with this id or unique prefix of an id, or the newest one if None is given.

    It is always fetched by its id, since the items of a list may be abridged.
    """
    if id_prefix is None:
        newest = next(client.iter_items("incidents", job=job, limit=1), None)
        if newest is not None:
            return client.get(build_path("incidents", newest["id"]))
        if job is None:
            raise NotFoundError("there is no incident")
        client.check_job(job)
        raise NotFoundError(f"there is no incident of job {job}")
    with contextlib.suppress(NotFoundError):  # then it may be a prefix
        return client.get(build_path("incidents", id_prefix))
    ids = (str(incident["id"]) for incident in client.iter_items("incidents", job=job))
    matches = [name for name in ids if name.upper().startswith(id_prefix.upper())]
    if not matches:
        raise NotFoundError(
            f"no incident has an id that begins with {id_prefix!r}: `hangwatch incidents` lists"
            " them"
        )
    if len(matches) > 1:
        raise UsageError(
            f"{id_prefix!r} begins the ids of {len(matches)} incidents:"
            f" {abbreviate_list(matches, _MAX_IDS_NAMED)}"
        )
    return client.get(build_path("incidents", matches[0]))


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    _add_id(parser)
    parser.add_argument(
        "--out",
        "-o",
        default="",
        metavar="FILE",
        help="the file or its folder; - for stdout (default: hangwatch-ID.html)",
    )


def run_report(args: argparse.Namespace) -> int:
    """Writes the file and prints its path. Raises CliError."""
    with open_client(args) as client:
        incident_id = str(find_incident(client, args.id, args.job)["id"])
        page = client.download_file(f"{build_path('incidents', incident_id)}/report")
    if args.out == _STDOUT:
        sys.stdout.buffer.write(page)
        return OK
    path = Path(args.out)
    if path.is_dir():  # "" is the current folder
        path /= f"hangwatch-{incident_id}.html"
    try:
        path.write_bytes(page)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
    print_result(args, {"id": incident_id, "path": str(path)}, [str(path)])
    if not args.json:
        print_message(f"{len(page) / 1e3:.0f} kB; open it in a browser, or attach it to a ticket")
    return OK
