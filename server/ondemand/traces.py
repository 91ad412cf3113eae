"""Calls as they are made, for those who listen: who wants which, what the node agents are asked,
and what they answered.

Nobody listening costs nothing: no node agent is asked anything, and heartbeats look at an empty
list.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from hangwatch.protocol import heartbeat
from hangwatch.protocol.live import CallKind, TracedCall, TraceReply
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.clock import Clock, ulid
from ..core.waiting import within

LISTENERS, RANKS = 16, 64  # at a time, and of one of them
MOST = 1000  # calls of a rank in one heartbeat
WAITING = 20_000  # events for a reader that is slower than the calls come
AGAIN = 5.0  # seconds after which an unanswered request is repeated
PATIENCE = 15.0  # seconds for the first answer: hosts of a large job report every six
ENDED = 3.0  # seconds after the end of a process in which its last calls may come
LOOK, ALIVE = (
    1.0,
    10.0,
)  # seconds between two looks at whether all is over; of silence after which a comment is sent


@dataclass(slots=True, kw_only=True)
class _Tap:
    """One rank of a listener's."""

    rank: int
    process: Process
    since: float  # when it was first asked for
    after: int = -1
    request: str = ""
    asked_at: float = 0.0
    asked_last: bool = False
    started_at: float | None = None  # calls from then on are told
    apart: float | None = (
        # its host's clock from ours, as of its first answer: between two calls of a rank no network
        # counts
        None
    )
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which calls."""

    op: str = ""
    group: str = ""  # its name or description
    values: bool = False
    seconds: float | None = None  # without one: until its reader leaves, or the job ends


@dataclass(slots=True, kw_only=True, eq=False)
class Listener:
    """``events`` are those that were not fetched yet, each a kind and what it says."""

    wanted: Wanted
    taps: dict[int, _Tap]
    events: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    others: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return all(tap.done for tap in self.taps.values())

    def tell(self, kind: str, **what: Any) -> None:
        self.events.append((kind, what))
        self.news.set()


@dataclass(slots=True, kw_only=True)
class Traces:
    """Times are the monotonic clock's."""

    clock: Clock
    listeners: list[Listener] = field(default_factory=list)

    def listen(
        self, attempt: Attempt, ranks: Sequence[int], wanted: Wanted, now: float
    ) -> Listener:
        """Begins to ask for the calls of ``ranks``, each of which must be in ``attempt.ranks``."""
        taps = {rank: _Tap(rank=rank, process=attempt.processes[rank], since=now) for rank in ranks}
        made = Listener(wanted=wanted, taps=taps)
        self.listeners.append(made)
        return made

    def stop(self, listener: Listener) -> None:
        self.listeners.remove(listener)

    def busy(self, agent: str) -> bool:
        """Somebody listens to one of its ranks: let it report more often."""
        return any(
            tap.process.agent == agent and not tap.done
            for each in self.listeners
            for tap in each.taps.values()
        )

    def hand_out(self, agent: str, now: float) -> tuple[heartbeat.Command, ...]:
        """What a node agent is asked with the answer to its heartbeat."""
        if not self.listeners:
            return ()
        due = [
            (each, tap)
            for each in self.listeners
            for tap in each.taps.values()
            if tap.process.agent == agent
            and not tap.done
            and (not tap.request or now - tap.asked_at >= AGAIN)
        ]
        return tuple(self._ask(each, tap, now) for each, tap in due)

    def _ask(self, listener: Listener, tap: _Tap, now: float) -> heartbeat.Command:
        tap.request, tap.asked_at = ulid(self.clock.wall()), now
        tap.asked_last = tap.started_at is not None and (
            self._late(listener, tap, now) or tap.process.exit is not None
        )
        return heartbeat.Command(
            id=tap.request,
            ask=heartbeat.CommandKind.TRACE,
            key=tap.process.key,
            after=tap.after,
            op=listener.wanted.op,
            values=listener.wanted.values,
            most=MOST,
            last=tap.asked_last,
        )

    def _late(self, listener: Listener, tap: _Tap, now: float) -> bool:
        return (
            listener.wanted.seconds is not None
            and tap.started_at is not None
            and now >= tap.started_at + listener.wanted.seconds
        )

    def take(self, beat: heartbeat.Heartbeat, now: float) -> None:
        """What a node agent tells. An answer that comes twice counts once."""
        if not beat.traces or not self.listeners:
            return
        before = {each: len(each.events) for each in self.listeners if len(each.taps) > 1}
        asked = {
            tap.request: (each, tap)
            for each in self.listeners
            for tap in each.taps.values()
            if tap.request and not tap.done
        }
        for reply in beat.traces:
            if (found := asked.pop(reply.request, None)) is not None:
                found[1].request = ""
                self._answer(*found, reply, now if beat.sent_s is None else beat.sent_s, now)
        for (
            each,
            known,
        ) in before.items():  # the calls of several ranks of a host as they followed each other
            fresh = [each.events.pop() for _ in range(len(each.events) - known)][
                ::-1
            ]  # those of one moment stay as they came
            each.events.extend(sorted(fresh, key=lambda event: str(event[1].get("at", ""))))

    def _answer(
        self, listener: Listener, tap: _Tap, reply: TraceReply, sent: float, now: float
    ) -> None:
        if reply.error is not None:
            self._fail(listener, tap, reply.error)
            return
        tap.after = reply.upto
        if tap.started_at is None:
            tap.started_at, tap.apart = now, now - sent
            listener.tell("start", rank=tap.rank)
        missed, until = (
            reply.missed,
            None if listener.wanted.seconds is None else tap.started_at + listener.wanted.seconds,
        )
        wall = self.clock.wall() - timedelta(seconds=self.clock.monotonic())
        for call in reply.calls:
            at = (tap.apart or 0.0) + sent - call.entered_s
            if (until is not None and at > until) or not 0 <= call.kind < len(reply.kinds):
                continue
            if (
                told := _told(
                    listener, tap, call, reply.kinds[call.kind], wall + timedelta(seconds=at)
                )
            ) is None:
                continue
            if len(listener.events) >= WAITING:
                missed += 1
            else:
                listener.tell("call", **told)
        if missed:
            listener.tell("missed", rank=tap.rank, calls=missed)
        if fresh := set(reply.others) - listener.others:
            listener.others |= fresh
            listener.tell("others", ops=sorted(listener.others))
        tap.done = tap.asked_last and not reply.more
        listener.news.set()

    def _fail(self, listener: Listener, tap: _Tap, why: str) -> None:
        tap.done = True
        listener.tell("error", rank=tap.rank, detail=why)

    def give_up(self, listener: Listener, now: float) -> None:
        """Waits no longer for those who do not answer."""
        seconds = listener.wanted.seconds
        for tap in [tap for tap in listener.taps.values() if not tap.done]:
            ended = tap.process.exit is not None and now - (tap.process.exited_at or now) >= ENDED
            if tap.started_at is None and now - tap.since >= PATIENCE:
                late = (
                    f"its node agent did not answer within {PATIENCE:.0f} s: see that hangwatch's"
                    f" agent runs on {tap.process.host}"
                )
                self._fail(listener, tap, late)
            elif (
                tap.started_at is not None
                and seconds is not None
                and now >= tap.started_at + seconds + PATIENCE
            ):
                self._fail(
                    listener,
                    tap,
                    "its last calls did not come: its node agent is not heard any more",
                )
            elif ended and now - max(tap.asked_at, tap.since) >= ENDED:
                tap.done = True
                listener.news.set()

    async def stream(self, listener: Listener, closed: Any) -> AsyncIterator[str]:
        """Its events as server-sent ones, until all is told; ``closed`` says that the server stops."""
        silent_since = self.clock.monotonic()
        while True:
            listener.news.clear()
            while listener.events:
                silent_since = self.clock.monotonic()
                yield "".join(_batch(listener))
            if listener.over or closed():
                ended = all(tap.process.exit is not None for tap in listener.taps.values())
                yield _encode(
                    "end", {"reason": "closed" if closed() else "ended" if ended else "done"}
                )
                return
            if self.clock.monotonic() - silent_since >= ALIVE:
                silent_since = self.clock.monotonic()
                yield ": still here\n\n"
            if not await within(LOOK, listener.news):
                self.give_up(listener, self.clock.monotonic())


