"""What the node agent's loop runs on: the selector that it waits in, the threads that do what would
block it, and its log (lines on stderr, which is the run dir's agent.log).
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from hangwatch.report.text import clean_text

MAX_LOG_BYTES = 1 << 20  # a longer log is truncated
_MAX_UNIQUE_WARNINGS = 1000
_READ_BYTES = 4096  # more than the wakeup pipe has between two waits

_OrderT = TypeVar("_OrderT")
_ResultT = TypeVar("_ResultT")


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class WakeupSelector:
    """A selector that any thread or signal handler can wake.

    Other descriptors are registered in `selector` with a key as their data.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self._read_fd, selectors.EVENT_READ)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
            os.write(self._write_fd, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Waits until woken or until descriptors are ready, and returns the keys of these."""
        ready_keys = []
        for selector_key, _ in self.selector.select(max(0.0, timeout_s)):
            if selector_key.data is not None:
                ready_keys.append(selector_key.data)
                continue
            with contextlib.suppress(BlockingIOError):  # already empty
                os.read(self._read_fd, _READ_BYTES)
        return ready_keys


class OrderWorker(ABC, Generic[_OrderT, _ResultT]):
    """Daemon threads that execute queued orders. They start with the first order, and call ``wake``
    for each result, which `take_results` returns. An error of ours becomes the result of its order.
    """

    def __init__(
        self, name: str, wake: Callable[[], None], *, max_waiting: int, thread_count: int = 1
    ) -> None:
        self._name = name
        self._wake = wake
        self._thread_count = thread_count
        self._is_started = False
        self._orders: queue.Queue[_OrderT] = queue.Queue(max_waiting)
        self._results: queue.SimpleQueue[_ResultT] = queue.SimpleQueue()

    def submit_order(self, order: _OrderT) -> bool:
        """Returns False if too many orders are queued."""
        if not self._is_started:
            self._is_started = True
            for _ in range(self._thread_count):
                threading.Thread(target=self._run_worker, name=self._name, daemon=True).start()
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def take_results(self) -> list[_ResultT]:
        # No other thread takes results, so as many as there are now can be taken.
        return [self._results.get_nowait() for _ in range(self._results.qsize())]

    @abstractmethod
    def execute_order(self, order: _OrderT) -> _ResultT | None:
        """Executes an order in one of the threads. Returns its last result, if it has one."""

    @abstractmethod
    def explain_failure(self, order: _OrderT, error: str) -> _ResultT | None:
        """The result of an order that raised this error."""

    def publish_result(self, result: _ResultT) -> None:
        """Hands a result to the node agent's loop."""
        self._results.put(result)
        self._wake()

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            try:
                result = self.execute_order(order)
            except Exception as error:
                result = self.explain_failure(order, describe_error(error))
            if result is not None:
                self.publish_result(result)


class AgentLog:
    """Writes lines to the log, and counts the warnings."""

    def __init__(self) -> None:
        self.warning_count = 0
        self._seen_warnings: set[str] = set()

    def info(self, text: str) -> None:
        """Writes one line. ``text`` may quote a server or a job."""
        # The error cannot be reported if the disk is full or stderr is closed.
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(2)
            if stat.S_ISREG(status.st_mode) and status.st_size > MAX_LOG_BYTES:
                os.ftruncate(2, 0)
            print(
                f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {clean_text(text)}",
                file=sys.stderr,
                flush=True,
            )

    def warning(self, text: str) -> None:
        self.warning_count += 1
        self.info(f"warning: {text}")

    def warn_once(self, text: str) -> None:
        """Writes each warning only once, and a limited number of different ones."""
        if text in self._seen_warnings or len(self._seen_warnings) >= _MAX_UNIQUE_WARNINGS:
            return
        self._seen_warnings.add(text)
        self.warning(text)
