"""``hangwatch token``: a job's token."""

from __future__ import annotations

import argparse
import json
import os

from hangwatch.protocol.request_signing import Credential, derive_job_token

from ..arguments import add_format_option
from ..client import parse_address
from ..errors import UsageError


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a token for one job, derived from the server's. A job that is started with it"
        " can report itself and jobs named NAME/..., but no other job, and cannot read the API."
    )
    parser.epilog = (
        "Example: HANGWATCH_TOKEN=$(hangwatch token --job run7) HANGWATCH_JOB=run7 torchrun …"
    )
    add_format_option(parser)
    parser.add_argument("--job", required=True, help="the job's name, as in HANGWATCH_JOB")
    parser.add_argument(
        "--token",
        help="the server's token (default: the one in HANGWATCH_URL, else HANGWATCH_TOKEN)",
    )


def run_token(args: argparse.Namespace) -> int:
    """Raises UsageError if the server's token is not given."""
    token = args.token or parse_address(None, None, os.environ).token
    if not token:
        raise UsageError(
            "the server's token is needed: give --token, HANGWATCH_TOKEN, or the HANGWATCH_URL= line"
            " that the server printed"
        )
    if Credential.from_token(token).job is not None:
        raise UsageError(
            "this is a job's token, from which no other can be derived: give the server's"
        )
    if not args.job.strip():
        raise UsageError("--job is empty: give the job's name, as in HANGWATCH_JOB")
    job_token = derive_job_token(token, args.job)
    print(json.dumps({"job": args.job, "token": job_token}) if args.json else job_token)
    return 0
