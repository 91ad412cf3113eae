"""Applies heartbeats one by one, and leaves the event loop time for everything else. They are
queued while another thread reads the state that they change.

Urgent ones (by the header of RFC 9218) come first: they are few, and often decide a verdict.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hangwatch.protocol import heartbeat

from ..core import event_loop
from ..core.limits import Load

SLICE_S = 0.005  # seconds for which heartbeats, or what else is many, hold up everything else

T = TypeVar("T")
DecodeHeartbeat = Callable[[], heartbeat.Heartbeat]  # reads it, which takes as long as taking it in


@dataclass(slots=True)
class _Place:
    beat: DecodeHeartbeat
    urgent: bool
    since: float
    answer: asyncio.Future[heartbeat.HeartbeatReply]


@dataclass(slots=True)
class HeartbeatQueue:
    """``ingest`` takes a heartbeat in. All of this is the event loop's, but for the work of a look."""

    ingest: Callable[
        [heartbeat.Heartbeat, bool], heartbeat.HeartbeatReply
    ]  # the latter tells whether it is urgent
    load: Load
    _urgent: deque[_Place] = field(default_factory=deque)
    _usual: deque[_Place] = field(default_factory=deque)
    _usual_taken: int = 0
    _looking: bool = False
    _slice_until: float | None = (
        None  # of this pass of the event loop; None: no heartbeat was taken in it yet
    )
    _draining: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._urgent) + len(self._usual)

    async def apply(self, beat: DecodeHeartbeat, urgent: bool = False) -> heartbeat.HeartbeatReply:
        """The answer to a heartbeat: at once, where none waits and this pass of the event loop has
        time for it. Raises what that does.
        """
        if not self._looking and not len(self) and self._in_time():
            return self.ingest(beat(), urgent)
        place = _Place(
            beat, urgent, time.perf_counter(), asyncio.get_running_loop().create_future()
        )
        (self._urgent if urgent else self._usual).append(place)
        self._drain()
        return await place.answer

    async def run_exclusively(self, work: Callable[[], T], within_s: float = 0.0) -> T:
        """The result of ``work``, done in a thread. Until it is done nothing changes under it.

        First so much of what waits now is taken in, and of what is urgent, as can be within
        ``within_s`` seconds.
        """
        marker, until = event_loop.place_marker(), time.perf_counter() + within_s
        while not marker.is_passed and time.perf_counter() < until:
            await asyncio.sleep(0)
        upto = self._usual_taken + len(self._usual)
        while (self._urgent or self._usual_taken < upto) and time.perf_counter() < until:
            await asyncio.sleep(0)
        self._looking = True
        try:
            with event_loop.delay_reports():
                return await asyncio.to_thread(work)
        finally:
            self._looking = False
            self._drain()

    def _in_time(self) -> bool:
        now = time.perf_counter()
        if self._slice_until is None:
            self._slice_until = now + SLICE_S
            asyncio.get_running_loop().call_soon(self._next_pass)
        return now < self._slice_until

    def _next_pass(self) -> None:
        self._slice_until = None

    def _drain(self) -> None:
        if self._draining is None and not self._looking:
            self._draining = asyncio.create_task(self._take_all())

    async def _take_all(self) -> None:
        while len(self) and not self._looking:
            until = time.perf_counter() + SLICE_S
            while len(self) and time.perf_counter() < until:
                self._take_one()
            await asyncio.sleep(0)
        self.load.queued_s, self._draining = 0.0, None

    def _take_one(self) -> None:
        if self._urgent:
            place = self._urgent.popleft()
        else:
            place, self._usual_taken = self._usual.popleft(), self._usual_taken + 1
            self.load.queued_s = time.perf_counter() - place.since
        try:
            reply = self.ingest(place.beat(), place.urgent)
        except Exception as error:  # of this one: the rest is taken all the same
            if not place.answer.done():
                place.answer.set_exception(error)
        else:
            if not place.answer.done():
                place.answer.set_result(reply)
