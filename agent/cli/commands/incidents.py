"""`hangwatch incidents` lists incidents, `hangwatch show` prints one of them, and `hangwatch
report` saves one as an HTML file, for a ticket or a colleague.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hangwatch.model.kinds import VerdictKind
from hangwatch.report.terminal import format_incident

from ..arguments import add_query_options, parse_positive
from ..client import Client, open_client
from ..errors import OK, CliError, NotFoundError, UsageError
from ..terminal import (
    choose_paint,
    detect_paint,
    page_lines,
    print_json,
    print_message,
    print_result,
    watch_view,
)
from .status import abbreviate_list, check_job, format_incidents

_MAX_PAGE_SIZE = 100  # the API's limit
_STDOUT = "-"


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
    parser.set_defaults(run=run_incidents)


def run_incidents(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints a table. Raises CliError."""
    with open_client(args, env) as client:
        # The API cannot filter by kind: a page that is filtered here must not end at the limit.
        page_size = min(args.limit, _MAX_PAGE_SIZE) if args.kind is None else None
        items = client.iter_items("incidents", job=args.job, status=args.status, limit=page_size)
        matching = (item for item in items if args.kind in (None, item.get("kind")))
        incidents = list(islice(matching, args.limit))
        if args.job is not None and not incidents:
            check_job(client, args.job)
    if incidents or args.json:
        lines = format_incidents(incidents, client.server_time, detect_paint(env))
        print_result(args, {"items": incidents, "next": None}, lines)
    else:
        has_filter = args.job or args.status or args.kind
        print_message("no incident matches" if has_filter else "no incident")
    return OK


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
    parser.set_defaults(run=run_show)


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="its id, or the beginning of it (default: the newest incident)",
    )


def run_show(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints one incident in full. Raises CliError."""
    paint = choose_paint(args, env)
    with open_client(args, env) as client:

        def print_incident() -> int:
            document = find_incident(client, args.id, args.job)
            lines = format_incident(document, client.server_time, paint, full=args.full)
            if args.json or args.watch or args.no_pager:
                print_result(args, document, lines)
            else:
                page_lines(lines, env)
            return OK

        return watch_view(print_incident, paint) if args.watch else print_incident()


def find_incident(client: Client, id_prefix: str | None, job: str | None) -> dict[str, Any]:
    """The incident with this id or unique prefix of an id, or the newest one if None is given.

    It is always fetched by its id, since the items of a list may be abridged.
    """
    if id_prefix is None:
        newest = next(client.iter_items("incidents", job=job, limit=1), None)
        if newest is not None:
            return _fetch_incident(client, str(newest["id"]))
        if job is None:
            raise NotFoundError("there is no incident")
        check_job(client, job)
        raise NotFoundError(f"there is no incident of job {job}")
    with contextlib.suppress(NotFoundError):  # then it may be a prefix
        return _fetch_incident(client, id_prefix)
    ids = [str(incident["id"]) for incident in client.iter_items("incidents", job=job)]
    matches = [name for name in ids if name.upper().startswith(id_prefix.upper())]
    if not matches:
        raise NotFoundError(
            f"no incident has an id that begins with {id_prefix!r}: `hangwatch incidents` lists"
            " them"
        )
    if len(matches) > 1:
        raise UsageError(
            f"{id_prefix!r} begins the ids of {len(matches)} incidents: {abbreviate_list(matches)}"
        )
    return _fetch_incident(client, matches[0])


def _fetch_incident(client: Client, incident_id: str) -> dict[str, Any]:
    return client.get(f"incidents/{quote(incident_id, safe='')}")


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
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Writes the file and prints its path. Raises CliError."""
    with open_client(args, env) as client:
        incident_id = str(find_incident(client, args.id, args.job)["id"])
        page = client.download_file(f"incidents/{quote(incident_id, safe='')}/report")
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
    if args.json:
        print_json({"id": incident_id, "path": str(path)})
    else:
        print(path)
        print_message(f"{len(page) / 1e3:.0f} kB; open it in a browser, or attach it to a ticket")
    return OK
