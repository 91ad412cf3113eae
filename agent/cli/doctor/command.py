"""Runs all checks of ``hangwatch doctor`` and prints their findings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence

from ..terminal import print_json, print_lines
from . import activation, device, hardware, recorder, recordings, server, stacks
from .findings import Finding

DEFAULT_URL = "http://127.0.0.1:8642"


def run_doctor(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> int:
    """Returns 0 if nothing fails, 3 if only the server is unreachable, otherwise 1.

    Uses ``args.json``, and ``args.url`` and ``args.token`` if present.
    """
    env = os.environ if env is None else env
    url = getattr(args, "url", None) or env.get("HANGWATCH_URL") or DEFAULT_URL
    token = getattr(args, "token", None)
    findings = [
        *activation.check_start(env),
        *activation.check_run_dir(url),
        *recorder.check_recorder(env),
        *recordings.check_recordings(url),
        *device.check_devices(env),
        *stacks.check_stacks(),
        *hardware.check_hardware(env),
        *hardware.check_known_problems(),
        *server.check_server(url, token, env),
    ]
    exit_code = choose_exit_code(findings)
    if getattr(args, "json", False):
        documents = [finding.to_document() for finding in findings]
        print_json({"ok": exit_code == 0, "findings": documents})
    else:
        print_lines(format_findings(findings))
    return exit_code


def format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """The findings as text, each with its remedy indented below."""
    for finding in findings:
        yield f"{finding.verdict:4} {finding.name}: {finding.detail}"
        if finding.remedy:
            yield f"     {finding.remedy}"


def choose_exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing failed, 3 if only the server is unreachable, otherwise 1."""
    failed = [finding for finding in findings if finding.ok is False]
    if not failed:
        return 0
    return 3 if all(finding.unreachable for finding in failed) else 1
