"""Checks of the way to the server, as a node agent goes it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

import httpx

from ...node.reporting.uplink import ServerTarget, TargetError, make_client
from .findings import Finding

NAME = "server"


def check_server(url: str, token: str | None, env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether it answers, is a hangwatch server, and takes the token."""
    try:
        target = ServerTarget.from_url(url, env.get("HANGWATCH_TOKEN", ""))
    except TargetError as error:
        yield Finding(name=NAME, ok=False, detail="no address of a server", remedy=str(error))
        return
    if token:
        target = ServerTarget(base_url=target.base_url, token=token)
    try:
        with make_client(target) as http:
            yield judge_responses(
                http.get(f"{target}/healthz"), http.get(f"{target}/api/v1/jobs"), target
            )
    except httpx.HTTPError as error:
        detail, remedy = explain_error(error, target)
        yield Finding(name=NAME, ok=False, detail=detail, remedy=remedy, unreachable=True)


def judge_responses(health: httpx.Response, jobs: httpx.Response, target: ServerTarget) -> Finding:
    """What the two answers mean."""
    printed = "use the HANGWATCH_URL= line that hangwatch-server printed when it started"
    if jobs.status_code in (401, 403):
        what = "the token is wrong" if target.token else "it wants a token, and none is given"
        return Finding(name=NAME, ok=False, detail=f"{target} answers, but {what}", remedy=printed)
    try:
        told = jobs.json() if jobs.status_code == 200 else None
    except ValueError:
        told = None
    if health.status_code != 200 or not isinstance(told, dict) or "items" not in told:
        detail = (
            f"{target} answers, but not as a hangwatch server ({health.status_code},"
            f" {jobs.status_code})"
        )
        return Finding(
            name=NAME,
            ok=False,
            detail=detail,
            remedy=f"is another service on that port, or a path prefix missing? {printed}",
        )
    return Finding(
        name=NAME,
        ok=True,
        detail=f"{target} answers and {'takes the token' if target.token else 'wants no token'}",
    )


def explain_error(error: httpx.HTTPError, target: ServerTarget) -> tuple[str, str]:
    """Why nothing answers, and what to do."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    host = httpx.URL(target.base_url).host
    if isinstance(cause, socket.gaierror):
        return (
            f"the name {host} is not known here",
            f"check the name in HANGWATCH_URL, or DNS: getent hosts {host}",
        )
    if isinstance(error, httpx.TimeoutException):
        return (
            f"{target} does not answer in time",
            "a firewall between here and there? the port must be open from every node",
        )
    if isinstance(cause, ConnectionRefusedError):
        return (
            f"{target} refuses connections",
            "start hangwatch-server there; with --host 0.0.0.0 if it runs on another node",
        )
    return (
        f"{target} cannot be reached: {error}",
        "check HANGWATCH_URL and the way to the master node",
    )
