"""Stacks on request: the ranks whose stacks users requested, and the replies of their node agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from hangwatch.model.incidents import MergedStack
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import StackSample

from ..core.schema import ApiModel, AsDocument
from ..incidents import evidence
from .requests import RankReply, RankRequest, RequestRegistry

REPLY_TIMEOUT_S = 30.0  # a node agent runs py-spy on two processes at a time
_TIMEOUT_ERROR = (
    f"its node agent did not reply within {REPLY_TIMEOUT_S:.0f} s: check that the hangwatch agent"
    " runs on its host"
)


@dataclass(slots=True, kw_only=True)
class RankDump(RankReply):
    stacks: tuple[MergedStack, ...] = ()  # the calling thread's is the first


@dataclass(slots=True, kw_only=True, eq=False)
class RequestedDump(RankRequest[RankDump]):
    """The stacks of some ranks, as far as they have arrived."""

    native: bool


class DumpRegistry(RequestRegistry[RequestedDump]):
    NAME = "dump"
    KIND = CommandKind.STACKS
    MAX_KEPT = 50
    EXITED = "has exited: it has no stack"

    def request_dump(
        self, attempt: Attempt, ranks: Sequence[int], native: bool, now: float
    ) -> RequestedDump:
        """Requests the stacks of ``ranks``, each of which must be in ``attempt.processes``."""
        dump = RequestedDump(**self.identify_request(attempt, now), native=native)
        for rank in dict.fromkeys(ranks):
            deadline = now + REPLY_TIMEOUT_S
            reply = RankDump(rank=rank, deadline=deadline, timeout_error=_TIMEOUT_ERROR)
            self.add_rank(dump, reply, attempt.processes[rank], now, native=native)
        self.keep_request(dump)
        return dump

    def apply_samples(self, samples: Sequence[heartbeat.StackReply], now: float) -> None:
        """Applies the replies of a heartbeat."""
        for _, dumped, reply in self.match_replies(samples):
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
