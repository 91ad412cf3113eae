"""What users request of ranks: the request, and what each rank's node agent replies until when.

`server.ondemand.dumps` requests stacks, `recordings` profiles, and `traces` the calls as they are
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, TypeVar

from hangwatch.protocol.commands import CommandKind
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.clock import Clock, ulid
from ..core.problems import Problem
from ..ingest.command_queue import CommandQueue


@dataclass(slots=True, kw_only=True)
class RankReply:
    """One rank's reply. It fails with the error ``timeout_error`` after ``deadline``, in seconds on
    the monotonic clock.
    """

    rank: int
    deadline: float
    timeout_error: str  # with the remedy
    status: str = "pending"  # until it is "done" or "failed"
    error: str | None = None
    command_id: str = ""  # the command that it has to answer; empty: none
    agent: str = ""  # the node agent that has the command

    @property
    def is_active(self) -> bool:
        return self.status not in ("done", "failed")


Reply = TypeVar("Reply", bound=RankReply)


@dataclass(slots=True, kw_only=True, eq=False)
class RankRequest(Generic[Reply]):
    """A request of some ranks of a job, and their replies."""

    id: str
    job: str
    attempt: int
    created_at: datetime
    ranks: list[Reply] = field(default_factory=list)

    @property
    def status(self) -> Literal["pending", "done"]:
        return "pending" if any(reply.is_active for reply in self.ranks) else "done"

    def expire_replies(self, now: float) -> None:
        for reply in self.ranks:
            if reply.is_active and now >= reply.deadline:
                self.fail_reply(reply, reply.timeout_error)

    def fail_reply(self, reply: Reply, error: str) -> None:
        reply.status = "failed"
        reply.error = error


Request = TypeVar("Request", bound=RankRequest[Any])


@dataclass(kw_only=True)
class RequestRegistry(Generic[Request]):
    """The last requests of one kind, by their ids. Times are the monotonic clock's."""

    NAME: ClassVar[str]  # what is requested
    KIND: ClassVar[CommandKind]
    MAX_KEPT: ClassVar[int]
    EXITED: ClassVar[str] = "has exited"

    clock: Clock
    command_queue: CommandQueue
    requests: dict[str, Request] = field(default_factory=dict)
    replies_by_command: dict[str, tuple[Request, Any]] = field(default_factory=dict)

    def identify_request(self, attempt: Attempt, now: float) -> dict[str, Any]:
        """The fields of a new request that do not depend on its kind."""
        return {
            "id": ulid(self.clock.wall()),
            "job": attempt.job,
            "attempt": attempt.number,
            "created_at": self.clock.date(now),
        }

    def add_rank(
        self, request: Request, reply: RankReply, process: Process, now: float, **fields: Any
    ) -> None:
        """Adds a rank to a request and sends it a command, unless it has exited."""
        request.ranks.append(reply)
        if process.exit is None:
            self.send_command(request, reply, process, now, **fields)
        else:
            pid = process.identity.pid
            host = process.host
            error = f"the process of rank {reply.rank} (pid {pid} on {host}) {self.EXITED}"
            request.fail_reply(reply, error)

    def send_command(
        self, request: Request, reply: RankReply, process: Process, now: float, **fields: Any
    ) -> None:
        """Sends a command with these fields to a rank's node agent, in place of the last one."""
        self.withdraw_command(reply)
        reply.agent = process.agent
        reply.command_id = self.command_queue.queue_command(process, self.KIND, now, **fields)
        self.replies_by_command[reply.command_id] = request, reply

    def withdraw_command(self, reply: RankReply) -> None:
        """Forgets the command of a rank, and does not send it if that has not happened yet."""
        self.replies_by_command.pop(reply.command_id, None)
        self.command_queue.withdraw_command(reply.agent, reply.command_id)
        reply.command_id = ""

    def match_replies(self, replies: Iterable[Any]) -> Iterator[tuple[Request, Any, Any]]:
        """Those of a heartbeat's replies that answer a command: the request, the rank's reply as it is
        known so far, and the heartbeat's.
        """
        for reply in replies:
            if reply.request in self.replies_by_command:
                request, known = self.replies_by_command[reply.request]
                yield request, known, reply

    def keep_request(self, request: Request) -> None:
        self.requests[request.id] = request
        self.drop_oldest()

    def is_full(self) -> bool:
        """Whether more is kept than allowed."""
        return len(self.requests) > self.MAX_KEPT

    def drop_oldest(self) -> None:
        """Drops the oldest requests, though never the last one."""
        while len(self.requests) > 1 and self.is_full():
            self.drop_request(next(iter(self.requests)))

    def drop_request(self, id: str) -> None:
        for reply in self.requests.pop(id).ranks:
            self.withdraw_command(reply)

    def find_request(self, id: str, now: float) -> Request | None:
        request = self.requests.get(id)
        if request is not None:
            request.expire_replies(now)
        return request

    def get_request(self, id: str) -> Request:
        """The request as it is now. Raises Problem if it is not kept."""
        request = self.find_request(id, self.clock.monotonic())
        if request is None:
            raise Problem(
                404,
                f"unknown {self.NAME} {id!r}: only recent {self.NAME}s are kept, and none after a"
                " restart; request it again",
            )
        return request
