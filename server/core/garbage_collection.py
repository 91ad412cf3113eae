"""Keeps the looks of Python's garbage collector short: one at all that is known of 100,000 ranks
would hold up everybody for seconds.

What is known of a process is freed without the collector, which finds next to nothing here. So what
has been there for a while is put out of its sight.
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
HEARTBEATS = 32  # after which what is new is looked at: of a hang some thousand objects
FEWEST = 1000  # processes
STEADY_FOR = 30.0  # seconds


@contextlib.contextmanager
def no_looks() -> Iterator[None]:
    """What is made meanwhile and soon gone, such as lists of all ranks, is not looked at."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def look_at_new() -> None:
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

    def look(self, processes: int, now: float) -> None:
        """Told every now and then how many processes are known."""
        if processes != self._known:
            self._known, self._steady_since = processes, now
        grown = processes - self._frozen
        if grown > max(FEWEST, self._frozen // 4) or (
            grown > 0 and now - self._steady_since > STEADY_FOR and processes >= FEWEST
        ):
            gc.freeze()
            self._frozen = processes
        elif grown < 0:
            self._frozen = processes
