"""Traces calls as they are made: requests them from node agents and passes the replies to clients, as
server-sent events.

A server without clients that trace sends no requests, and a heartbeat only checks an empty dict.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CallKind, CommandKind, TracedCall, TraceReply
from hangwatch.report.documents import build_document, build_optional_document
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.events import encode_event, wait_for_event
from .requests import RankReply, RankRequest, RequestRegistry

MAX_SESSIONS = 16  # sessions at a time
MAX_TRACED_RANKS = 64  # ranks of one session
MAX_CALLS_PER_REPLY = 1000
REQUEST_RETRY_S = 5.0  # an unanswered request is repeated after this time
# The first and the last reply may take so long, since the hosts of a large job report every 20 s.
REPLY_TIMEOUT_S = 30.0
EXIT_GRACE_S = 3.0  # the last calls of a process may arrive so long after its end
MAX_PENDING_EVENTS = 20_000  # reached if a client reads more slowly than calls are made
POLL_INTERVAL_S = 1.0  # the end of a trace is checked at this interval
KEEPALIVE_INTERVAL_S = 10.0  # a comment is sent after this time without events
MAX_EVENTS_PER_CHUNK = 200


@dataclass(slots=True, kw_only=True)
class TracedRank(RankReply):
    """One rank of a session, and the request to its node agent. Times are the monotonic clock's."""

    process: Process
    next_record: int = -1  # index in the ring; -1: where the ring ends now
    requested_at: float = 0.0
    is_last_request: bool = False
    started_at: float | None = None  # the time of the first reply: later calls are traced
    # The offset is this server's clock minus the host's at the first reply. It stays fixed, so that
    # network delays do not change the time between two calls of a rank.
    clock_offset_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class TraceSession(RankRequest[TracedRank]):
    """One client's trace: the calls that it selects, the ranks that it follows, and the events that it
    has not received yet, as pairs of the event's name and its data.
    """

    op: str = ""
    group: str = ""  # a group's name or description
    values: bool = False
    seconds: float | None = None  # None: until the client leaves or the job ends
    events: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    excluded_ops: set[str] = field(default_factory=set)  # operations that are not selected
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def compute_end(self, traced: TracedRank) -> float:
        """The time after which calls of a rank are not traced; infinite if that is not known (yet).
        Some replies may be outstanding then.
        """
        if traced.started_at is None or self.seconds is None:
            return math.inf
        return traced.started_at + self.seconds

    def add_event(self, name: str, **data: Any) -> None:
        self.events.append((name, data))
        self.changed.set()

    def fail_reply(self, reply: TracedRank, error: str) -> None:
        reply.status = "failed"
        reply.error = error
        self.add_event("error", rank=reply.rank, detail=error)

    def end_overdue_ranks(self, now: float) -> None:
        """Ends the trace of ranks whose replies are overdue, and of those that have exited."""
        self.expire_replies(now)
        for traced in self.ranks:
            if traced.is_active and traced.process.exit is not None:
                exited_at = traced.process.exited_at or now
                if now - max(exited_at, traced.requested_at) >= EXIT_GRACE_S:
                    traced.status = "done"
                    self.changed.set()

    def describe_call(
        self, traced: TracedRank, call: TracedCall, kind: CallKind, at: datetime
    ) -> dict[str, Any] | None:
        """A call as the API describes it; None if it belongs to another group than the wanted one."""
        stream = traced.process.streams.get(call.uid)
        group = None if stream is None else stream.group
        if self.group and (group is None or self.group not in (group.name, group.desc)):
            return None
        return {
            "rank": traced.rank,
            "at": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            **build_document(kind.signature),
            "peer": None if stream is None else stream.given_peer,
            "group": None if group is None else {"name": group.name, "desc": group.desc},
            "seq": call.seq,
            "site": build_optional_document(kind.site),
            "async": None if kind.blocking is None else not kind.blocking,
            "within_s": call.within_s,
            "pending": call.pending,
            "raised": call.raised,
            "values": None if call.values is None else asdict(call.values),
        }