def _batch(listener: Listener) -> Iterator[str]:
    for _ in range(min(len(listener.events), 200)):
        yield _encode(*listener.events.popleft())


def _encode(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _told(
    listener: Listener, tap: _Tap, call: TracedCall, kind: CallKind, at: datetime
) -> dict[str, Any] | None:
    """As the API tells a call; None where it is of another group."""
    sequence = tap.process.streams.get(call.uid)
    group = sequence.group if sequence is not None else None
    if listener.wanted.group and (
        group is None or listener.wanted.group not in (group.name, group.desc)
    ):
        return None
    signature, site = kind.signature, kind.site
    return {
        "rank": tap.rank,
        "at": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "op": signature.op,
        "shapes": [list(shape) for shape in signature.shapes],
        "dtype": signature.dtype,
        "reduce_op": signature.reduce_op,
        "root": signature.root,
        "peer": sequence.peer if sequence is not None else None,
        "group": None if group is None else {"name": group.name, "desc": group.desc},
        "seq": call.seq,
        "site": (
            None
            if site is None
            else {"file": site.file, "line": site.line, "function": site.function}
        ),
        "async": None if kind.blocking is None else not kind.blocking,
        "within_s": call.within_s,
        "pending": call.pending,
        "raised": call.raised,
        "values": None if call.values is None else dataclasses.asdict(call.values),
    }
