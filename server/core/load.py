"""The server's load, the refusal of heartbeats because of it, and what keeps the event loop responsive.

A full run of Python's garbage collector over the state of 100,000 ranks would block the event loop
for seconds, and find next to nothing: reference counting frees that state. So objects that have
existed for a while are frozen, which hides them from the collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .peers import PeerConnections, PeerSocket
from .problems import Problem

OVERLOAD_LATE_S = 2.0  # the event loop's lateness beyond which heartbeats are refused
OVERLOAD_WAIT_S = 10.0  # a heartbeat's wait beyond which they are: its agent gives up soon after
RETRY_AFTER_S = 5
MEASURE_INTERVAL_S = 0.1
_SMOOTHING = 0.2  # weight of the newest measurement

# Connections in one pass of the event loop: these are served, and these are closed.
ACCEPTED_PER_PASS, REFUSED_PER_PASS = 8, 64

# A collection of so few objects takes about 5 ms; for ten times as many it takes up to 150.
THRESHOLDS = (1_000, 1, 20_000)
COLLECT_EVERY_HEARTBEATS = 32  # these create some thousand objects during a hang
MIN_PROCESSES = 1000  # a smaller state is collected fast enough
STEADY_AFTER_S = 30.0  # the state is steady after this time without new processes


@dataclass(slots=True)
class Load:
    """The lateness of the event loop, without queued heartbeats, and how long these wait."""

    late_s: float = 0.0
    # The time from arrival to application of a heartbeat that is not urgent, for each family of jobs
    # that has queued ones. Those with the server's token have no family: theirs is empty.
    waits_s: dict[str, float] = field(default_factory=dict)

    @property
    def waited_s(self) -> float:
        """The longest wait."""
        return max(self.waits_s.values(), default=0.0)

    def get_wait_s(self, family: str) -> float:
        """How long the heartbeats of a family's node agents wait."""
        return max(self.waits_s.get(family, 0.0), self.waits_s.get("", 0.0))

    async def measure_lateness(self) -> None:
        """Measures until it is cancelled."""
        while True:
            began_at = time.monotonic()
            await asyncio.sleep(MEASURE_INTERVAL_S)
            late_s = time.monotonic() - began_at - MEASURE_INTERVAL_S
            self.late_s += _SMOOTHING * (late_s - self.late_s)

    def make_refusal(self, is_urgent: bool, family: str = "") -> Problem | None:
        """The refusal of a heartbeat while the server is overloaded; None if it is accepted. ``family``
        is that of its token's job.
        """
        is_waiting_long = self.waits_s.get(family, 0.0) > OVERLOAD_WAIT_S and not is_urgent
        if self.late_s <= OVERLOAD_LATE_S and not is_waiting_long:
            return None
        detail = "this server is overloaded; nothing of the request was applied: send it again"
        return Problem(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})


class ThrottledListener(socket.socket):
    """A listening socket that accepts few connections in a pass of asyncio's loop, not thousands, and
    only those that ``peers`` admits.
    """

    peers: PeerConnections | None = None  # None: all are admitted
    _accepted: int = 0  # the number of connections in this pass
    _refused: int = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if not self._accepted and not self._refused:
            asyncio.get_running_loop().call_soon(self._end_pass)
        while self._accepted < ACCEPTED_PER_PASS and self._refused < REFUSED_PER_PASS:
            descriptor, address = self._accept()  # type: ignore[attr-defined] # as `socket.accept`
            connection = PeerSocket(self.family, self.type, self.proto, descriptor)
            if self.peers is None or self.peers.admit(connection, address):
                self._accepted += 1
                return connection, address
            self._refused += 1
            connection.close()
        raise BlockingIOError

    def _end_pass(self) -> None:
        self._accepted = self._refused = 0


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the collector while short-lived objects, such as lists of all ranks, are created."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_new_objects() -> None:
    """Collects the youngest objects. The collector starts by itself once a thousand more objects were
    created than freed, which does not happen while heartbeats replace the positions of ranks. After
    such a phase it would examine a hundred thousand objects, for a third of a second.
    """
    if gc.isenabled():
        gc.collect(1)


@dataclass(slots=True)
class GarbageScheduler:
    """Decides when the state is frozen, so that the collector does not examine it."""

    _frozen: int = 0  # processes that were known when the state was last frozen
    _known: int = 0
    _steady_since: float = 0.0

    def update(self, processes: int, now: float) -> None:
        """Freezes the state if the number of known processes has grown or is steady."""
        if processes != self._known:
            self._known = processes
            self._steady_since = now
        added = processes - self._frozen
        has_grown = added > max(MIN_PROCESSES, self._frozen // 4)
        is_steady = now - self._steady_since > STEADY_AFTER_S and processes >= MIN_PROCESSES
        if has_grown or (added > 0 and is_steady):
            gc.freeze()
            self._frozen = processes
        elif added < 0:
            self._frozen = processes
