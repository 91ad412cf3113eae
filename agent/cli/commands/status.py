"""`hangwatch status`: every job on one line, with its open incidents."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hangwatch.report.text import Paint

from ..client import Client, open_client
from ..errors import HANG, OK
from ..terminal import choose_paint, print_json, print_lines, print_message
from ..watching import watch_view
from . import overview
from .jobs import build_unknown_job_error


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
