"""Server-sent events: the latest changes, kept so that a reader that reconnects misses nothing.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse

from .problems import Problem

MAX_KEPT_EVENTS = 4096
MAX_KEPT_BYTES = 32 << 20  # the events of a large job have 100,000 ranks
KEEP_ALIVE_S = 15.0  # a comment after this time without events makes proxies keep the connection
MAX_READERS = 256  # the readers of all streams together


def encode_event(kind: str, data: object) -> str:
    """An event without an id: a reader that reconnects cannot resume after it."""
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


@dataclass(slots=True, kw_only=True)
class EventLog:
    """The last events of this server. ``run_id`` distinguishes them from those of earlier runs."""

    run_id: str
    # The events as they are sent; the last one has the number ``last_number``.
    recent_events: deque[str] = field(default_factory=deque)
    last_number: int = 0
    is_closed: bool = False
    reader_count: int = 0  # API clients and pages that update live
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _kept_bytes: int = 0

    def publish_event(self, kind: str, data: Any) -> None:
        """``kind`` is rank, incident or job. ``data`` is anything that msgspec can encode."""
        self.last_number += 1
        document = msgspec.json.encode(data).decode()
        text = f"id: {self.run_id}-{self.last_number}\nevent: {kind}\ndata: {document}\n\n"
        self.recent_events.append(text)
        self._kept_bytes += len(text)
        while len(self.recent_events) > MAX_KEPT_EVENTS or (
            self._kept_bytes > MAX_KEPT_BYTES and len(self.recent_events) > 1
        ):
            self._kept_bytes -= len(self.recent_events.popleft())
        self._wake_readers()

    def close(self) -> None:
        """Ends all streams, since the server stops."""
        self.is_closed = True
        self._wake_readers()

    async def stream_events(self, last_id: str | None) -> AsyncIterator[str]:
        """The events after ``last_id``, or from now on. At a ``reset`` event some were lost, and the
        reader must fetch the whole state.
        """
        last_sent: int | None = self.last_number
        if last_id:
            run_id, _, number = last_id.rpartition("-")
            is_known = run_id == self.run_id and number.isdecimal()
            last_sent = int(number) if is_known and int(number) <= self.last_number else None
        yield "retry: 2000\n\n"
        while not self.is_closed:
            changed = self._changed
            first_kept = self.last_number - len(self.recent_events) + 1
            if last_sent is None or last_sent + 1 < first_kept:  # some were dropped
                last_sent = self.last_number
                yield f"id: {self.run_id}-{last_sent}\nevent: reset\ndata: {{}}\n\n"
                continue
            new_events = list(self.recent_events)[last_sent + 1 - first_kept :]
            last_sent = self.last_number
            for text in new_events:
                yield text
            if not await wait_for_event(KEEP_ALIVE_S, changed):  # any later event has set it
                yield ": still here\n\n"

    def make_response(self, stream: AsyncIterator[str]) -> StreamingResponse:
        """Sends a stream of events until its reader disconnects. Raises Problem if there are too many readers."""
        if self.reader_count >= MAX_READERS:
            raise Problem(
                503,
                f"{MAX_READERS} clients already read event streams of this server: close some",
                headers={"Retry-After": "30"},
            )

        async def track_reader() -> AsyncIterator[str]:
            self.reader_count += 1
            try:
                async for part in stream:
                    yield part
            finally:
                self.reader_count -= 1

        return StreamingResponse(
            track_reader(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def wait_for_event(seconds: float, event: asyncio.Event) -> bool:
    """Waits up to ``seconds`` for ``event``. Returns whether it is set.

    Before Python 3.12 `asyncio.wait_for` forgets that its task was cancelled where the event is set
    at the same time (https://github.com/python/cpython/issues/86296): a busy server would not stop.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
        return event.is_set()
    finally:
        waiting.cancel()
