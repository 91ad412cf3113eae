"""``hangwatch doctor``: what would keep hangwatch from working here, and the remedy for each."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence

from ..terminal import print_json, print_lines
from . import activation, recorder, server, stacks
from .findings import Finding

DEFAULT_URL = "http://127.0.0.1:8642"


def run_doctor(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> int:
    """Checks, prints what it found, and gives the exit code: 0, 1 where something fails, 3 where
    only the server is missing.

    Uses ``args.json``, and ``args.url`` and ``args.token`` where they were given.
    """
    env = os.environ if env is None else env
    url = getattr(args, "url", None) or env.get("HANGWATCH_URL") or DEFAULT_URL
    token = getattr(args, "token", None)
    found = [
        *activation.check_start(env),
        *activation.check_run_dir(url),
        *recorder.check_recorder(env),
        *stacks.check_stacks(),
        *server.check_server(url, token, env),
    ]
    if getattr(args, "json", False):
        print_json(
            {
                "ok": choose_exit_code(found) == 0,
                "findings": [finding.to_document() for finding in found],
            }
        )
    else:
        print_lines(format_findings(found))
    return choose_exit_code(found)


def format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """The findings as text; remedies are indented below."""
    for finding in findings:
        yield f"{finding.verdict:4} {finding.name}: {finding.detail}"
        if finding.remedy:
            yield f"     {finding.remedy}"


def choose_exit_code(findings: Sequence[Finding]) -> int:
    """0 where nothing failed, 3 where all that failed is that no server answers, else 1."""
    failed = [finding for finding in findings if finding.ok is False]
    if not failed:
        return 0
    return 3 if all(finding.unreachable for finding in failed) else 1
