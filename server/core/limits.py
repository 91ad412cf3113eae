"""Limits on what clients may send and on what is kept in memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangwatch.protocol import heartbeat
from hangwatch.tracking.fleet import Fleet

from .problems import Problem

MAX_BODY_BYTES = 16 << 20  # as sent
MAX_NAME_CHARACTERS = 256  # of a job's or a host's name
MAX_STREAMS = 16384  # groups and point-to-point channels of one process
# In memory, including those of finished attempts:
MAX_AGENTS = 1 << 15
MAX_PROCESSES = 1 << 18
MAX_ATTEMPTS = 2000
LARGE_RANKS = 4000  # from this number on, reading all ranks takes long


def is_large(ranks: int) -> bool:
    """Whether an attempt or a group has so many ranks that reading all of them takes long. It is
    then done in a thread, and less often.
    """
    return ranks >= LARGE_RANKS


def check_heartbeat(
    beat: heartbeat.Heartbeat, fleet: Fleet, is_known_agent: bool, agent_count: int
) -> None:
    """Raises Problem if a heartbeat would exceed a limit on what is kept in memory."""
    if not is_known_agent and agent_count >= MAX_AGENTS:
        raise _make_memory_problem(f"this server watches at most {MAX_AGENTS} hosts")
    new_identities = [
        process.identity
        for process in beat.processes
        if process.identity is not None and (beat.host, process.key) not in fleet.processes
    ]
    if len(fleet.processes) + len(new_identities) > MAX_PROCESSES:
        raise _make_memory_problem(f"this server keeps at most {MAX_PROCESSES} processes in memory")
    if new_identities and len(fleet.attempts) >= MAX_ATTEMPTS:
        known_jobs = {key.job for key in fleet.attempts}
        if any(identity.job not in known_jobs for identity in new_identities):
            raise _make_memory_problem(
                f"this server keeps at most {MAX_ATTEMPTS} attempts of jobs in memory"
            )
    for update in beat.processes:
        # Few processes come near the limit: only these are counted exactly.
        if len(update.sequences) > MAX_STREAMS // 2:
            _check_stream_count(beat.host, update, fleet)


def _check_stream_count(host: str, update: heartbeat.ProcessUpdate, fleet: Fleet) -> None:
    uids = {stream.uid for stream in update.sequences}
    known = fleet.processes.get((host, update.key))
    if known is not None:
        uids |= known.process.streams.keys()
    if len(uids) > MAX_STREAMS:
        raise Problem(
            413,
            f"process {update.key} has more than {MAX_STREAMS} process groups and channels",
            limit=MAX_STREAMS,
        )


def _make_memory_problem(limit: str) -> Problem:
    return Problem(
        429, f"{limit}; run another hangwatch-server for the rest", headers={"Retry-After": "60"}
    )


class BodySizeLimit:
    """ASGI middleware that refuses request bodies of more than `MAX_BODY_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"a request holds at most {MAX_BODY_BYTES >> 20} MiB")
            return message

        await self._app(scope, receive_limited if scope["type"] == "http" else receive, send)
