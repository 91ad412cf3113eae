"""Server-sent events: what changed, kept for a while so that a reader who lost its connection
misses nothing.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .waiting import within

KEPT, KEPT_BYTES = (
    4096,
    32 << 20,
)  # events, of which those of large jobs name a hundred thousand ranks
KEEP_ALIVE = (
    15.0  # seconds of silence after which a comment is sent, so that proxies keep the connection
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    number: int
    kind: str  # rank, incident, job
    data: str  # JSON

    def encode(self, run: str) -> str:
        return f"id: {run}-{self.number}\nevent: {self.kind}\ndata: {self.data}\n\n"


@dataclass(slots=True, kw_only=True)
class Events:
    """The last events of this server. ``run`` tells its ids from those of an earlier server."""

    run: str
    kept: deque[Event] = field(default_factory=deque)
    number: int = 0
    closed: bool = False
    readers: set[object] = field(default_factory=set)  # of these, and of pages that stay up to date
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _bytes: int = 0

    def publish(self, kind: str, data: Any) -> None:
        """``data`` is whatever can be JSON, or `msgspec.Raw` that is."""
        self.number += 1
        self.kept.append(
            Event(number=self.number, kind=kind, data=msgspec.json.encode(data).decode())
        )
        self._bytes += len(self.kept[-1].data)
        while len(self.kept) > KEPT or (self._bytes > KEPT_BYTES and len(self.kept) > 1):
            self._bytes -= len(self.kept.popleft().data)
        self._wake()

    def close(self) -> None:
        """Ends all streams: the server stops."""
        self.closed = True
        self._wake()

    async def stream(self, last_id: str | None) -> AsyncIterator[str]:
        """Events after ``last_id``, or from now on. A ``reset`` event says that some were lost:
        fetch the state anew.
        """
        at = self._position(last_id)
        yield "retry: 2000\n\n"
        if at is None:
            at = self.number
            yield f"id: {self.run}-{at}\nevent: reset\ndata: {{}}\n\n"
        while not self.closed:
            news = self._news
            if (
                self.kept and self.kept[0].number > at + 1
            ):  # the reader is slower than the events come
                at = self.number
                yield f"id: {self.run}-{at}\nevent: reset\ndata: {{}}\n\n"
            for event in [e for e in self.kept if e.number > at]:
                yield event.encode(self.run)
                at = event.number
            if at == self.number and not self.closed and not await within(KEEP_ALIVE, news):
                yield ": still here\n\n"

    def _position(self, last_id: str | None) -> int | None:
        """After which event to go on; None where that cannot be told any more."""
        if not last_id:
            return self.number
        run, _, number = last_id.rpartition("-")
        if run != self.run or not number.isdecimal() or int(number) > self.number:
            return None
        return int(number) if not self.kept or self.kept[0].number <= int(number) + 1 else None

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
