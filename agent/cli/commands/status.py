"""`hangwatch status`: every job on one line, with its open incidents."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from hangwatch.report.text import Paint

from ..client import Client, open_client
from ..errors import HANG, OK, UnreachableError
from ..terminal import choose_paint, print_json, print_lines, print_message
from . import overview
from .jobs import build_unknown_job_error

_REFRESH_S = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def run_status(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Returns `HANG` while an alert is open. Raises CliError."""
    paint = choose_paint(args, env)
    with open_client(args, env) as client:
        if args.watch:
            return _watch_status(client, args, paint)
        return _print_status(client, args, paint)


def _watch_status(client: Client, args: argparse.Namespace, paint: Paint) -> int:
    """Refreshes until Ctrl-C, and returns the last exit code."""
    code = OK
    try:
        while True:
            if paint.colour:
                print(_CLEAR_SCREEN, end="")
            try:
                code = _print_status(client, args, paint)
            except UnreachableError as error:  # keep watching: the server may come back
                print_message(str(error))
                code = error.exit_code
            print(flush=True)
            time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return code


def _print_status(client: Client, args: argparse.Namespace, paint: Paint) -> int:
    jobs = list(client.iter_items("jobs"))
    incidents = list(client.iter_items("incidents", job=args.job, status="open"))
    if args.job is not None:
        jobs = [job for job in jobs if job.get("job") == args.job]
        if not jobs and not incidents:
            raise build_unknown_job_error(client, args.job)
    if args.json:
        print_json({"jobs": jobs, "incidents": incidents})
    else:
        print_lines(overview.format_status(jobs, incidents, client.server_time, paint))
        if not jobs:
            print_message(
                f"no job has reported to {client.server.url}: start one with"
                f" HANGWATCH_URL={client.server.url} torchrun …"
            )
    has_alert = any(incident.get("severity") == "alert" for incident in incidents)
    return HANG if has_alert else OK
