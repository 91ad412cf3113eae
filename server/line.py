"""Heartbeats one after the other, with room for all else in between; while somebody looks at what they change, they wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hangwatch import wire

from .limits import Load

SLICE = 0.005  # seconds for which heartbeats hold up everything else
WAY = 0.002, 0.02  # seconds, at least and at most, for which the event loop makes way for a look

T = TypeVar("T")
Beat = Callable[[], wire.Heartbeat]  # reads it, which takes as long as taking it in


@dataclass(slots=True)
class Line:
    """``ingest`` takes a heartbeat in. All of this is the event loop's, but for the work of a look."""

    ingest: Callable[[wire.Heartbeat], wire.Reply]
    load: Load
    _waiting: deque[tuple[float, Beat, asyncio.Future[wire.Reply]]] = field(default_factory=deque)  # since when; what; its answer
    _taken: int = 0
    _looking: bool = False
    _looked_at: float = 0.0  # when a look was over: until then nobody's turn could come
    _slice_until: float | None = None  # of this pass of the event loop; None: no heartbeat was taken in it yet
    _draining: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def take(self, beat: Beat) -> wire.Reply:
        """The answer to a heartbeat: at once, where none waits and this pass of the event loop has time for it. Raises what that does."""
        if not self._looking and not self._waiting and self._in_time():
            return self.ingest(beat())
        answer: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((time.perf_counter(), beat, answer))
        self._drain()
        return await answer

    async def look(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done in a thread, once all that wait now are taken in. Until it is done nothing changes under it."""
        upto = self._taken + len(self._waiting)
        while self._taken < upto:
            await asyncio.sleep(0)
        self._looking = True
        making_way = asyncio.create_task(self._make_way())
        try:
            return await asyncio.to_thread(work)
        finally:
            self._looking, self._looked_at = False, time.perf_counter()
            await making_way
            self._drain()

    def _in_time(self) -> bool:
        now = time.perf_counter()
        if self._slice_until is None:
            self._slice_until = now + SLICE
            asyncio.get_running_loop().call_soon(self._next_pass)
        return now < self._slice_until

    def _next_pass(self) -> None:
        self._slice_until = None

    def _drain(self) -> None:
        if self._draining is None and not self._looking:
            self._draining = asyncio.create_task(self._take_all())

    async def _take_all(self) -> None:
        while self._waiting and not self._looking:
            now = time.perf_counter()
            self.load.waited_s = now - max(self._waiting[0][0], self._looked_at)
            until = now + SLICE
            while self._waiting and time.perf_counter() < until:
                _, beat, answer = self._waiting.popleft()
                self._taken += 1
                try:
                    reply = self.ingest(beat())
                except Exception as error:  # of this one: the rest is taken all the same
                    if not answer.done():
                        answer.set_exception(error)
                else:
                    if not answer.done():
                        answer.set_result(reply)
            await asyncio.sleep(0)
        self.load.waited_s, self._draining = 0.0, None

    async def _make_way(self) -> None:
        """Every other moment is the look's: a thread beside an event loop that is always busy gets next to none by itself."""
        least, most = WAY
        while self._looking:
            began = time.perf_counter()
            await asyncio.sleep(0)
            time.sleep(min(most, max(least, time.perf_counter() - began)))
