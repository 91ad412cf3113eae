"""Recordings on request: profiles of where ranks spend their time, sampled by their node agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from hangwatch.protocol.commands import CommandKind
from hangwatch.protocol.live import RecordingReply
from hangwatch.tracking.attempt import Attempt

from ..core.clock import Clock, ulid
from ..ingest.command_queue import CommandQueue
from . import schema

START_TIMEOUT_S = 30.0  # for a node agent to begin: hosts of a large job report every 20 s
# Allowed for one rank in addition to the recorded time; a node records one rank after the other.
OVERHEAD_S = 25.0
NATIVE_OVERHEAD_S = 60.0
MAX_KEPT_RECORDINGS = 20
MAX_KEPT_BYTES = 64 << 20  # of profiles


@dataclass(slots=True, kw_only=True)
class RankRecording:
    rank: int
    agent: str = ""
    status: schema.RecordingStatus = "waiting"
    deadline: float = 0.0
    reply: RecordingReply | None = None
    error: str | None = None
    # Of the profile. Made on the first request, since that takes a while.
    document: schema.RecordedRank | None = None

    @property
    def is_active(self) -> bool:
        return self.status in ("waiting", "recording")

    @property
    def profile(self) -> str:
        """The packed profile; empty if there is none."""
        return "" if self.reply is None else self.reply.profile

    def fail(self, error: str) -> None:
        self.status = "failed"
        self.error = error


@dataclass(slots=True, kw_only=True)
class RecordingRecord:
    id: str
    job: str
    attempt: int
    request: schema.RecordingRequest
    created_at: datetime
    ranks: list[RankRecording] = field(default_factory=list)
    ranks_by_command: dict[str, RankRecording] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        return any(rank.is_active for rank in self.ranks)

    @property
    def profile_bytes(self) -> int:
        """0 without a profile."""
        return sum(len(rank.profile) for rank in self.ranks)


@dataclass(slots=True, kw_only=True)
class RecordingRegistry:
    """The last recordings. Times are the monotonic clock's."""

    clock: Clock
    command_queue: CommandQueue
    records: dict[str, RecordingRecord] = field(default_factory=dict)

    def find_conflict(self, attempt: Attempt, ranks: Sequence[int], now: float) -> str | None:
        """The id of an active recording on a host of these ranks: a host records one process at a
        time.
        """
        agents = {attempt.processes[rank].agent for rank in ranks}
        for record in self.records.values():
            self._expire_ranks(record, now)
            if any(rank.is_active and rank.agent in agents for rank in record.ranks):
                return record.id
        return None

    def request_recording(
        self, attempt: Attempt, request: schema.RecordingRequest, now: float
    ) -> RecordingRecord:
        """Requests a recording of ``request.ranks``, each of which must be in
        ``attempt.processes``.
        """
        record = RecordingRecord(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            request=request,
            created_at=self.clock.date(now),
        )
        ranks_per_agent: Counter[str] = Counter()
        for rank in dict.fromkeys(request.ranks):
            process = attempt.processes[rank]
            recorded = RankRecording(rank=rank, agent=process.agent)
            record.ranks.append(recorded)
            if process.exit is not None:
                recorded.fail(
                    f"the process of rank {rank} (pid {process.identity.pid} on {process.host}) has"
                    " exited"
                )
                continue
            ranks_per_agent[process.agent] += 1
            longest_s = ranks_per_agent[process.agent] * _compute_max_duration_s(request)
            recorded.deadline = now + START_TIMEOUT_S + longest_s
            command_id = self.command_queue.queue_command(
                process, CommandKind.RECORD, now, **request.options
            )
            record.ranks_by_command[command_id] = recorded
        self.records[record.id] = record
        self._drop_oldest()
        return record

    def stop_recording(self, record: RecordingRecord, attempt: Attempt, now: float) -> None:
        """Ends the ranks that are still recorded; what was sampled so far is kept."""
        for command_id, recorded in record.ranks_by_command.items():
            process = attempt.processes.get(recorded.rank)
            if not recorded.is_active or process is None:
                continue
            self.command_queue.queue_command(process, CommandKind.RECORD, now, ends=command_id)
            recorded.deadline = min(recorded.deadline, now + START_TIMEOUT_S)

    def apply_replies(self, replies: Sequence[RecordingReply], now: float) -> None:
        """Applies the replies of a heartbeat. A repeated reply is ignored."""
        for reply in replies:
            for record in self.records.values():
                recorded = record.ranks_by_command.get(reply.request)
                if recorded is not None and recorded.is_active:
                    _apply_reply(record, recorded, reply, now)
        if replies:
            self._drop_oldest()

    def find_recording(self, id: str, now: float) -> RecordingRecord | None:
        record = self.records.get(id)
        if record is not None:
            self._expire_ranks(record, now)
        return record

    def _expire_ranks(self, record: RecordingRecord, now: float) -> None:
        for rank in record.ranks:
            if rank.is_active and now > rank.deadline:
                action = "begin" if rank.status == "waiting" else "end"
                rank.fail(
                    f"its node agent did not {action} in time: check that the hangwatch agent runs"
                    " on its host"
                )

    def _drop_oldest(self) -> None:
        while len(self.records) > 1 and self._is_over_limit():
            del self.records[next(iter(self.records))]

    def _is_over_limit(self) -> bool:
        kept_bytes = sum(record.profile_bytes for record in self.records.values())
        return len(self.records) > MAX_KEPT_RECORDINGS or kept_bytes > MAX_KEPT_BYTES


def _compute_max_duration_s(request: schema.RecordingRequest) -> float:
    return request.seconds + (NATIVE_OVERHEAD_S if request.native else OVERHEAD_S)


def _apply_reply(
    record: RecordingRecord, recorded: RankRecording, reply: RecordingReply, now: float
) -> None:
    if reply.begun:
        recorded.status = "recording"
        recorded.deadline = now + _compute_max_duration_s(record.request)
        return
    recorded.reply = reply
    recorded.error = reply.error
    recorded.status = "failed" if reply.error else "done"
