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
from ..core.load import Load

SLICE_S = 0.005  # for which heartbeats, or other numerous work, may block the event loop

T = TypeVar("T")
# Decoding takes as long as applying, so it is done in the heartbeat's turn.
DecodeHeartbeat = Callable[[], heartbeat.Heartbeat]


@dataclass(slots=True)
class _QueuedHeartbeat:
    decode: DecodeHeartbeat
    is_urgent: bool
    queued_at: float
    reply: asyncio.Future[heartbeat.HeartbeatReply]


@dataclass(slots=True)
class HeartbeatQueue:
    """``ingest`` applies a heartbeat; its second argument is whether it is urgent. Everything runs
    on the event loop's thread, except the work of `run_exclusively`.
    """

    ingest: Callable[[heartbeat.Heartbeat, bool], heartbeat.HeartbeatReply]
    load: Load
    _urgent: deque[_QueuedHeartbeat] = field(default_factory=deque)
    _usual: deque[_QueuedHeartbeat] = field(default_factory=deque)
    _usual_applied: int = 0
    _is_state_locked: bool = False  # a thread reads the state
    # Of this pass of the event loop; None: it has not applied a heartbeat yet.
    _slice_until: float | None = None
    _draining: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._urgent) + len(self._usual)

    async def apply(
        self, decode: DecodeHeartbeat, is_urgent: bool = False
    ) -> heartbeat.HeartbeatReply:
        """Applies a heartbeat and returns the reply: immediately, if none is queued and this pass
        of the event loop has time for it. Raises what ``decode`` and ``ingest`` raise.
        """
        if not self._is_state_locked and not len(self) and self._has_time():
            return self.ingest(decode(), is_urgent)
        reply: asyncio.Future[heartbeat.HeartbeatReply]
        reply = asyncio.get_running_loop().create_future()
        queued = _QueuedHeartbeat(decode, is_urgent, time.perf_counter(), reply)
        (self._urgent if is_urgent else self._usual).append(queued)
        self._start_draining()
        return await reply

    async def run_exclusively(self, work: Callable[[], T], within_s: float = 0.0) -> T:
        """Runs ``work`` in a thread and returns its result. No heartbeat is applied meanwhile.

        Before that, applies the heartbeats that have arrived, and all urgent ones, as far as
        ``within_s`` seconds allow.
        """
        marker, until = event_loop.place_marker(), time.perf_counter() + within_s
        while not marker.is_passed and time.perf_counter() < until:
            await asyncio.sleep(0)
        arrived = self._usual_applied + len(self._usual)
        while (self._urgent or self._usual_applied < arrived) and time.perf_counter() < until:
            await asyncio.sleep(0)
        self._is_state_locked = True
        try:
            with event_loop.delay_reports():
                return await asyncio.to_thread(work)
        finally:
            self._is_state_locked = False
            self._start_draining()

    def _has_time(self) -> bool:
        now = time.perf_counter()
        if self._slice_until is None:
            self._slice_until = now + SLICE_S
            asyncio.get_running_loop().call_soon(self._end_slice)
        return now < self._slice_until

    def _end_slice(self) -> None:
        self._slice_until = None

    def _start_draining(self) -> None:
        if self._draining is None and not self._is_state_locked:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        while len(self) and not self._is_state_locked:
            until = time.perf_counter() + SLICE_S
            while len(self) and time.perf_counter() < until:
                self._apply_next()
            await asyncio.sleep(0)
        self.load.queued_s, self._draining = 0.0, None

    def _apply_next(self) -> None:
        if self._urgent:
            queued = self._urgent.popleft()
        else:
            queued = self._usual.popleft()
            self._usual_applied += 1
            self.load.queued_s = time.perf_counter() - queued.queued_at
        try:
            reply = self.ingest(queued.decode(), queued.is_urgent)
        except Exception as error:  # the others are applied all the same
            if not queued.reply.done():
                queued.reply.set_exception(error)
        else:
            if not queued.reply.done():
                queued.reply.set_result(reply)
