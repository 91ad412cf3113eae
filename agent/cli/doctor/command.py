"""``hangwatch doctor``: what would keep hangwatch from working here, and the remedy for each."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence

from ..terminal import say, say_json
from . import activation, recorder, server, stacks
from .findings import Finding

DEFAULT_URL = "http://127.0.0.1:8642"


def run(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> int:
    """Checks, prints what it found, and gives the exit code: 0, 1 where something fails, 3 where only the server is missing.

    Uses ``args.json``, and ``args.url`` and ``args.token`` where they were given.
    """
    env = os.environ if env is None else env
    url = getattr(args, "url", None) or env.get("HANGWATCH_URL") or DEFAULT_URL
    token = getattr(args, "token", None)
    found = [
        *activation.check(env),
        *activation.check_run_dir(url),
        *recorder.check(env),
        *stacks.check(),
        *server.check(url, token, env),
    ]
    if getattr(args, "json", False):
        say_json({"ok": exit_code(found) == 0, "findings": [finding.document() for finding in found]})
    else:
        say(lines(found))
    return exit_code(found)


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """The findings as text; remedies are indented below."""
    for finding in found:
        yield f"{finding.verdict:4} {finding.name}: {finding.detail}"
        if finding.remedy:
            yield f"     {finding.remedy}"


def exit_code(found: Sequence[Finding]) -> int:
    """0 where nothing failed, 3 where all that failed is that no server answers, else 1."""
    failed = [finding for finding in found if finding.ok is False]
    if not failed:
        return 0
    return 3 if all(finding.unreachable for finding in failed) else 1
