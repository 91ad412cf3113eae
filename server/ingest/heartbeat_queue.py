"""Applies heartbeats one by one, and leaves the event loop time for everything else. They are
queued while another thread reads the state that they change.

Families of jobs take turns. Within one, urgent heartbeats (by the header of RFC 9218) come first: they
are few, and often decide a verdict. After a heartbeat that took long, its family waits for as long again:
others and their requests then have half of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hangwatch.protocol.heartbeat import Heartbeat, HeartbeatReply

from ..core.load import Load
from ..core.turns import TurnQueue

SLICE_S = 0.005  # the time for which numerous work, such as heartbeats, may block the event loop
# A heartbeat that takes longer is one of thousands of new process groups or calls.
LONG_S = 10 * SLICE_S

T = TypeVar("T")


@dataclass(slots=True)
class _QueuedHeartbeat:
    # Unpacking and decoding take as long as applying, so that they are done in its turn, too.
    decode: Callable[[], Heartbeat]
    is_urgent: bool
    family: str  # that of its token's job; empty with the server's token
    arrived_at: float  # on the monotonic clock
    reply: asyncio.Future[HeartbeatReply]


@dataclass(slots=True)
class HeartbeatQueue:
    """``ingest`` applies a heartbeat; its second argument is whether it is urgent. Everything runs
    on the event loop's thread, except the work of `run_exclusively`.
    """

    ingest: Callable[[Heartbeat, bool], HeartbeatReply]
    load: Load
    _queued: TurnQueue[_QueuedHeartbeat] = field(default_factory=TurnQueue)
    _urgent_queued: int = 0
    _usual_applied: int = 0
    _resting: set[str] = field(default_factory=set)  # the families whose last heartbeat took long
    _is_state_locked: bool = False  # a thread reads the state
    # The end of this pass's slice; None: this pass of the event loop has not applied a heartbeat yet.
    _slice_until: float | None = None
    _draining: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queued)

    def submit(
        self, decode: Callable[[], Heartbeat], is_urgent: bool, family: str
    ) -> asyncio.Future[HeartbeatReply]:
        """Applies a heartbeat: immediately, if its family has none queued and this pass of the event loop has
        time. The future has the reply, or what decoding or applying the heartbeat raises.
        """
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        queued = _QueuedHeartbeat(decode, is_urgent, family, now, loop.create_future())
        if not (self._is_state_locked or self._queued.count(family) or family in self._resting):
            if self._slice_until is None:
                self._slice_until = now + SLICE_S
                loop.call_soon(self._end_slice)
            if now < self._slice_until:
                self._apply(queued)
                return queued.reply
        self._queued.put(family, queued, urgent=is_urgent)
        self._urgent_queued += is_urgent
        self._start_draining()
        return queued.reply

    async def run_exclusively(self, work: Callable[[], T], within_s: float = 0.0) -> T:
        """Runs ``work`` in a thread and returns its result. No heartbeat is applied meanwhile. Before
        that, applies those that have arrived, and all urgent ones, for up to ``within_s`` seconds.
        """
        until = time.monotonic() + within_s
        arrived = self._usual_applied + len(self) - self._urgent_queued
        while (self._urgent_queued or self._usual_applied < arrived) and time.monotonic() < until:
            await asyncio.sleep(0)
        self._is_state_locked = True
        try:
            return await asyncio.to_thread(work)
        finally:
            self._is_state_locked = False
            self._start_draining()

    def _end_slice(self) -> None:
        self._slice_until = None

    def _start_draining(self) -> None:
        if self._draining is None and not self._is_state_locked:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            # No family may end its rest between the last look at the queue and the end of this task.
            while not self._is_state_locked and self._apply_slice():
                await asyncio.sleep(0)
        finally:
            for family in self.load.waits_s.keys() - self._resting:
                del self.load.waits_s[family]
            self._draining = None

    def _apply_slice(self) -> bool:
        """Applies heartbeats for `SLICE_S`, and at least one: other processes may take the CPU for that long.
        Returns False if none is queued of a family that does not rest.
        """
        until = time.monotonic() + SLICE_S
        has_applied = False
        while not has_applied or time.monotonic() < until:
            queued = self._queued.take(self._resting)
            if queued is None:
                break
            if queued.is_urgent:
                self._urgent_queued -= 1
            else:
                self._usual_applied += 1
                self.load.waits_s[queued.family] = time.monotonic() - queued.arrived_at
            if not self._queued.count(queued.family):
                self.load.waits_s.pop(queued.family, None)
            self._apply(queued)
            has_applied = True
        return has_applied

    def _apply(self, queued: _QueuedHeartbeat) -> None:
        began_at = time.monotonic()
        try:
            reply = self.ingest(queued.decode(), queued.is_urgent)
            if not queued.reply.cancelled():  # otherwise its sender is gone
                queued.reply.set_result(reply)
        except Exception as error:  # the other heartbeats are applied all the same
            if not queued.reply.cancelled():
                queued.reply.set_exception(error)
        spent_s = time.monotonic() - began_at
        if spent_s > LONG_S:
            self._resting.add(queued.family)
            asyncio.get_running_loop().call_later(spent_s, self._end_rest, queued.family)

    def _end_rest(self, family: str) -> None:
        self._resting.discard(family)
        if len(self):
            self._start_draining()
