"""Stacks on request: the ranks whose stacks users requested, and the replies of their node agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from hangwatch.model.incidents import MergedStack
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import StackSample

from ..core.clock import ulid
from ..core.schema import ApiModel, AsDocument
from ..incidents import evidence
from .requests import KeptRequest, RankReply, RequestRegistry

REPLY_TIMEOUT_S = 30.0  # a node agent runs py-spy on two processes at a time


@dataclass(slots=True, kw_only=True)
class RankDump(RankReply):
    stacks: tuple[MergedStack, ...] = ()  # the calling thread's is the first


@dataclass(slots=True, kw_only=True, eq=False)
class RequestedDump(KeptRequest[RankDump]):
    """The stacks of some ranks, as far as they have arrived."""

    native: bool

    def describe_timeout(self, reply: RankDump) -> str:
        return (
            f"its node agent did not reply within {REPLY_TIMEOUT_S:.0f} s: check that the"
            " hangwatch agent runs on its host"
        )


class DumpRegistry(RequestRegistry[RequestedDump]):
    NAME = "dump"
    MAX_KEPT = 50
    EXITED = "has exited: it has no stack"

    def request_dump(
        self, attempt: Attempt, ranks: Sequence[int], native: bool, now: float
    ) -> RequestedDump:
        """Requests the stacks of ``ranks``, each of which must be in ``attempt.processes``."""
        dump = RequestedDump(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            created_at=self.clock.date(now),
            native=native,
        )
        for rank in dict.fromkeys(ranks):
            process = attempt.processes[rank]
            reply = RankDump(rank=rank, deadline=now + REPLY_TIMEOUT_S)
            command = Command(
                id=ulid(self.clock.wall()),
                kind=CommandKind.STACKS,
                key=process.key,
                native=native,
            )
            self.add_rank(dump, reply, process, command, now)
        self.keep_request(dump)
        return dump

    def apply_samples(self, samples: Sequence[heartbeat.StackReply], now: float) -> None:
        """Applies the replies of a heartbeat."""
        for reply in samples:
            if reply.request not in self.replies_by_command:
                continue
            _, dumped = self.replies_by_command[reply.request]
            sample = StackSample.from_reply(reply, now)
            caller = sample.calling_thread
            threads = sorted(sample.threads, key=lambda thread: thread is not caller)
            dumped.status = "done" if threads else "failed"
            dumped.error = sample.error or (None if threads else "the dump holds no thread")
            dumped.stacks = tuple(
                evidence.make_stack([dumped.rank], sample, thread, self.clock.date)
                for thread in threads
            )


class DumpRequest(ApiModel):
    """``job`` may be omitted if only one is known."""

    model_config = ConfigDict(strict=True)

    job: str | None = None
    ranks: list[int] = Field(min_length=1, max_length=65536)
    native: bool = False


class DumpedRank(ApiModel):
    rank: int
    status: Literal["pending", "done", "failed"]
    error: str | None = None
    stacks: list[Annotated[MergedStack, AsDocument()]] = Field(default=[])


class Dump(ApiModel):
    id: str
    job: str
    attempt: int
    native: bool
    status: Literal["pending", "done"]
    created_at: AwareDatetime
    ranks: list[DumpedRank]
