"""Stacks on request: the ranks whose stacks users requested, and the replies of their node agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from hangwatch.model.incidents import MergedStack
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.report.documents import build_document, format_time
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import StackSample

from ..core.clock import Clock, ulid
from ..incidents import evidence
from ..ingest.command_queue import CommandQueue

REPLY_TIMEOUT_S = 30.0  # a node agent runs py-spy on two processes at a time
MAX_KEPT_DUMPS = 50


@dataclass(slots=True, kw_only=True)
class RankDump:
    rank: int
    status: Literal["pending", "done", "failed"] = "pending"
    error: str | None = None
    stacks: tuple[MergedStack, ...] = ()


@dataclass(slots=True, kw_only=True)
class DumpRecord:
    """The stacks of some ranks, as far as they have arrived."""

    id: str
    job: str
    attempt: int
    native: bool
    requested_at: float  # monotonic
    created_at: datetime
    ranks: list[RankDump] = field(default_factory=list)
    ranks_by_command: dict[str, RankDump] = field(default_factory=dict)

    @property
    def status(self) -> Literal["pending", "done"]:
        return "pending" if any(rank.status == "pending" for rank in self.ranks) else "done"


@dataclass(slots=True, kw_only=True)
class DumpRegistry:
    clock: Clock
    command_queue: CommandQueue
    records: dict[str, DumpRecord] = field(default_factory=dict)

    def request_dump(
        self, attempt: Attempt, ranks: Sequence[int], native: bool, now: float
    ) -> DumpRecord:
        """Requests the stacks of ``ranks``, each of which must be in ``attempt.processes``."""
        dump = DumpRecord(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            native=native,
            requested_at=now,
            created_at=self.clock.date(now),
        )
        for rank in dict.fromkeys(ranks):
            process, dumped = attempt.processes[rank], RankDump(rank=rank)
            dump.ranks.append(dumped)
            if process.exit is None:
                command_id = self.command_queue.queue_command(
                    process, CommandKind.STACKS, now, native=native
                )
                dump.ranks_by_command[command_id] = dumped
            else:
                dumped.status = "failed"
                dumped.error = (
                    f"the process of rank {rank} (pid {process.identity.pid} on {process.host}) has"
                    " exited: it has no stack"
                )
        self.records[dump.id] = dump
        while len(self.records) > MAX_KEPT_DUMPS:
            del self.records[next(iter(self.records))]
        return dump

    def apply_samples(self, samples: Sequence[heartbeat.StackReply], now: float) -> None:
        """Applies the replies of a heartbeat."""
        for reply in samples:
            for dump in self.records.values():
                dumped = dump.ranks_by_command.get(reply.request)
                if dumped is not None:
                    self._apply_reply(dumped, reply, now)

    def find_dump(self, id: str, now: float) -> DumpRecord | None:
        dump = self.records.get(id)
        if dump is None:
            return None
        if now - dump.requested_at > REPLY_TIMEOUT_S:
            for dumped in dump.ranks:
                if dumped.status == "pending":
                    dumped.status = "failed"
                    dumped.error = (
                        f"its node agent did not reply within {REPLY_TIMEOUT_S:.0f} s: check that the"
                        " hangwatch agent runs on its host"
                    )
        return dump

    def _apply_reply(self, dumped: RankDump, reply: heartbeat.StackReply, now: float) -> None:
        sample = StackSample.from_reply(reply, now)
        caller = sample.calling_thread
        caller_first = sorted(sample.threads, key=lambda t: t is not caller)
        dumped.status = "done" if caller_first else "failed"
        dumped.error = reply.error
        if dumped.error is None and not caller_first:
            dumped.error = "the dump holds no thread"
        dumped.stacks = tuple(
            evidence.make_stack([dumped.rank], sample, thread, self.clock.date)
            for thread in caller_first
        )


def build_dump_document(dump: DumpRecord) -> dict[str, Any]:
    """The JSON document of a dump."""
    return {
        "id": dump.id,
        "job": dump.job,
        "attempt": dump.attempt,
        "native": dump.native,
        "status": dump.status,
        "created_at": format_time(dump.created_at),
        "ranks": [
            {
                "rank": rank.rank,
                "status": rank.status,
                "error": rank.error,
                "stacks": [build_document(stack) for stack in rank.stacks],
            }
            for rank in dump.ranks
        ],
    }
