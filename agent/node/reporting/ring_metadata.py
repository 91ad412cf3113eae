"""Parses what a rank wrote about itself into its ring: its identity and its exception. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hangwatch.model.calls import Site
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.protocol.heartbeat import ProcessIdentity


def parse_exception(data: Mapping[str, Any] | None) -> ExceptionInfo | None:
    """The exception that ended a rank; None if there is none, or it is malformed."""
    if not data or not data.get("type"):
        return None
    site = None
    if data.get("file"):
        try:
            site = Site(
                file=str(data["file"]),
                line=int(data.get("line", 0)),
                function=str(data.get("function", "?")),
            )
        except (TypeError, ValueError):
            site = None
    return ExceptionInfo(type=str(data["type"]), message=str(data.get("message", "")), site=site)


def exception_age_s(data: Mapping[str, Any] | None, now_ns: int) -> float:
    at_ns = (data or {}).get("at_ns")
    return max(0, now_ns - at_ns) / 1e9 if isinstance(at_ns, int) else 0.0


def parse_identity(
    data: Mapping[str, Any], *, pid: int, start_ticks: int
) -> ProcessIdentity | None:
    """The identity in a ring, without the process's age; None while the process does not know its
    rank. Raises ValueError if it is malformed.
    """
    if data.get("rank") is None:
        return None
    try:
        local = data.get("local_rank")
        return ProcessIdentity(
            job=str(data["job"]),
            restart=int(data.get("restart", 0)),
            rank=int(data["rank"]),
            world_size=int(data.get("world_size", 0)),
            local_rank=None if local is None else int(local),
            pid=pid,
            start_ticks=start_ticks,
            python=str(data.get("python", "")),
            torch=str(data.get("torch", "")),
            program=str(data.get("program", "")),
            master=str(data.get("master", "")),
            on_hang=str(data.get("on_hang", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"malformed identity: {error!r}") from error
