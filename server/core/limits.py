"""Every limit of the server: on a client's requests and their time, and on what is kept in memory.

A request beyond a `Limit` gets a problem document with the limit's name, and `/metrics` counts it.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from hangwatch.model.bounds import MAX_RANKS

from .problems import Problem

MAX_MEMORY_BYTES = 4 << 30  # also where the machine has more
LARGE_RANKS = 4000  # reading so many ranks takes long

HEAD_S = 10.0  # the longest wait for the headers of a request
BODY_S = 30.0  # the longest wait for a whole request body
# Idle connections are kept longer than proxies keep theirs, and than the interval of heartbeats.
KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True)
class Limit:
    """``name`` is the label of ``hangwatch_limit_refusals``; ``covers`` completes "at most N UNIT"."""

    name: str
    maximum: int
    unit: str
    covers: str
    status: int = 413

    @property
    def text(self) -> str:
        """The limit for people: "at most 16 MiB of a request's body"."""
        for shift, unit in ((20, "MiB"), (10, "KiB")):
            if self.unit == "bytes" and self.maximum >= 1 << shift:
                return f"at most {self.maximum >> shift} {unit} {self.covers}"
        return f"at most {self.maximum} {self.unit} {self.covers}"

    def make_problem(self, subject: str = "", remedy: str = "") -> Problem:
        """The answer to a request that exceeds it."""
        detail = f"{subject}: {self.text}" if subject else self.text
        return Problem(
            self.status,
            detail + (f"; {remedy}" if remedy else ""),
            headers={"Retry-After": "60"} if self.status == 429 else None,
            limit=self.name,
            maximum=self.maximum,
        )

    def check(self, count: int, subject: str = "", remedy: str = "") -> None:
        """Raises Problem if there are more. ``{}`` in ``subject`` stands for ``count``."""
        if count > self.maximum:
            raise self.make_problem(subject.replace("{}", str(count)), remedy)

    def check_share(self, count: int, total: int, family: str, remedy: str = "") -> None:
        """Raises Problem if all have more together, or if a job with those that its ranks start
        (`get_family`), which has ``count`` of the ``total``, has more than half of what the others
        leave. So no job can take everything from those that come later.
        """
        self.check(total, remedy=remedy)
        share = max(1, (self.maximum - (total - count)) // 2)
        if count > share:
            raise self.make_problem(
                f"job {family!r} may have {share}, half of what other jobs leave", remedy
            )


HEAD = Limit(
    "request_head", 16 << 10, "bytes", "of a request's URL, headers and trailers together", 431
)
PIPELINED = Limit(
    "pipelined_requests", 64, "requests", "sent on a connection before the first is answered", 429
)
UNAUTHENTICATED = Limit(
    "unauthenticated_connections",
    256,
    "connections",
    "of one address, or of one other user of this machine, on which no request was accepted yet",
    429,
)
BODY = Limit("request_body", 16 << 20, "bytes", "of a request's body, as sent")
# Eight heartbeats of the largest size of one job; a host with eight busy ranks sends a hundredth of one.
BODIES = Limit(
    "request_bodies", 256 << 20, "bytes", "of heartbeats that arrive or wait for their turn", 503
)
POLL = Limit("poll_body", 4096, "bytes", "of the body of a request for commands")
LOGIN_FORM = Limit("login_form", 4096, "bytes", "of a login form")
UNPACKED_BODY = Limit("unpacked_body", 64 << 20, "bytes", "of a body, decompressed")
# A request with more is refused before it is parsed. Large hosts send up to a million values.
VALUES = Limit("values", 1 << 21, "values", "in the JSON of a heartbeat")
OBJECTS = Limit("objects", 1 << 18, "objects", "in the JSON of a heartbeat")
RANK = Limit("rank", MAX_RANKS, "ranks", "of a process group", 422)
LIST = Limit("list", 1 << 15, "items", "of a list in a heartbeat", 422)
HEARTBEAT_MEMBERS = Limit(
    "heartbeat_members",
    1 << 21,
    "members",
    "of all different process groups of a heartbeat together",
)
ATTEMPT_MEMBERS = Limit(
    "attempt_members",
    1 << 22,
    "members",
    "of the world and all process groups of a job's attempt together",
)
STREAMS = Limit("streams", 16384, "process groups and channels", "of a process")
JOBS_PER_AGENT = Limit("jobs_per_agent", 64, "jobs", "reported by one node agent", 429)
# The limits on what is kept in memory include finished attempts. A job may take half of what other
# jobs leave of each: 100,000 ranks on 12,500 hosts that are restarted need 200,000 processes for a
# moment. See `Limit.check_share`.
AGENTS = Limit("agents", 1 << 16, "node agents", "that report to a server", 429)
WAITING_AGENTS = Limit("waiting_agents", 1024, "node agents", "that wait for commands", 429)
PEER_CONNECTIONS = Limit(
    "peer_connections",
    AGENTS.maximum + WAITING_AGENTS.maximum,
    "connections",
    "of one address, or of one other user of this machine; half of the server's open files, if these"
    " are fewer",
    429,
)
PROCESSES = Limit("processes", 1 << 19, "processes", "in a server's memory", 429)
ATTEMPTS = Limit("attempts", 2000, "attempts of jobs", "in a server's memory", 429)
ATTEMPTS_PER_JOB = Limit("attempts_per_job", 256, "attempts", "of a job in a server's memory", 429)
MEMBERS = Limit(
    "members", 1 << 23, "members", "of all worlds and process groups in a server's memory", 429
)
QUEUED_ALERTS = Limit("queued_alerts", 500, "alerts", "that wait for one alert channel", 429)
# Half of them may be warnings, so that no number of warnings hides an alert.
OPEN_INCIDENTS = Limit(
    "open_incidents", 256, "open incidents", "of a job with those that its ranks start", 429
)
# The last resort: texts and lists that are each within their limits could add up to any amount.
# `build_app` replaces it by the limit of this server.
MEMORY = Limit(
    "memory",
    MAX_MEMORY_BYTES,
    "bytes",
    "of a server's memory (less by `--memory-mb`), beyond which no new process or group is accepted",
    429,
)
LIMITS = tuple(value for value in list(globals().values()) if isinstance(value, Limit))


def is_large(ranks: int) -> bool:
    """Whether an attempt or a group has so many ranks that a thread reads them, less often."""
    return ranks >= LARGE_RANKS


def read_resident_bytes() -> int:
    """The resident memory of this process; 0 where /proc does not show it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
