"""The commands that show the server's view: status, incidents, show and dump."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

from hangwatch.report.terminal import incident, merged, stack
from hangwatch.report.text import PLAIN, Paint, clean, name_ranks

from ..client import Client, address
from ..errors import ERROR, HANG, OK, NotFoundError, UnreachableError, UsageError
from ..terminal import paint, say, say_json, tell
from . import overview

_POLL_S = 0.2
_LISTED = 8  # jobs or ids named in a message


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Runs ``args.command`` and returns its exit code. Raises CliError."""
    command: Callable[[Client, argparse.Namespace, Paint], int] = {"status": status, "incidents": incidents, "show": show, "dump": dump}[
        args.command
    ]
    with contextlib.closing(Client(address(args.url, args.token, env))) as client:
        return command(client, args, PLAIN if args.json else paint(env))


def status(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """Every job in a line, with what is open of it. `HANG` while an alert is."""
    if not args.watch:
        return _look(client, args, colours)
    code = OK
    try:
        while True:
            if colours.colour:
                print("\x1b[H\x1b[2J", end="")
            try:
                code = _look(client, args, colours)
            except UnreachableError as error:  # it may come back: that is what is watched for
                tell(str(error))
                code = error.exit_code
            print(flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        return code


def _look(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    jobs = list(client.items("jobs"))
    found = list(client.items("incidents", job=args.job, status="open"))
    if args.job is not None:
        jobs = [job for job in jobs if job.get("job") == args.job]
        if not jobs and not found:
            raise _unknown_job(client, args.job)
    if args.json:
        say_json({"jobs": jobs, "incidents": found})
    else:
        say(overview.status(jobs, found, client.now, colours))
        if not jobs:
            tell(f"no job has reported to {client.server.url}: start one with HANGWATCH_URL={client.server.url} torchrun …")
    return HANG if any(i.get("severity") == "alert" for i in found) else OK


def incidents(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """A table of incidents."""
    listed = client.items("incidents", job=args.job, status=args.status, limit=min(args.limit, 100) if args.kind is None else None)
    found = list(islice((i for i in listed if args.kind in (None, i.get("kind"))), args.limit))
    if args.job is not None and not found:
        _check_job(client, args.job)
    if args.json:
        say_json({"items": found, "next": None})
    elif found:
        say(overview.incidents(found, client.now, colours))
    else:
        tell("no incident" + ("" if not (args.job or args.status or args.kind) else " like that"))
    return OK


def show(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """One incident in full."""
    document = _incident(client, args.id, args.job)
    if args.json:
        say_json(document)
    else:
        say(incident(document, client.now, colours, full=args.full))
    return OK


def _incident(client: Client, beginning: str | None, job: str | None) -> dict[str, Any]:
    """The incident that is meant: by its id or a prefix of it; the newest without one. Lists may hold less than the whole."""
    if beginning is None:
        newest = next(iter(client.items("incidents", job=job, limit=1)), None)
        if newest is None:
            if job is not None:
                _check_job(client, job)
            raise NotFoundError("there is no incident" + (f" of job {job}" if job else ""))
        return client.get(f"incidents/{quote(str(newest['id']), safe='')}")
    with contextlib.suppress(NotFoundError):  # then it may be a prefix
        return client.get(f"incidents/{quote(beginning, safe='')}")
    wanted = beginning.upper()
    matches = [str(i["id"]) for i in client.items("incidents", job=job) if str(i["id"]).upper().startswith(wanted)]
    if not matches:
        raise NotFoundError(f"no incident has an id that begins with {beginning!r}: `hangwatch incidents` lists them")
    if len(matches) > 1:
        raise UsageError(f"{beginning!r} begins the ids of {len(matches)} incidents: {_some(matches)}")
    return client.get(f"incidents/{quote(matches[0], safe='')}")


def dump(client: Client, args: argparse.Namespace, colours: Paint) -> int:
    """The stacks of some ranks, merged where equal. `ERROR` unless every one of them gave its stacks."""
    limit = args.timeout or (60 if args.native else 15)
    try:
        document = client.post("dumps", {"ranks": args.ranks, "native": args.native} | ({"job": args.job} if args.job else {}))
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
        say_json(document)
    else:
        say(_stacks(ranks, colours))
    late = [r["rank"] for r in ranks if r.get("status") == "pending"]
    if late:
        remedy = "is its host still heard (`hangwatch status`)? Wait longer with --timeout"
        tell(f"{name_ranks(late)} gave no stacks within {limit} s: {remedy}")
    failed = [r["rank"] for r in ranks if r.get("status") == "failed"]
    return ERROR if late or failed else OK


def _stacks(ranks: list[dict[str, Any]], colours: Paint) -> Iterator[str]:
    entries: list[dict[str, Any]] = []
    for rank in ranks:
        told = list(rank.get("stacks") or [])
        if rank.get("error") and not any(s.get("error") for s in told):
            told.append({"error": rank["error"]})
        entries += [{**entry, "ranks": [rank["rank"]]} for entry in told]
    for i, entry in enumerate(merged(entries)):
        if i:
            yield ""
        yield from stack(entry, colours, full=True)


def _check_job(client: Client, job: str) -> None:
    if not any(known.get("job") == job for known in client.items("jobs")):
        raise _unknown_job(client, job)


def _unknown_job(client: Client, job: str) -> NotFoundError:
    known = sorted({clean(j.get("job", "?")) for j in client.items("jobs")})
    return NotFoundError(f"no job {job!r} has reported; " + (f"known: {_some(known)}" if known else "none has so far"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
