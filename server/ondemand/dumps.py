"""Stacks on request: which ranks, and what their node agents replied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from hangwatch.model.incidents import MergedStack
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.report.documents import build_stack_document, format_time
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import StackSample

from ..core.clock import Clock, ulid
from ..incidents import evidence
from ..ingest.command_queue import CommandQueue

REPLY_TIMEOUT_S = 30.0  # for a node agent: it runs py-spy on two processes at a time
MAX_KEPT_DUMPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRank:
    rank: int
    status: Literal["pending", "done", "failed"]
    error: str | None = None
    stacks: tuple[MergedStack, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The stacks of some ranks, as far as they have arrived."""

    id: str
    job: str
    attempt: int
    native: bool
    status: Literal["pending", "done"]
    created_at: datetime
    ranks: tuple[DumpedRank, ...]


@dataclass(slots=True, kw_only=True)
class _DumpRecord:
    id: str
    job: str
    attempt: int
    native: bool
    requested_at: float
    created_at: datetime
    ranks: dict[int, DumpedRank]
    rank_of_command: dict[str, int]


@dataclass(slots=True, kw_only=True)
class DumpRegistry:
    clock: Clock
    command_queue: CommandQueue
    records: dict[str, _DumpRecord] = field(default_factory=dict)

    def request_dump(
        self, attempt: Attempt, ranks: Sequence[int], native: bool, now: float
    ) -> Dump:
        """Requests the stacks of ``ranks``, each of which must be in ``attempt.processes``."""
        dump = _DumpRecord(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            native=native,
            requested_at=now,
            created_at=self.clock.date(now),
            ranks={},
            rank_of_command={},
        )
        for rank in dict.fromkeys(ranks):
            process = attempt.processes[rank]
            if process.exit is not None:
                exit_detail = (
                    f"the process of rank {rank} (pid {process.identity.pid} on {process.host}) has"
                    " exited: it has no stack"
                )
                dump.ranks[rank] = DumpedRank(rank=rank, status="failed", error=exit_detail)
            else:
                dump.ranks[rank] = DumpedRank(rank=rank, status="pending")
                command_id = self.command_queue.queue_command(
                    process, CommandKind.STACKS, now, native=native
                )
                dump.rank_of_command[command_id] = rank
        self.records[dump.id] = dump
        while len(self.records) > MAX_KEPT_DUMPS:
            del self.records[next(iter(self.records))]
        return _describe_dump(dump)

    def apply_samples(self, samples: Sequence[heartbeat.StackReply], now: float) -> None:
        """Applies the replies of a heartbeat."""
        for reply in samples:
            for dump in self.records.values():
                rank = dump.rank_of_command.get(reply.request)
                if rank is not None:
                    dump.ranks[rank] = self._build_dumped_rank(rank, reply, now)

    def find_dump(self, id: str, now: float) -> Dump | None:
        dump = self.records.get(id)
        if dump is None:
            return None
        if now - dump.requested_at > REPLY_TIMEOUT_S:
            timeout_detail = (
                f"its node agent did not reply within {REPLY_TIMEOUT_S:.0f} s: check that the hangwatch"
                " agent runs on its host"
            )
            for rank, state in dump.ranks.items():
                if state.status == "pending":
                    dump.ranks[rank] = DumpedRank(rank=rank, status="failed", error=timeout_detail)
        return _describe_dump(dump)

    def _build_dumped_rank(self, rank: int, reply: heartbeat.StackReply, now: float) -> DumpedRank:
        sample = StackSample.from_reply(reply, now)
        caller = sample.calling_thread
        caller_first = sorted(sample.threads, key=lambda t: t is not caller)
        error = reply.error
        if error is None and not caller_first:
            error = "the dump holds no thread"
        return DumpedRank(
            rank=rank,
            status="done" if caller_first else "failed",
            error=error,
            stacks=tuple(
                evidence.make_stack([rank], sample, thread, self.clock.date)
                for thread in caller_first
            ),
        )


def _describe_dump(dump: _DumpRecord) -> Dump:
    pending = any(r.status == "pending" for r in dump.ranks.values())
    return Dump(
        id=dump.id,
        job=dump.job,
        attempt=dump.attempt,
        native=dump.native,
        status="pending" if pending else "done",
        created_at=dump.created_at,
        ranks=tuple(dump.ranks.values()),
    )


def build_dump_document(dump: Dump) -> dict[str, Any]:
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
                "stacks": [build_stack_document(stack) for stack in rank.stacks],
            }
            for rank in dump.ranks
        ],
    }
