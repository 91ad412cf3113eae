"""What a client may send and what is kept in memory, at most: every limit of the server.

A request beyond a limit gets a problem document with the limit's name, and `/metrics` counts it.
The limits of what node agents and commands read are in `hangwatch.protocol.replies` and in the
modules that read files.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem

LARGE_RANKS = 4000  # from this number on, reading all ranks takes long


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """``name`` is the label of ``hangwatch_limit_refusals``; ``covers`` completes "at most N UNIT"."""

    name: str
    most: int
    unit: str
    covers: str
    status: int = 413

    @property
    def text(self) -> str:
        """For people: "at most 16 MiB of a request's body"."""
        for shift, unit in ((20, "MiB"), (10, "KiB")):
            if self.unit == "bytes" and self.most >= 1 << shift:
                return f"at most {self.most >> shift} {unit} {self.covers}"
        return f"at most {self.most} {self.unit} {self.covers}"

    def make_problem(self, subject: str = "", remedy: str = "") -> Problem:
        """The answer to a request that exceeds it."""
        detail = f"{subject}: {self.text}" if subject else self.text
        return Problem(
            self.status,
            detail + (f"; {remedy}" if remedy else ""),
            headers={"Retry-After": "60"} if self.status == 429 else None,
            limit=self.name,
            most=self.most,
        )


HEAD = Limit(
    name="request_head",
    most=16 << 10,
    unit="bytes",
    covers="of a request's URL, headers and trailers together",
    status=431,
)
PIPELINED = Limit(
    name="pipelined_requests",
    most=64,
    unit="requests",
    covers="sent on a connection before the first is answered",
    status=429,
)
BODY = Limit(
    name="request_body", most=16 << 20, unit="bytes", covers="of a request's body, as sent"
)
LOGIN_FORM = Limit(name="login_form", most=4096, unit="bytes", covers="of a login form")
UNPACKED_BODY = Limit(
    name="unpacked_body", most=64 << 20, unit="bytes", covers="of a body, decompressed"
)
NAME = Limit(
    name="name",
    most=256,
    unit="printable characters",
    covers="of a job's, a host's, an agent's or a process's name",
    status=422,
)
RANK = Limit(name="rank", most=1 << 18, unit="ranks", covers="of a job", status=422)
STRING = Limit(
    name="string",
    most=64 << 10,
    unit="characters",
    covers="of a text in a heartbeat",
    status=422,
)
LIST = Limit(name="list", most=1 << 15, unit="items", covers="of a list in a heartbeat", status=422)
HEARTBEAT_MEMBERS = Limit(
    name="heartbeat_members",
    most=1 << 21,
    unit="members",
    covers="of all different process groups of a heartbeat together",
)
ATTEMPT_MEMBERS = Limit(
    name="attempt_members",
    most=1 << 22,
    unit="members",
    covers="of the world and all process groups of a job's attempt together",
)
STREAMS = Limit(
    name="streams", most=16384, unit="process groups and channels", covers="of a process"
)
JOBS_PER_AGENT = Limit(
    name="jobs_per_agent", most=64, unit="jobs", covers="reported by one node agent", status=429
)
# In memory, including those of finished attempts:
AGENTS = Limit(
    name="agents", most=1 << 15, unit="node agents", covers="that report to a server", status=429
)
WAITING_AGENTS = Limit(
    name="waiting_agents", most=512, unit="node agents", covers="that wait for commands", status=429
)
PROCESSES = Limit(
    name="processes", most=1 << 18, unit="processes", covers="in a server's memory", status=429
)
ATTEMPTS = Limit(
    name="attempts", most=2000, unit="attempts of jobs", covers="in a server's memory", status=429
)
ATTEMPTS_PER_JOB = Limit(
    name="attempts_per_job",
    most=256,
    unit="attempts",
    covers="of a job in a server's memory",
    status=429,
)
MEMBERS = Limit(
    name="members",
    most=1 << 23,
    unit="members",
    covers="of all worlds and process groups in a server's memory",
    status=429,
)
# The last resort: texts and lists that are each within their limits could add up to any amount.
MEMORY = Limit(
    name="memory",
    most=4 << 30,
    unit="bytes",
    covers="of a server's memory, beyond which no new process or group is accepted",
    status=429,
)
LIMITS = tuple(value for value in list(globals().values()) if isinstance(value, Limit))


def is_large(ranks: int) -> bool:
    """Whether an attempt or a group has so many ranks that reading all of them takes long. It is
    then done in a thread, and less often.
    """
    return ranks >= LARGE_RANKS


class BodySizeLimit:
    """ASGI middleware that refuses request bodies larger than `BODY`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY.most:
                raise BODY.make_problem()
            return message

        await self._app(scope, receive_limited if scope["type"] == "http" else receive, send)
