"""What users request of ranks: the request, and what each rank's node agent replies until when.

`server.ondemand.dumps` requests stacks, `recordings` profiles, and `traces` the calls as they are
made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, TypeVar

from hangwatch.protocol.commands import Command
from hangwatch.tracking.process import Process

from ..core.clock import Clock
from ..core.problems import Problem
from ..ingest.command_queue import CommandQueue


@dataclass(slots=True, kw_only=True)
class RankReply:
    """One rank's reply. It fails after ``deadline``, in seconds on the monotonic clock."""

    rank: int
    deadline: float
    status: str = "pending"  # until it is "done" or "failed"
    error: str | None = None
    command_id: str = ""  # the command that it has to answer; empty: none

    @property
    def is_active(self) -> bool:
        return self.status not in ("done", "failed")


Reply = TypeVar("Reply", bound=RankReply)


@dataclass(slots=True, kw_only=True, eq=False)
class RankRequest(Generic[Reply]):
    """A request of some ranks, and their replies."""

    ranks: list[Reply] = field(default_factory=list)

    @property
    def status(self) -> Literal["pending", "done"]:
        return "pending" if any(reply.is_active for reply in self.ranks) else "done"

    def expire_replies(self, now: float) -> None:
        for reply in self.ranks:
            if reply.is_active and now >= reply.deadline:
                self.fail_reply(reply, self.describe_timeout(reply))

    def fail_reply(self, reply: Reply, error: str) -> None:
        reply.status, reply.error = "failed", error

    def describe_timeout(self, reply: Reply) -> str:
        """Why a reply that did not arrive in time is missing, with the remedy."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True, eq=False)
class KeptRequest(RankRequest[Reply]):
    """A request that is kept, so that its replies can be read by its id."""

    id: str
    job: str
    attempt: int
    created_at: datetime


Request = TypeVar("Request", bound=KeptRequest[Any])


@dataclass(kw_only=True)
class RequestRegistry(Generic[Request]):
    """The last requests of one kind, by their ids. Times are the monotonic clock's."""

    NAME: ClassVar[str]  # what is requested
    MAX_KEPT: ClassVar[int]
    EXITED: ClassVar[str] = "has exited"

    clock: Clock
    command_queue: CommandQueue
    requests: dict[str, Request] = field(default_factory=dict)
    replies_by_command: dict[str, tuple[Request, Any]] = field(default_factory=dict)

    def add_rank(
        self, request: Request, reply: RankReply, process: Process, command: Command, now: float
    ) -> None:
        """Adds a rank to a request and sends the command to its node agent, unless it has exited."""
        request.ranks.append(reply)
        if process.exit is None:
            reply.command_id = command.id
            self.command_queue.queue_command(process.agent, command, now)
            self.replies_by_command[command.id] = request, reply
        else:
            pid, host = process.identity.pid, process.host
            error = f"the process of rank {reply.rank} (pid {pid} on {host}) {self.EXITED}"
            request.fail_reply(reply, error)

    def keep_request(self, request: Request) -> None:
        self.requests[request.id] = request
        self.drop_oldest()

    def is_full(self) -> bool:
        """Whether more is kept than allowed."""
        return len(self.requests) > self.MAX_KEPT

    def drop_oldest(self) -> None:
        """Drops the oldest requests, though never the last one."""
        while len(self.requests) > 1 and self.is_full():
            for reply in self.requests.pop(next(iter(self.requests))).ranks:
                self.replies_by_command.pop(reply.command_id, None)

    def find_request(self, id: str, now: float) -> Request | None:
        request = self.requests.get(id)
        if request is not None:
            request.expire_replies(now)
        return request

    def get_request(self, id: str, now: float) -> Request:
        """Raises Problem if the request is not kept."""
        request = self.find_request(id, now)
        if request is None:
            raise Problem(
                404,
                f"unknown {self.NAME} {id!r}: only recent {self.NAME}s are kept, and none after a"
                " restart; request it again",
            )
        return request
