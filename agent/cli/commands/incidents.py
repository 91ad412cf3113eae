"""The commands that show the server's view: status, incidents, show and dump."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

from hangwatch.report.terminal import format_incident, format_stack, merge_equal_stacks
from hangwatch.report.text import PLAIN_PAINT, Paint, clean_text, name_ranks

from ..client import Client, parse_address
from ..errors import ERROR, HANG, OK, NotFoundError, UnreachableError, UsageError
from ..terminal import detect_paint, print_json, print_lines, print_message
from . import overview

_POLL_S = 0.2
_MAX_LISTED = 8  # jobs or ids named in a message


def run_command(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Runs ``args.command`` and returns its exit code. Raises CliError."""
    command: Callable[[Client, argparse.Namespace, Paint], int] = {
        "status": show_status,
        "incidents": list_incidents,
        "show": show_incident,
        "dump": dump_stacks,
    }[args.command]
    with contextlib.closing(Client(parse_address(args.url, args.token, env))) as client:
        return command(client, args, PLAIN_PAINT if args.json else detect_paint(env))


def show_status(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """Every job in a line, with what is open of it. `HANG` while an alert is."""
    if not args.watch:
        return _print_status(client, args, colours)
    code = OK
    try:
        while True:
            if colours.colour:
                print("\x1b[H\x1b[2J", end="")
            try:
                code = _print_status(client, args, colours)
            except UnreachableError as error:  # it may come back: that is what is watched for
                print_message(str(error))
                code = error.exit_code
            print(flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        return code


def _print_status(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    jobs = list(client.iter_items("jobs"))
    found = list(client.iter_items("incidents", job=args.job, status="open"))
    if args.job is not None:
        jobs = [job for job in jobs if job.get("job") == args.job]
        if not jobs and not found:
            raise _build_unknown_job_error(client, args.job)
    if args.json:
        print_json({"jobs": jobs, "incidents": found})
    else:
        print_lines(overview.format_status(jobs, found, client.server_time, colours))
        if not jobs:
            print_message(
                f"no job has reported to {client.server.url}: start one with"
                f" HANGWATCH_URL={client.server.url} torchrun …"
            )
    return HANG if any(i.get("severity") == "alert" for i in found) else OK


def list_incidents(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """A table of incidents."""
    listed = client.iter_items(
        "incidents",
        job=args.job,
        status=args.status,
        limit=min(args.limit, 100) if args.kind is None else None,
    )
    found = list(islice((i for i in listed if args.kind in (None, i.get("kind"))), args.limit))
    if args.job is not None and not found:
        _check_job(client, args.job)
    if args.json:
        print_json({"items": found, "next": None})
    elif found:
        print_lines(overview.format_incidents(found, client.server_time, colours))
    else:
        print_message(
            "no incident" + ("" if not (args.job or args.status or args.kind) else " like that")
        )
    return OK


def show_incident(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """One incident in full."""
    document = _find_incident(client, args.id, args.job)
    if args.json:
        print_json(document)
    else:
        print_lines(format_incident(document, client.server_time, colours, full=args.full))
    return OK


def _find_incident(client: Client, id_prefix: str | None, job: str | None) -> dict[str, Any]:
    """The incident that is meant: by its id or a prefix of it; the newest without one. Lists may
    hold less than the whole.
    """
    if id_prefix is None:
        newest = next(iter(client.iter_items("incidents", job=job, limit=1)), None)
        if newest is None:
            if job is not None:
                _check_job(client, job)
            raise NotFoundError("there is no incident" + (f" of job {job}" if job else ""))
        return client.get(f"incidents/{quote(str(newest['id']), safe='')}")
    with contextlib.suppress(NotFoundError):  # then it may be a prefix
        return client.get(f"incidents/{quote(id_prefix, safe='')}")
    wanted = id_prefix.upper()
    matches = [
        str(i["id"])
        for i in client.iter_items("incidents", job=job)
        if str(i["id"]).upper().startswith(wanted)
    ]
    if not matches:
        raise NotFoundError(
            f"no incident has an id that begins with {id_prefix!r}: `hangwatch incidents` lists"
            " them"
        )
    if len(matches) > 1:
        raise UsageError(
            f"{id_prefix!r} begins the ids of {len(matches)} incidents: {_abbreviate_list(matches)}"
        )
    return client.get(f"incidents/{quote(matches[0], safe='')}")


def dump_stacks(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """The stacks of some ranks, merged where equal. `ERROR` unless every one of them gave its
    stacks.
    """
    limit = args.timeout or (60 if args.native else 15)
    try:
        document = client.post(
            "dumps",
            {"ranks": args.ranks, "native": args.native} | ({"job": args.job} if args.job else {}),
        )
    except NotFoundError:
        if args.job is not None:
            _check_job(client, args.job)
        raise
    deadline = time.monotonic() + limit
    while document.get("status") == "pending" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        document = client.get(f"dumps/{quote(str(document['id']), safe='')}")
    ranks = document.get("ranks") or []
    if args.json:
        print_json(document)
    else:
        print_lines(_format_rank_stacks(ranks, colours))
    late = [r["rank"] for r in ranks if r.get("status") == "pending"]
    if late:
        remedy = "is its host still heard (`hangwatch status`)? Wait longer with --timeout"
        print_message(f"{name_ranks(late)} gave no stacks within {limit} s: {remedy}")
    failed = [r["rank"] for r in ranks if r.get("status") == "failed"]
    return ERROR if late or failed else OK


def _format_rank_stacks(ranks: list[dict[str, Any]], colours: Paint) -> Iterator[str]:
    entries: list[dict[str, Any]] = []
    for rank in ranks:
        told = list(rank.get("stacks") or [])
        if rank.get("error") and not any(s.get("error") for s in told):
            told.append({"error": rank["error"]})
        entries += [{**entry, "ranks": [rank["rank"]]} for entry in told]
    for i, entry in enumerate(merge_equal_stacks(entries)):
        if i:
            yield ""
        yield from format_stack(entry, colours, full=True)


def _check_job(client: Client, job: str) -> None:
    if not any(known.get("job") == job for known in client.iter_items("jobs")):
        raise _build_unknown_job_error(client, job)


def _build_unknown_job_error(client: Client, job: str) -> NotFoundError:
    known = sorted({clean_text(j.get("job", "?")) for j in client.iter_items("jobs")})
    return NotFoundError(
        f"no job {job!r} has reported; "
        + (f"known: {_abbreviate_list(known)}" if known else "none has so far")
    )


def _abbreviate_list(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )
