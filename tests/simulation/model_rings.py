"""The rings of a modelled job's ranks, and what a node agent reads from them.

Updates are composed by the real `hangwatch.agent.node.reporting.updates`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.agent.node.reporting import updates
from hangwatch.agent.node.reporting.acked import AckedState, UnackedHistory
from hangwatch.model.calls import Call
from hangwatch.protocol import heartbeat
from hangwatch.ring.snapshot import RingDelta, RingSnapshot, StreamState

from .model_job import ModelJob
from .model_programs import ModelStream
from .model_ranks import ModelRank


@dataclass(slots=True)
class ModelAgent:
    """One host's node agent."""

    host: str
    id: str
    send_at: float  # of the next heartbeat
    number: int = 0
    full: bool = True
    reply_deadline: float = 0.0
    terse_until: float = 0.0
    in_flight: tuple[int, dict[str, AckedState | None]] | None = None
    acked: dict[str, AckedState | None] = field(default_factory=dict)
    history: dict[str, UnackedHistory] = field(default_factory=dict)
    cursor: dict[tuple[str, ModelStream], int] = field(default_factory=dict)
    samples: list[tuple[heartbeat.StackReply, float]] = field(default_factory=list)
    calls: list[heartbeat.CallsReply] = field(default_factory=list)
    seen_commands: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ModelRings:
    job: ModelJob
    run: str  # distinguishes the processes of several runs
    ring_calls: int | None = None  # of a stream that a ring has room for
    _uids: dict[tuple[int, ModelStream], int] = field(default_factory=dict)

    def get_process_key(self, rank: ModelRank) -> str:
        return f"{rank.number + 1}-{self.run}"

    def find_rank(self, process_key: str) -> ModelRank | None:
        for rank in self.job.ranks.values():
            if self.get_process_key(rank) == process_key:
                return rank
        return None

    def list_calls(
        self, rank: ModelRank, uid: int, first_seq: int = 1, are_logged: bool = False
    ) -> list[Call]:
        """The calls of one stream from ``first_seq`` on. Raises StopIteration for an unknown uid."""
        stream = next(s for s in rank.calls if self._get_stream_uid(rank, s) == uid)
        if self.ring_calls is not None and not are_logged:
            first_seq = max(first_seq, len(rank.calls[stream]) - self.ring_calls + 1)
        return self.job.list_recorded_calls(rank.number, stream, first_seq)

    def compose_update(
        self, agent: ModelAgent, rank: ModelRank
    ) -> tuple[heartbeat.ProcessUpdate | None, AckedState | None]:
        """What the agent has to report of the rank, and what the server knows once it has it."""
        key = self.get_process_key(rank)
        history = agent.history.setdefault(key, UnackedHistory())
        history.add_delta(self._read_delta(agent, rank))
        tails: dict[int, list[Call]] = {}
        if rank.exit is not None:
            for stream in rank.calls:
                uid = self._get_stream_uid(rank, stream)
                tails[uid] = self.job.list_recorded_calls(rank.number, stream)[-64:]

        def fetch_calls(uid: int, first: int, most: int) -> list[Call]:
            return self.list_calls(rank, uid, first)[:most]

        view = self._make_view(rank)
        now_ns = int(self.job.now * 1e9)
        return updates.compose_update(
            view, agent.acked.get(key), history, now_ns, fetch_calls, tails
        )

    def make_snapshot(self, rank: ModelRank) -> RingSnapshot:
        now = self.job.now
        phase = rank.work.phase if rank.work is not None else None
        exception = None
        if rank.exception is not None:
            at_ns = int(rank.exception_at * 1e9)
            exception = {"type": rank.exception.type, "message": "", "at_ns": at_ns}
        return RingSnapshot(
            pid=rank.number + 1,
            start_ticks=int(self.run),
            identity={},
            lifecycle=int(rank.lifecycle),
            step=None,
            pulse_s=now - self._get_last_pulse(rank) + 0.01,
            phase=phase,
            phase_s=now - rank.blocked_since if phase else 0.0,
            phase_limit_s=rank.work.limit if rank.work is not None else None,
            record_count=1,
            dropped=0,
            errors=0,
            is_disabled=False,
            streams=tuple(self._make_stream_state(rank, stream) for stream in rank.calls),
            exception=exception,
        )

    def _get_stream_uid(self, rank: ModelRank, stream: ModelStream) -> int:
        return self._uids.setdefault((rank.number, stream), len(self._uids) + 1)

    def _read_delta(self, agent: ModelAgent, rank: ModelRank) -> RingDelta:
        key = self.get_process_key(rank)
        chains: dict[int, dict[int, int]] = {}
        ops: dict[int, str] = {}
        for stream, calls in rank.calls.items():
            first = agent.cursor.get((key, stream), 0)
            if self.ring_calls is not None:
                first = max(first, len(calls) - self.ring_calls)
            if len(calls) > first:
                uid = self._get_stream_uid(rank, stream)
                chains[uid] = {seq: c.chain for seq, c in enumerate(calls[first:], first + 1)}
                ops[uid] = calls[-1].signature.op
                agent.cursor[key, stream] = len(calls)
        return RingDelta(next_index=0, chains=chains, newest_ops=ops, first_concurrent={})

    def _make_view(self, rank: ModelRank) -> updates.ProcessView:
        now = self.job.now
        state = "S"
        if rank.stopped_at is not None:
            state = "T"
        elif rank.work is not None and rank.work.busy:
            state = "R"
        return updates.ProcessView(
            key=self.get_process_key(rank),
            identity=heartbeat.ProcessIdentity(
                job="job",
                rank=rank.number,
                world_size=len(self.job.ranks),
                pid=rank.number + 1,
                start_ticks=int(self.run),
                started_s=now,
            ),
            snapshot=self.make_snapshot(rank),
            state=state,
            idle_s=now - rank.ran_at,
            exit=rank.exit,
            exit_age_s=now - rank.exited_at if rank.exit else 0.0,
        )

    def _get_last_pulse(self, rank: ModelRank) -> float:
        if rank.stopped_at is not None:
            return rank.stopped_at
        return rank.exited_at if rank.exit is not None else self.job.now

    def _make_stream_state(self, rank: ModelRank, stream: ModelStream) -> StreamState:
        now, calls = self.job.now, rank.calls[stream]
        newest = calls[-1]
        completed = len(calls)
        if not newest.done:
            completed = next(n for n, call in enumerate(calls) if not call.done)
        pending_s = now - calls[completed].entered_at if completed < len(calls) else None
        return StreamState(
            uid=self._get_stream_uid(rank, stream),
            kind=stream.kind,
            group=stream.group,
            peer=stream.peer,
            tag=stream.tag,
            entered=len(calls),
            completed=completed,
            chain=newest.chain,
            entered_s=now - newest.entered_at,
            pending_s=pending_s,
        )
