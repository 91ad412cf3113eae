"""``hangwatch token``: a job's token."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from hangwatch.protocol.signatures import Credential, derive_job_token

from ..client import parse_address
from ..errors import UsageError


def print_job_token(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Raises UsageError if the server's token is not given."""
    token = args.token or parse_address(None, None, env).token
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
