"""Keeps the runs of Python's garbage collector short: a full collection over the state of 100,000
ranks would block the event loop for seconds.

The state of a process is freed by reference counting, and the collector finds next to nothing here.
So objects that have existed for a while are frozen, which hides them from it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

THRESHOLDS = (
    1_000,
    1,
    20_000,
)  # as few objects as this are seen to in some 5 ms, ten times as many in up to 150
COLLECT_EVERY_HEARTBEATS = (
    32  # after which what is new is looked at: of a hang some thousand objects
)
MIN_PROCESSES = 1000  # processes
STEADY_AFTER_S = 30.0  # seconds


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the collector while short-lived objects, such as lists of all ranks, are created."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_new_objects() -> None:
    """While as much that is old is freed, the collector would not look by itself: it waits for as
    many new objects as are freed, and a thousand more, and has a hundred thousand to look at once
    that ends, which takes a third of a second. So it is when a large attempt is dropped, and where
    heartbeats tell of new places in the stead of old ones.
    """
    if gc.isenabled():
        gc.collect(1)


@dataclass(slots=True)
class GarbageScheduler:
    _frozen: int = 0  # processes that were known the last time
    _known: int = 0
    _steady_since: float = 0.0

    def update(self, processes: int, now: float) -> None:
        """Freezes the state if the number of known processes has grown or is steady."""
        if processes != self._known:
            self._known, self._steady_since = processes, now
        grown = processes - self._frozen
        if grown > max(MIN_PROCESSES, self._frozen // 4) or (
            grown > 0 and now - self._steady_since > STEADY_AFTER_S and processes >= MIN_PROCESSES
        ):
            gc.freeze()
            self._frozen = processes
        elif grown < 0:
            self._frozen = processes
