"""Keeps the server running where part of it fails: a background task is started again, and other work
continues with the next item. Each failure is logged, and counted for `/metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

log = logging.getLogger("hangwatch")

# The delay doubles each time that something ends soon.
MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.2, 10.0
# A task counts as running again once it has not failed for this long.
RECOVERED_AFTER_S = 15.0
MAX_LOGGED_FAILURES = 100


@dataclass(slots=True)
class FailureLog:
    """Errors of hangwatch in work on independent items: a failed item must not stop the others."""

    count: int = 0
    _logged: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def isolate(self, work: str) -> Iterator[None]:
        """Counts an exception of the ``with`` block, and logs the first for each ``work``."""
        try:
            yield
        except Exception:
            self.count += 1
            if work not in self._logged and len(self._logged) < MAX_LOGGED_FAILURES:
                self._logged.add(work)
                log.exception("%s failed and will be tried again; please report this", work)


@dataclass(slots=True, kw_only=True)
class _Part:
    """A background task, and what became of it."""

    task: asyncio.Task[None]
    failures: int = 0
    failed_at: float = float("-inf")


@dataclass(slots=True)
class TaskSupervisor:
    """Runs functions that should run until they are cancelled, on the event loop's thread."""

    _parts: dict[str, _Part] = field(default_factory=dict)

    def start_task(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Runs ``run`` again and again until `stop_tasks`; ``name`` is shown to operators."""
        task = asyncio.create_task(self._run_forever(name, run), name=name)
        self._parts[name] = _Part(task=task)

    async def stop_tasks(self) -> None:
        tasks = [part.task for part in self._parts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def list_down(self) -> list[str]:
        """The parts that failed within the last seconds."""
        oldest = time.monotonic() - RECOVERED_AFTER_S
        return [
            name
            for name, part in self._parts.items()
            if part.failed_at > oldest or part.task.done()
        ]

    def count_failures(self) -> dict[str, int]:
        """Failures of each part since the server started."""
        return {name: part.failures for name, part in self._parts.items()}

    async def _run_forever(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        delay_s = MIN_RESTART_DELAY_S
        while True:
            started_at = time.monotonic()
            try:
                await run()
                raise RuntimeError("it ended")
            except Exception:
                part = self._parts[name]
                part.failures += 1
                part.failed_at = time.monotonic()
                log.exception(
                    "%s failed and is started again; please report this (failure %d)",
                    name,
                    part.failures,
                )
            delay_s = min(MAX_RESTART_DELAY_S, 2 * delay_s)
            if time.monotonic() - started_at > MAX_RESTART_DELAY_S:
                delay_s = MIN_RESTART_DELAY_S
            await asyncio.sleep(delay_s)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since the server started."""

    heartbeats: int = 0
    malformed: int = 0
    refused: int = 0  # heartbeats while the server was overloaded
    refusals_by_limit: Counter[str] = field(default_factory=Counter)  # see `server.core.limits`
    unrequested: int = 0  # stacks, calls and hardware that no node agent was asked for
    dropped_samples: int = 0  # stacks that were dropped for lack of memory
    resyncs: int = 0
    diagnoses: int = 0
    diagnosis_s: float = 0.0  # CPU time
