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

# Few enough objects that a collection takes about 5 ms; for ten times as many it takes up to 150.
THRESHOLDS = (1_000, 1, 20_000)
COLLECT_EVERY_HEARTBEATS = 32  # which create some thousand objects during a hang
MIN_PROCESSES = 1000  # a smaller state is collected fast enough
STEADY_AFTER_S = 30.0  # without new processes


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the collector while short-lived objects, such as lists of all ranks, are created."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_new_objects() -> None:
    """Collects the youngest objects, which the collector does not do by itself while as many old
    objects are freed: when a large attempt is dropped, or heartbeats replace the positions of ranks.
    It starts once a thousand more objects were created than freed. After a phase in which the two
    are equal, it would have a hundred thousand to examine, which takes a third of a second.
    """
    if gc.isenabled():
        gc.collect(1)


@dataclass(slots=True)
class GarbageScheduler:
    _frozen: int = 0  # processes that were known when the state was last frozen
    _known: int = 0
    _steady_since: float = 0.0

    def update(self, processes: int, now: float) -> None:
        """Freezes the state if the number of known processes has grown or is steady."""
        if processes != self._known:
            self._known, self._steady_since = processes, now
        added = processes - self._frozen
        has_grown = added > max(MIN_PROCESSES, self._frozen // 4)
        is_steady = now - self._steady_since > STEADY_AFTER_S and processes >= MIN_PROCESSES
        if has_grown or (added > 0 and is_steady):
            gc.freeze()
            self._frozen = processes
        elif added < 0:
            self._frozen = processes
