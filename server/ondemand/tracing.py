"""Traces calls as they are made: requests them from node agents and passes the replies to clients.

Without a client it costs nothing: no node agent is sent a request, and a heartbeat only checks an
empty list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.live import TraceReply
from hangwatch.tracking.attempt import Attempt

from ..core.clock import Clock, ulid
from .trace_session import MAX_PENDING_EVENTS, TracedRank, TraceFilter, TraceSession

MAX_SESSIONS = 16  # at a time
MAX_TRACED_RANKS = 64  # of one session
MAX_CALLS_PER_REPLY = 1000
REQUEST_RETRY_S = 5.0  # an unanswered request is repeated after this time
REPLY_TIMEOUT_S = 30.0  # for the first and the last reply: hosts of a large job report every 20 s
EXIT_GRACE_S = 3.0  # after the end of a process, in which its last calls may arrive


@dataclass(slots=True, kw_only=True)
class TraceRegistry:
    """All sessions. Times are the monotonic clock's."""

    clock: Clock
    sessions: list[TraceSession] = field(default_factory=list)

    def start_session(
        self, attempt: Attempt, ranks: Sequence[int], trace_filter: TraceFilter, now: float
    ) -> TraceSession:
        """Starts to trace ``ranks``, each of which must be in ``attempt.processes``."""
        session = TraceSession(
            filter=trace_filter,
            ranks={
                rank: TracedRank(rank=rank, process=attempt.processes[rank], added_at=now)
                for rank in ranks
            },
        )
        self.sessions.append(session)
        return session

    def stop_session(self, session: TraceSession) -> None:
        self.sessions.remove(session)

    def is_agent_traced(self, agent: str) -> bool:
        """Whether one of the agent's ranks is traced, so that it should report more often."""
        return any(traced.process.agent == agent for _, traced in self._iter_active_ranks())

    def _iter_active_ranks(self) -> Iterator[tuple[TraceSession, TracedRank]]:
        for session in self.sessions:
            for traced in session.ranks.values():
                if not traced.is_done:
                    yield session, traced

    def build_commands(self, agent: str, now: float) -> tuple[Command, ...]:
        """The requests to send with the reply to an agent's heartbeat."""
        if not self.sessions:
            return ()
        commands: list[Command] = []
        for session, traced in self._iter_active_ranks():
            is_due = not traced.request or now - traced.requested_at >= REQUEST_RETRY_S
            if traced.process.agent == agent and is_due:
                commands.append(self._build_command(session, traced, now))
        return tuple(commands)

    def _build_command(self, session: TraceSession, traced: TracedRank, now: float) -> Command:
        traced.request = ulid(self.clock.wall())
        traced.requested_at = now
        has_exited = traced.process.exit is not None
        traced.is_last_request = traced.started_at is not None and (
            has_exited or now >= session.compute_end(traced)
        )
        return Command(
            id=traced.request,
            ask=CommandKind.TRACE,
            key=traced.process.key,
            after=traced.next_record,
            op=session.filter.op,
            values=session.filter.values,
            most=MAX_CALLS_PER_REPLY,
            last=traced.is_last_request,
        )

    def apply_heartbeat(self, beat: heartbeat.Heartbeat, now: float) -> None:
        """Passes an agent's replies to the sessions. A repeated reply is ignored."""
        if not beat.traces or not self.sessions:
            return
        # The calls of several ranks on one host are sorted by time.
        known_counts = {
            session: len(session.events) for session in self.sessions if len(session.ranks) > 1
        }
        pending = {
            traced.request: (session, traced)
            for session, traced in self._iter_active_ranks()
            if traced.request
        }
        sent_at = now if beat.sent_s is None else beat.sent_s
        for reply in beat.traces:
            requested = pending.pop(reply.request, None)
            if requested is not None:
                session, traced = requested
                traced.request = ""
                self._apply_reply(session, traced, reply, sent_at, now)
        for session, known_count in known_counts.items():
            session.sort_new_events(known_count)

    def _apply_reply(
        self,
        session: TraceSession,
        traced: TracedRank,
        reply: TraceReply,
        sent_at: float,
        now: float,
    ) -> None:
        """``sent_at`` is on the agent's clock."""
        if reply.error is not None:
            session.fail_rank(traced, reply.error)
            return
        traced.next_record = reply.upto
        if traced.started_at is None:
            traced.started_at = now
            traced.clock_offset_s = now - sent_at
            session.add_event("start", rank=traced.rank)
        missed = reply.missed + self._add_calls(session, traced, reply, sent_at)
        if missed:
            session.add_event("missed", rank=traced.rank, calls=missed)
        session.add_excluded_ops(reply.others)
        if traced.is_last_request and not reply.more:
            traced.is_done = True
        session.changed.set()

    def _add_calls(
        self, session: TraceSession, traced: TracedRank, reply: TraceReply, sent_at: float
    ) -> int:
        """Adds the reply's calls as events. Returns the number of calls that were dropped because
        the client reads too slowly.
        """
        dropped = 0
        end = session.compute_end(traced)
        clock_origin = self.clock.wall() - timedelta(seconds=self.clock.monotonic())
        for call in reply.calls:
            entered_at = traced.clock_offset_s + sent_at - call.entered_s
            if entered_at > end or not 0 <= call.kind < len(reply.kinds):
                continue
            date = clock_origin + timedelta(seconds=entered_at)
            document = session.describe_call(traced, call, reply.kinds[call.kind], date)
            if document is None:
                continue
            if len(session.events) >= MAX_PENDING_EVENTS:
                dropped += 1
            else:
                session.add_event("call", **document)
        return dropped

    def expire_ranks(self, session: TraceSession, now: float) -> None:
        """Ends the trace of ranks whose replies are overdue."""
        for traced in session.ranks.values():
            process = traced.process
            if traced.is_done:
                continue
            if traced.started_at is None and now - traced.added_at >= REPLY_TIMEOUT_S:
                session.fail_rank(
                    traced,
                    f"its node agent did not reply within {REPLY_TIMEOUT_S:.0f} s: check that the"
                    f" hangwatch agent runs on {process.host}",
                )
            elif now - REPLY_TIMEOUT_S >= session.compute_end(traced):
                session.fail_rank(
                    traced, "its last calls did not arrive: its node agent has stopped reporting"
                )
            elif process.exit is not None:
                exited_at = process.exited_at or now
                if now - max(exited_at, traced.requested_at, traced.added_at) >= EXIT_GRACE_S:
                    traced.is_done = True
                    session.changed.set()
