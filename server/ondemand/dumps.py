"""Stacks on request: who was asked, and what each rank answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import StackSample

from ..core import schema
from ..core.clock import Clock, ulid
from ..incidents import evidence
from ..ingest.command_queue import Desk

PATIENCE = 30.0  # seconds for a node agent to answer: py-spy runs on two processes at a time
KEPT = 50


@dataclass(slots=True, kw_only=True)
class _Dump:
    id: str
    job: str
    attempt: int
    native: bool
    at: float
    created_at: datetime
    ranks: dict[int, schema.DumpedRank]
    requests: dict[str, int]  # request -> rank


@dataclass(slots=True, kw_only=True)
class Dumps:
    clock: Clock
    desk: Desk
    kept: dict[str, _Dump] = field(default_factory=dict)

    def ask(self, attempt: Attempt, ranks: Sequence[int], native: bool, now: float) -> schema.Dump:
        """Asks for the stacks of ``ranks``, each of which must be in ``attempt.ranks``."""
        dump = _Dump(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            native=native,
            at=now,
            created_at=self.clock.date(now),
            ranks={},
            requests={},
        )
        for rank in dict.fromkeys(ranks):
            process = attempt.processes[rank]
            if process.exit is not None:
                gone = (
                    f"the process of rank {rank} (pid {process.identity.pid} on {process.host}) has"
                    " ended: it has no stack"
                )
                dump.ranks[rank] = schema.DumpedRank(rank=rank, status="failed", error=gone)
            else:
                dump.ranks[rank] = schema.DumpedRank(rank=rank, status="pending")
                dump.requests[self.desk.stacks(process, native, now)] = rank
        self.kept[dump.id] = dump
        while len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]
        return _view(dump)

    def answer(self, samples: Sequence[heartbeat.StackReply], now: float) -> None:
        """Takes the answers out of a heartbeat."""
        for told in samples:
            for dump in self.kept.values():
                if (rank := dump.requests.get(told.request)) is not None:
                    dump.ranks[rank] = self._answer(rank, told, now)

    def get(self, id: str, now: float) -> schema.Dump | None:
        dump = self.kept.get(id)
        if dump is None:
            return None
        if now - dump.at > PATIENCE:
            late = (
                f"its node agent did not answer within {PATIENCE:.0f} s: see that hangwatch's agent"
                " runs on its host"
            )
            for rank, state in dump.ranks.items():
                if state.status == "pending":
                    dump.ranks[rank] = schema.DumpedRank(rank=rank, status="failed", error=late)
        return _view(dump)

    def _answer(self, rank: int, told: heartbeat.StackReply, now: float) -> schema.DumpedRank:
        sample = StackSample(
            request=told.request,
            source=told.source,
            taken_at=now - told.taken_s,
            native=told.native,
            threads=told.threads,
            error=told.error,
        )
        ordered = sorted(sample.threads, key=lambda t: t is not sample.main_thread)
        return schema.DumpedRank(
            rank=rank,
            status="done" if ordered else "failed",
            error=told.error or (None if ordered else "the dump holds no thread"),
            stacks=[evidence.stack([rank], sample, thread, self.clock.date) for thread in ordered],
        )


def _view(dump: _Dump) -> schema.Dump:
    pending = any(r.status == "pending" for r in dump.ranks.values())
    return schema.Dump(
        id=dump.id,
        job=dump.job,
        attempt=dump.attempt,
        native=dump.native,
        status="pending" if pending else "done",
        created_at=dump.created_at,
        ranks=list(dump.ranks.values()),
    )