class TraceRegistry(RequestRegistry[TraceSession]):
    """The sessions of all clients. A rank's reply is followed by the next command to it."""

    KIND = CommandKind.TRACE

    def start_session(
        self, attempt: Attempt, ranks: Sequence[int], now: float, **selection: Any
    ) -> TraceSession:
        """Starts to trace ``ranks``, which must all be in ``attempt.processes``. ``selection`` has the
        fields of `TraceSession` that select calls.
        """
        session = TraceSession(**self.identify_request(attempt, now), **selection)
        self.requests[session.id] = session
        for rank in dict.fromkeys(ranks):
            process = attempt.processes[rank]
            traced = TracedRank(
                rank=rank,
                process=process,
                deadline=now + REPLY_TIMEOUT_S,
                timeout_error=(
                    f"its node agent did not reply within {REPLY_TIMEOUT_S:.0f} s: check that the"
                    f" hangwatch agent runs on {process.host}"
                ),
            )
            session.ranks.append(traced)
            self._request_calls(session, traced, now)
        return session

    def is_agent_traced(self, agent: str) -> bool:
        """Whether one of the agent's ranks is traced: the agent should then report more often."""
        return any(traced.process.agent == agent for _, traced in self._iter_active_ranks())

    def _iter_active_ranks(self) -> Iterator[tuple[TraceSession, TracedRank]]:
        for session in self.requests.values():
            for traced in session.ranks:
                if traced.is_active:
                    yield session, traced

    def _request_calls(self, session: TraceSession, traced: TracedRank, now: float) -> None:
        """Requests the calls that follow those of the last reply."""
        is_over = traced.process.exit is not None or now >= session.compute_end(traced)
        traced.is_last_request = traced.started_at is not None and is_over
        traced.requested_at = now
        self.send_command(
            session,
            traced,
            traced.process,
            now,
            after=traced.next_record,
            op=session.op,
            values=session.values,
            max_calls=MAX_CALLS_PER_REPLY,
            last=traced.is_last_request,
        )

    def apply_heartbeat(self, beat: heartbeat.Heartbeat, now: float) -> None:
        """Passes an agent's replies to the sessions, and requests the next ones. A repeated reply is
        ignored.
        """
        if not self.requests:
            return
        # The calls of several ranks on one host are sorted by time.
        known_counts = {
            session: len(session.events)
            for session in self.requests.values()
            if beat.traces and len(session.ranks) > 1
        }
        sent_at = now if beat.sent_s is None else beat.sent_s
        for session, traced, reply in self.match_replies(beat.traces):
            if traced.is_active:
                self._apply_reply(session, traced, reply, sent_at, now)
        for session, known_count in known_counts.items():
            new_count = len(session.events) - known_count
            added = [session.events.pop() for _ in range(new_count)]
            added.reverse()  # equal times keep their order
            added.sort(key=lambda event: str(event[1].get("at", "")))
            session.events.extend(added)
        for session, traced in self._iter_active_ranks():
            is_due = not traced.command_id or now - traced.requested_at >= REQUEST_RETRY_S
            if is_due and traced.process.agent == beat.agent:
                self._request_calls(session, traced, now)

    def _apply_reply(
        self,
        session: TraceSession,
        traced: TracedRank,
        reply: TraceReply,
        sent_at: float,
        now: float,
    ) -> None:
        """``sent_at`` is on the agent's clock."""
        self.withdraw_command(traced)
        if reply.error is not None:
            session.fail_reply(traced, reply.error)
            return
        traced.next_record = reply.upto
        if traced.started_at is None:
            traced.started_at = now
            traced.deadline = session.compute_end(traced) + REPLY_TIMEOUT_S
            traced.timeout_error = (
                "its last calls did not arrive: its node agent has stopped reporting"
            )
            traced.clock_offset_s = now - sent_at
            session.add_event("start", rank=traced.rank)
        missed = reply.missed
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
                missed += 1  # the client is too slow
            else:
                session.add_event("call", **document)
        if missed:
            session.add_event("missed", rank=traced.rank, calls=missed)
        if not session.excluded_ops.issuperset(reply.others):
            session.excluded_ops.update(reply.others)
            session.add_event("others", ops=sorted(session.excluded_ops))
        if traced.is_last_request and not reply.more:
            traced.status = "done"
        session.changed.set()


async def stream_events(
    registry: TraceRegistry, session: TraceSession, is_closed: Callable[[], bool]
) -> AsyncIterator[str]:
    """The session's events until it ends, or until the server stops: ``is_closed``."""
    clock = registry.clock
    last_sent_at = clock.monotonic()
    while True:
        session.changed.clear()
        while session.events:
            last_sent_at = clock.monotonic()
            count = min(len(session.events), MAX_EVENTS_PER_CHUNK)
            events = [session.events.popleft() for _ in range(count)]
            yield "".join(encode_event(name, data) for name, data in events)
        if session.status == "done" or is_closed():
            if is_closed():
                reason = "closed"
            elif all(traced.process.exit is not None for traced in session.ranks):
                reason = "ended"
            else:
                reason = "done"
            yield encode_event("end", {"reason": reason})
            return
        if clock.monotonic() - last_sent_at >= KEEPALIVE_INTERVAL_S:
            last_sent_at = clock.monotonic()
            yield ": still here\n\n"
        if not await wait_for_event(POLL_INTERVAL_S, session.changed):
            session.end_overdue_ranks(clock.monotonic())
