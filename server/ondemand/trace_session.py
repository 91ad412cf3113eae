"""One client's trace: the calls that it selects, the ranks that it follows, and the events that it
has not received yet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hangwatch.protocol.live import CallKind, TracedCall
from hangwatch.report.documents import build_signature_document, build_site_document
from hangwatch.tracking.process import Process

MAX_PENDING_EVENTS = 20_000  # for a client that reads more slowly than calls are made


@dataclass(slots=True, kw_only=True)
class TracedRank:
    """One rank of a session, and the request to its node agent. Times are the monotonic clock's."""

    rank: int
    process: Process
    added_at: float
    next_record: int = -1  # index in the ring; -1: where the ring ends now
    request: str = ""  # the id of the unanswered command
    requested_at: float = 0.0
    is_last_request: bool = False
    started_at: float | None = None  # the time of the first reply: later calls are traced
    # This server's clock minus the host's, as of the first reply. It stays fixed, so that network
    # delays do not change the time between two calls of a rank.
    clock_offset_s: float = 0.0
    is_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilter:
    """Which calls to trace."""

    op: str = ""
    group: str = ""  # its name or description
    values: bool = False
    seconds: float | None = None  # None: until the client leaves or the job ends


@dataclass(slots=True, kw_only=True, eq=False)
class TraceSession:
    """``events`` are pairs of the event's name and its data."""

    filter: TraceFilter
    ranks: dict[int, TracedRank]
    events: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    excluded_ops: set[str] = field(default_factory=set)  # operations that the filter leaves out
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_done(self) -> bool:
        return all(traced.is_done for traced in self.ranks.values())

    @property
    def have_all_exited(self) -> bool:
        return all(traced.process.exit is not None for traced in self.ranks.values())

    def compute_end(self, traced: TracedRank) -> float:
        """When calls of a rank are no longer traced; some replies may be outstanding then. Infinite
        if that is not known (yet).
        """
        if traced.started_at is None or self.filter.seconds is None:
            return math.inf
        return traced.started_at + self.filter.seconds

    def add_event(self, name: str, **data: Any) -> None:
        self.events.append((name, data))
        self.changed.set()

    def add_excluded_ops(self, ops: tuple[str, ...]) -> None:
        if not self.excluded_ops.issuperset(ops):
            self.excluded_ops.update(ops)
            self.add_event("others", ops=sorted(self.excluded_ops))

    def fail_rank(self, traced: TracedRank, detail: str) -> None:
        traced.is_done = True
        self.add_event("error", rank=traced.rank, detail=detail)

    def sort_new_events(self, known_count: int) -> None:
        """Sorts the events after the first ``known_count`` by time; those of one moment stay in
        their order.
        """
        added = [self.events.pop() for _ in range(len(self.events) - known_count)]
        added.reverse()
        self.events.extend(sorted(added, key=lambda event: str(event[1].get("at", ""))))

    def describe_call(
        self, traced: TracedRank, call: TracedCall, kind: CallKind, at: datetime
    ) -> dict[str, Any] | None:
        """A call as the API describes it; None if it belongs to another group than the wanted one."""
        stream = traced.process.streams.get(call.uid)
        group = None if stream is None else stream.group
        wanted_group = self.filter.group
        if wanted_group and (group is None or wanted_group not in (group.name, group.desc)):
            return None
        return {
            "rank": traced.rank,
            "at": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            **build_signature_document(kind.signature),
            "peer": None if stream is None else stream.peer,
            "group": None if group is None else {"name": group.name, "desc": group.desc},
            "seq": call.seq,
            "site": build_site_document(kind.site),
            "async": None if kind.blocking is None else not kind.blocking,
            "within_s": call.within_s,
            "pending": call.pending,
            "raised": call.raised,
            "values": None if call.values is None else dataclasses.asdict(call.values),
        }
