"""`hangwatch doctor`: runs all checks and prints their findings.

The check of the server is here as well. It connects as a node agent does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from hangwatch.protocol.heartbeat import PROOF_PATH

from ...transport.client import (
    Reply,
    ServerTarget,
    SignedClient,
    TargetError,
    TransportError,
    parse_targets,
)
from ..arguments import DEFAULT_URL, add_format_option, add_server_options
from ..errors import ERROR, OK, UNREACHABLE
from ..terminal import print_result
from . import doctor_checks
from .doctor_checks import Finding, report_failure, report_success

_SERVER_TIMEOUT_S = 5.0


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add_format_option(parser)


def run_doctor(args: argparse.Namespace) -> int:
    """Runs the checks and returns the exit code of `print_findings`."""
    env = os.environ
    url = args.url or env.get("HANGWATCH_URL") or DEFAULT_URL
    torch = doctor_checks.probe_torch(env)
    findings = [
        *doctor_checks.check_activation(env),
        doctor_checks.check_torch(torch),
        *doctor_checks.check_run_dir(url),
        *doctor_checks.check_recorder(env),
        *doctor_checks.check_recordings(url),
        *doctor_checks.check_devices(torch, env),
        *doctor_checks.check_stacks(),
        *doctor_checks.check_hardware(env),
        *doctor_checks.check_known_problems(),
        *check_server(url, args.token, env),
    ]
    return print_findings(args, findings)


def print_findings(args: argparse.Namespace, findings: Sequence[Finding]) -> int:
    """Prints the findings, each with its remedy below. Returns `OK` if nothing failed, `UNREACHABLE`
    if only servers cannot be reached, else `ERROR`.
    """
    failed = [finding for finding in findings if finding.ok is False]
    keys = ("name", "verdict", "ok", "detail", "remedy")
    documents = [{key: getattr(finding, key) for key in keys} for finding in findings]
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:4} {finding.name}: {finding.detail}")
        if finding.remedy:
            lines.append(f"     {finding.remedy}")
    print_result(args, {"ok": not failed, "findings": documents}, lines)
    if not failed:
        return OK
    return UNREACHABLE if all(finding.unreachable for finding in failed) else ERROR


def check_server(url: str, token: str | None, env: Mapping[str, str]) -> Iterator[Finding]:
    """One finding for each server, which must answer as a hangwatch server and accept the token."""
    try:
        targets = parse_targets(url, env.get("HANGWATCH_TOKEN", ""))
    except TargetError as error:
        yield report_failure("server", "not the address of a server", str(error))
        return
    for target in targets:
        if token:
            target = ServerTarget(base_url=target.base_url, token=token)
        try:
            with contextlib.closing(SignedClient(target, _SERVER_TIMEOUT_S)) as client:
                health = client.send_request("GET", "/healthz")
                proof = client.send_request("GET", PROOF_PATH)  # signed: the token is not sent
            yield judge_responses(health, proof, target)
        except TransportError as error:
            yield explain_error(error, target)


def judge_responses(health: Reply, proof: Reply, target: ServerTarget) -> Finding:
    """The finding for the two responses."""
    use_printed_url = "use the HANGWATCH_URL= line that hangwatch-server printed when it started"
    if proof.status in (401, 403):
        problem = "it requires a token, and none is given"
        if target.token:
            problem = "the token is wrong"
        return report_failure("server", f"{target} answers, but {problem}", use_printed_url)
    try:
        document = proof.parse_json() if proof.status == 200 else None
    except ValueError:
        document = None
    if health.status != 200 or document != {}:
        detail = (
            f"{target} answers, but not as a hangwatch server ({health.status}, {proof.status})"
        )
        remedy = f"is another service on that port, or a path prefix missing? {use_printed_url}"
        return report_failure("server", detail, remedy)
    token_result = "accepts the token" if target.token else "requires no token"
    return report_success("server", f"{target} answers and {token_result}")


def explain_error(error: TransportError, target: ServerTarget) -> Finding:
    """Why the server did not respond, and the remedy."""
    detail = f"{target} cannot be reached: {error}"
    remedy = "check HANGWATCH_URL and the network to the master node"
    cause = error.__cause__
    if isinstance(cause, socket.gaierror):
        detail = f"the name {target.host} cannot be resolved here"
        remedy = f"check the name in HANGWATCH_URL, or DNS: getent hosts {target.host}"
    elif isinstance(cause, TimeoutError):
        detail = f"{target} does not answer in time"
        remedy = "check for a firewall: the port must be reachable from every node"
    elif isinstance(cause, ConnectionRefusedError):
        detail = f"{target} refuses connections"
        remedy = "start hangwatch-server there; with --host 0.0.0.0 if it runs on another node"
    return Finding(name="server", ok=False, detail=detail, remedy=remedy, unreachable=True)
