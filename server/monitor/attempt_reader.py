"""Runs work that reads a whole attempt: for a large one in a thread, while its heartbeats wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hangwatch.tracking.attempt import Attempt

from ..core import garbage_collection
from ..core.limits import is_large
from ..ingest.heartbeat_queue import HeartbeatQueue

T = TypeVar("T")


@dataclass(slots=True)
class AttemptReader:
    heartbeat_queue: HeartbeatQueue
    # Seconds of the current round spent on large attempts, which have a backoff of their own.
    large_attempts_s: float = 0.0

    async def run(
        self, attempt: Attempt, work: Callable[[], T], apply_queued_s: float = 0.0
    ) -> tuple[T, float]:
        """The result of ``work`` and the CPU seconds it took. ``work`` must only read what
        heartbeats change.

        Heartbeats that are queued for a large attempt are applied first, for up to
        ``apply_queued_s`` seconds.
        """
        if not is_large(attempt.rank_count):
            return _measure(work)

        def measure_without_collection() -> tuple[T, float]:
            with garbage_collection.paused_collection():
                return _measure(work)

        started_at = time.perf_counter()
        try:
            return await self.heartbeat_queue.run_exclusively(
                measure_without_collection, apply_queued_s
            )
        finally:
            self.large_attempts_s += time.perf_counter() - started_at


def _measure(work: Callable[[], T]) -> tuple[T, float]:
    started_at = time.thread_time()
    result = work()
    return result, time.thread_time() - started_at
