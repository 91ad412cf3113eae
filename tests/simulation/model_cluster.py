"""The node agents of a `model_job`, an unreliable network, and a server that receives heartbeats.

The real `hangwatch.agent.node.reporting.updates` composes the heartbeats, and the real
`hangwatch.tracking.fleet.Fleet` applies them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from hangwatch.agent.node.reporting import updates
from hangwatch.agent.node.reporting.acked import AckedState, UnackedHistory
from hangwatch.diagnosis import Diagnosis, EvidenceRequest, diagnose, is_quiet
from hangwatch.model.calls import Call
from hangwatch.model.limits import Limits
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.ring.reader import RingDelta, RingSnapshot, StreamState
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from .model_job import STEP_S, ModelJob, ModelRank, ModelStream
from .rings import encode_exception, make_snapshot

_KNOWN_AFTER_S = 8.0  # heartbeats may be 7 s late, and the clocks be compared by such a one
INTERVAL_S, EAGER_INTERVAL_S, REPLY_TIMEOUT_S = 0.5, 0.2, 5.0


@dataclass(slots=True)
class ModelAgent:
    """One host's node agent."""

    host: str
    id: str
    send_at: float  # the time of the next heartbeat
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
    """The rings of the job's ranks, and what a node agent reads in them."""

    job: ModelJob
    run: str  # distinguishes the processes of several runs
    ring_calls: int | None = None  # the calls of a stream that a ring has room for
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

        process, snapshot = self._make_update(rank), self.make_snapshot(rank)
        now_ns = int(self.job.now * 1e9)
        return updates.compose_update(
            process, snapshot, agent.acked.get(key), history, now_ns, fetch_calls, tails
        )

    def make_snapshot(self, rank: ModelRank) -> RingSnapshot:
        now = self.job.now
        phase = rank.work.phase if rank.work is not None else None
        exception = None
        if rank.exception is not None:
            exception = encode_exception(rank.exception, rank.exception_at)
        return make_snapshot(
            *(self._make_stream_state(rank, stream) for stream in rank.calls),
            lifecycle=int(rank.lifecycle),
            pulse_s=now - self._get_last_pulse(rank) + 0.01,
            phase=phase,
            phase_s=now - rank.blocked_since if phase else 0.0,
            phase_limit_s=rank.work.limit if rank.work is not None else None,
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

    def _make_update(self, rank: ModelRank) -> heartbeat.ProcessUpdate:
        now = self.job.now
        state = "S"
        if rank.stopped_at is not None:
            state = "T"
        elif rank.work is not None and rank.work.busy:
            state = "R"
        return heartbeat.ProcessUpdate(
            key=self.get_process_key(rank),
            identity=heartbeat.ProcessIdentity(
                job="job",
                rank=rank.number,
                world_size=len(self.job.ranks),
                pid=rank.number + 1,
                start_ticks=int(self.run),
                started_s=now,
            ),
            state=state,
            idle_s=now - rank.ran_at,
            ended=rank.exit,
            ended_s=now - rank.exited_at if rank.exit else 0.0,
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


@dataclass(frozen=True, slots=True)
class HeartbeatDelivery:
    """How one heartbeat is delivered: after ``delay`` seconds, ``copies`` times (0: it is lost), with
    or without the reply. With a delay beyond the agent's timeout it arrives after later ones.
    """

    delay: float = 0.02
    copies: int = 1
    reply_arrives: bool = True


@dataclass(slots=True)
class ModelCluster:
    """``deliveries`` are by host and heartbeat number; at the times of ``restarts`` the server loses
    its memory.
    """

    job: ModelJob
    limits: Limits
    deliveries: Mapping[tuple[str, int], HeartbeatDelivery] = field(default_factory=dict)
    restarts: tuple[float, ...] = ()
    run: str = "1"  # distinguishes the processes of several runs
    silent_hosts: tuple[str, ...] = ()  # the agents of these send nothing from now on
    # A host without requests may omit the positions of ranks that make progress for so long.
    details_s: float | None = None
    # Calls of a stream that a ring has room for; whether the agents keep those that they have read.
    ring_calls: int | None = None
    logs_calls: bool = True
    fleet: Fleet = field(default_factory=Fleet)
    known_agents: set[str] = field(default_factory=set)
    agents: dict[str, ModelAgent] = field(default_factory=dict)
    requested: dict[tuple[int, int], tuple[Command, str, float, bool]] = field(default_factory=dict)
    clock_offset: float = 0.0  # between the job's clock and the server's
    _rings: ModelRings = field(init=False)
    _network: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._rings = ModelRings(self.job, self.run, self.ring_calls)
        for n, host in enumerate(sorted(set(self.job.hosts.values()))):
            self.agents[host] = ModelAgent(host, f"{self.run}-{host}", send_at=0.13 * n)

    @property
    def now(self) -> float:
        return self.job.now + self.clock_offset

    def run_step(self) -> bool:
        """Runs a tenth of a second. Returns True if anything was delivered."""
        self.job.run_step()
        for at in self.restarts:
            if at <= self.job.now < at + STEP_S:
                self.fleet, self.known_agents, self.requested = Fleet(), set(), {}
        for agent in self.agents.values():
            if agent.in_flight is not None and self.job.now >= agent.reply_deadline:
                agent.in_flight, agent.send_at = None, self.job.now + 0.3
            if (
                agent.in_flight is None
                and self.job.now >= agent.send_at
                and agent.host not in self.silent_hosts
            ):
                self._post_heartbeat(agent)
        has_delivered = False
        while self._network and self._network[0][0] <= self.job.now:
            heapq.heappop(self._network)[2]()
            has_delivered = True
        return has_delivered

    def run_diagnosis(self) -> Diagnosis:
        attempt = self.fleet.latest_attempt("job")
        if attempt is None:
            return Diagnosis()
        diagnosis = diagnose(attempt, self.now, self.limits)
        if is_quiet(attempt, self.now, self.limits):
            has_verdict = any(verdict.is_confirmed for verdict in diagnosis.verdicts)
            assert not diagnosis.requests and not has_verdict, (
                "is_quiet missed what the diagnosis finds"
            )
        if self._is_any_known_to_wait(attempt):
            has_verdict = any(verdict.is_confirmed for verdict in diagnosis.verdicts)
            assert not is_quiet(attempt, self.now, self.limits)
            assert has_verdict or diagnosis.unexplained_wait is not None, (
                "a job in which a rank waits would be said to be well"
            )
        for request in diagnosis.requests:
            self._request_evidence(request)
        return diagnosis

    def _is_any_known_to_wait(self, attempt: Attempt) -> bool:
        """Whether a rank was reported after it had waited for longer than ``stall_after_s``, and its host
        is not silent: then it is not known whether the rank still waits.
        """
        for rank in self.job.ranks.values():
            process = attempt.processes.get(rank.number)
            if process is None or rank.blocked_call is None or not rank.is_running:
                continue
            if self.now - process.reports.last_seen_at >= self.limits.lost_after_s:
                continue
            reported_at = process.reports.last_seen_at - self.clock_offset
            if reported_at - rank.blocked_since > self.limits.stall_after_s + _KNOWN_AFTER_S:
                return True
        return False

    def _request_evidence(self, request: EvidenceRequest) -> None:
        attempt = self.fleet.latest_attempt("job")
        process = attempt.processes.get(request.rank) if attempt is not None else None
        if process is None or process.exit is not None or request.hardware:
            return
        subject = (request.rank, -1 if request.stacks else request.stream_uid)
        last = self.requested.get(subject)
        if last is not None:
            asked = last[0].from_seq, last[0].to_seq, last[0].step
            is_repeated = asked == (request.from_seq, request.to_seq, request.step)
            repeat_after_s = (1.0 if is_repeated else 0.0) if last[3] else 10.0
            if self.now - last[2] < repeat_after_s:
                return
        command = Command(
            id=f"{next(self._order)}", kind=CommandKind.STACKS if request.stacks else CommandKind.CALLS, key=process.key,
            uid=request.stream_uid, from_seq=request.from_seq, to_seq=request.to_seq, step=request.step,
        )  # fmt: skip
        self.requested[subject] = (command, process.host, self.now, False)

    def _post_heartbeat(self, agent: ModelAgent) -> None:
        acked: dict[str, AckedState | None] = {}
        parts = []
        brief = not agent.full and self.job.now < agent.terse_until
        short: list[heartbeat.ProcessUpdate] = []
        short_acked: dict[str, AckedState | None] = {}
        for rank in self.job.ranks.values():
            if rank.host == agent.host:
                key = self._rings.get_process_key(rank)
                update, acked[key] = self._rings.compose_update(agent, rank)
                snapshot = self._rings.make_snapshot(rank)
                made = updates.make_terse_update(snapshot, agent.acked.get(key), update, acked[key])
                if update is not None:
                    parts.append(update)
                if made is None:
                    brief = False
                    continue
                terse_update, short_acked[key] = made
                if terse_update is not None:
                    short.append(terse_update)
        if brief:
            parts, acked = short, short_acked
        agent.number += 1
        beat = heartbeat.Heartbeat(
            host=agent.host, agent=agent.id, number=agent.number, full=agent.full, brief=brief, processes=tuple(parts),
            samples=tuple(replace(s, taken_s=self.job.now - at) for s, at in agent.samples), calls=tuple(agent.calls), sent_s=self.job.now,
        )  # fmt: skip
        agent.in_flight, agent.reply_deadline = (
            (agent.number, acked),
            self.job.now + REPLY_TIMEOUT_S,
        )
        fate = self.deliveries.get((agent.host, agent.number), HeartbeatDelivery())
        for copy in range(fate.copies):
            self._schedule_delivery(
                fate.delay + 1.7 * copy,
                partial(self._deliver_heartbeat, agent, beat, copy == 0 and fate.reply_arrives),
            )
        if not fate.copies:
            agent.reply_deadline = self.job.now  # the connection is refused immediately

    def _deliver_heartbeat(
        self, agent: ModelAgent, beat: heartbeat.Heartbeat, reply_arrives: bool
    ) -> None:
        reply = self._ingest_heartbeat(beat)
        if reply_arrives:
            self._schedule_delivery(0.02, lambda: self._handle_reply(agent, beat, reply))

    def _schedule_delivery(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._network, (self.job.now + delay, next(self._order), what))

    def _handle_reply(
        self, agent: ModelAgent, beat: heartbeat.Heartbeat, reply: heartbeat.HeartbeatReply
    ) -> None:
        if agent.in_flight is None or agent.in_flight[0] != beat.number:
            return
        acked, agent.in_flight = agent.in_flight[1], None
        sent = {s.request for s in beat.samples}
        agent.samples = [s for s in agent.samples if s[0].request not in sent]
        agent.calls = [c for c in agent.calls if c not in beat.calls]
        agent.send_at = self.job.now + reply.interval_s
        agent.terse_until = self.job.now + (reply.details_s or 0.0)
        if reply.resync:
            agent.acked.clear()
            agent.cursor.clear()
            agent.history.clear()
            if not agent.full:
                agent.send_at = self.job.now
            agent.full = True
        else:
            agent.full = False
            for key, what in acked.items():
                agent.acked[key] = what
                if what is not None:
                    agent.history[key].mark_acked(what)
        for command in reply.commands:
            self._execute_command(agent, command)

    def _execute_command(self, agent: ModelAgent, command: Command) -> None:
        rank = self._rings.find_rank(command.key)
        if rank is None or command.id in agent.seen_commands:
            return
        agent.seen_commands.add(command.id)
        if command.kind is CommandKind.STACKS and rank.exit is None:
            taken = heartbeat.StackReply(
                key=command.key,
                request=command.id,
                source="py-spy",
                threads=(self.job.make_stack(rank.number),),
            )
            agent.samples.append((taken, self.job.now))
        elif command.kind is CommandKind.CALLS:
            calls = [
                call
                for call in self._rings.list_calls(
                    rank, command.uid, command.from_seq, self.logs_calls
                )
                if call.seq <= command.to_seq and call.seq % command.step == 0
            ]
            reply = heartbeat.CallsReply(
                key=command.key,
                request=command.id,
                uid=command.uid,
                calls=tuple(calls),
                from_seq=command.from_seq,
                to_seq=command.to_seq,
                step=command.step,
            )
            agent.calls.append(reply)
        agent.send_at = min(agent.send_at, self.job.now + EAGER_INTERVAL_S)

    def _ingest_heartbeat(self, beat: heartbeat.Heartbeat) -> heartbeat.HeartbeatReply:
        """Applies a heartbeat as `hangwatch.server.monitor.watch` does."""
        known = beat.agent in self.known_agents
        self.known_agents.add(beat.agent)
        complete = self.fleet.apply_heartbeat(beat, self.now)
        answered = {s.request for s in beat.samples} | {c.request for c in beat.calls}
        self.requested = {
            w: (c, h, at, done or c.id in answered)
            for w, (c, h, at, done) in self.requested.items()
        }
        commands = []
        for what, (command, host, at, done) in self.requested.items():
            if host == beat.host and not done and self.now - at < 10.0:
                commands.append(command)
                self.requested[what] = (command, host, at, done)
        busy = any(h == beat.host and not done for _, h, _, done in self.requested.values())
        resync = not complete or not (known or beat.full or beat.number == 1)
        return heartbeat.HeartbeatReply(
            interval_s=EAGER_INTERVAL_S if busy else INTERVAL_S, details_s=None if busy else self.details_s, resync=resync, commands=tuple(commands)
        )  # fmt: skip
