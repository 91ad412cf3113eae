"""Limits on what clients may send, and how often node agents report under load."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangwatch.protocol import heartbeat
from hangwatch.tracking.fleet import Fleet

from . import event_loop
from .problems import Problem

BODY_MAX = 16 << 20  # bytes, as sent

AGENTS_MAX = 1 << 15  # node agents, those of the attempt before too
PROCESSES_MAX = 1 << 18  # in memory, those of finished attempts too
ATTEMPTS_MAX = 2000  # in memory
SEQUENCES_MAX = 16384  # groups and point-to-point channels of one process
NAME_MAX = 256  # characters of a job's or a host's name

HEARTBEATS = "/heartbeats"  # how their path ends
LARGE = 4000  # ranks

LOGIN_FAILURES, LOGIN_WITHIN = 10, 300.0  # from one address, in seconds
_ADDRESSES_KEPT = 10_000

LONGEST_INTERVAL = 10.0  # seconds that heartbeats are apart at most
SPREAD_FROM = 2.0  # seconds between heartbeats from which on hosts have turns
DETAILS_EVERY = 5  # heartbeats, then, of a host whose ranks all get on
HEARTBEATS_PER_S = 500  # more hosts than this can serve report less often
MOST_PER_S = 8000  # heartbeats for a moment, where all hosts have news
OVERLOADED = 2.0  # seconds by which the event loop is late
WAITED = 10.0  # seconds for which a heartbeat waits in line: a node agent gives up soon after
RETRY_AFTER = 5  # seconds


def check(beat: heartbeat.Heartbeat, fleet: Fleet, known_agent: bool, agents: int) -> None:
    """Raises Problem if a heartbeat would exceed a limit on what is kept in memory."""

    def full(what: str) -> Problem:
        return Problem(
            429, f"{what}; run another hangwatch-server for the rest", headers={"Retry-After": "60"}
        )

    if not known_agent and agents >= AGENTS_MAX:
        raise full(f"this server watches at most {AGENTS_MAX} hosts")
    fresh = [
        p
        for p in beat.processes
        if p.identity is not None and (beat.host, p.key) not in fleet.processes
    ]
    if len(fleet.processes) + len(fresh) > PROCESSES_MAX:
        raise full(f"this server keeps at most {PROCESSES_MAX} processes in memory")
    if fresh and len(fleet.attempts) >= ATTEMPTS_MAX:
        known = {key.job for key in fleet.attempts}
        if any(p.identity is not None and p.identity.job not in known for p in fresh):
            raise full(f"this server keeps at most {ATTEMPTS_MAX} attempts of jobs in memory")
    for update in beat.processes:
        if (
            len(update.sequences) > SEQUENCES_MAX // 2
        ):  # few processes ever come near: count exactly only those
            tracked = fleet.processes.get((beat.host, update.key))
            known_uids = tracked.process.streams.keys() if tracked is not None else set()
            total = {s.uid for s in update.sequences} | known_uids
            if len(total) > SEQUENCES_MAX:
                raise Problem(
                    413,
                    f"process {update.key} has more than {SEQUENCES_MAX} process groups and"
                    " channels",
                    limit=SEQUENCES_MAX,
                )


def large(ranks: int) -> bool:
    """Whether an attempt or a group has so many ranks that reading all of them takes long. It is
    then done in a thread, and less often.
    """
    return ranks >= LARGE


@dataclass(slots=True)
class Load:
    """How late the event loop runs, which measures all of the server's work except queued
    heartbeats, and how long these wait.
    """

    late_s: float = 0.0
    unread_s: float = 0.0  # for which heartbeats wait to be read
    queued_s: float = 0.0  # for which those that are not urgent are then queued

    @property
    def waited_s(self) -> float:
        """The longer of the two waits, not their sum: while a thread reads the state, unread and
        queued heartbeats wait at the same time.
        """
        return max(self.unread_s, self.queued_s)

    async def measure(self) -> None:
        """Measures until it is cancelled."""
        marker = event_loop.place_marker()
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.1)
            late = time.monotonic() - began - 0.1
            self.late_s += 0.2 * (late - self.late_s)
            self.unread_s = marker.age_s
            if marker.is_passed:
                marker = event_loop.place_marker()

    def interval(self, wished_s: float, agents: int) -> float:
        """Seconds until a host should report again."""
        return min(
            LONGEST_INTERVAL, max(wished_s, agents / HEARTBEATS_PER_S) * (1 + 10 * self.late_s)
        )

    def news(self, interval_s: float, agents: int) -> float | None:
        """Seconds within which a host should report changes, if its next heartbeat is later."""
        return None if interval_s < SPREAD_FROM else max(1.0, agents / MOST_PER_S)

    def turn(self, agent: str, interval_s: float, now: float) -> float:
        """Seconds until a host's own slot in each interval. Without slots, hosts that waited
        together would report together from then on.
        """
        if interval_s < SPREAD_FROM:
            return interval_s
        until = _until_turn(agent, interval_s, now)
        return until if until > interval_s / 10 else until + interval_s

    def details(self, agent: str, interval_s: float, now: float) -> float | None:
        """Seconds for which a host may omit the position of ranks that make progress; None if it
        should send it with each heartbeat.
        """
        return (
            None
            if interval_s < SPREAD_FROM
            else _until_turn(agent, DETAILS_EVERY * interval_s, now)
        )

    def refusal(self, urgent: bool) -> Problem | None:
        """The refusal of a heartbeat while the server is overloaded; None if it is accepted."""
        if self.late_s <= OVERLOADED and (self.waited_s <= WAITED or urgent):
            return None
        detail = (
            "this server is overloaded; nothing of the request was taken in, and it can be repeated"
        )
        return Problem(503, detail, headers={"Retry-After": str(RETRY_AFTER)})


def _until_turn(agent: str, interval_s: float, now: float) -> float:
    return (zlib.crc32(agent.encode()) / (1 << 32) * interval_s - now) % interval_s


@dataclass(slots=True)
class Failures:
    """Wrong tokens at the login, by address."""

    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def wait_s(self, address: str, now: float) -> float:
        """Seconds until another attempt is accepted."""
        seen = self._seen.get(address, deque())
        while seen and now - seen[0] >= LOGIN_WITHIN:
            seen.popleft()
        return LOGIN_WITHIN - (now - seen[0]) if len(seen) >= LOGIN_FAILURES else 0.0

    def add(self, address: str, now: float) -> None:
        self._seen.setdefault(address, deque(maxlen=LOGIN_FAILURES)).append(now)
        while len(self._seen) > _ADDRESSES_KEPT:
            del self._seen[next(iter(self._seen))]


class Bodies:
    """ASGI middleware that limits the size of request bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receiving() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_MAX:
                raise HTTPException(413, f"a request holds at most {BODY_MAX >> 20} MiB")
            return message

        await self._app(scope, receiving if scope["type"] == "http" else receive, send)
