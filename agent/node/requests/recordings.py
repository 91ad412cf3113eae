"""Records processes one after the other, in a thread of its own, so that neither heartbeats nor
stack dumps wait for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hangwatch.protocol.live import RecordingReply
from hangwatch.stacks.profile import pack_profile

from ..stacks.pyspy import PySpy, PySpyError
from .pyspy_record import Wish, record

WAITING = 256
MAKE_WAY_S = 4.0
STOPPED = "it was stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    key: str
    request: str
    wish: Wish


class Recordings:
    """One daemon thread, one py-spy at a time. Results are handed over by `results`, after ``wake``
    was called.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self._pyspy = pyspy
        self._wake = wake
        self._orders: queue.Queue[Order] = queue.Queue(WAITING)
        self._results: queue.SimpleQueue[RecordingReply] = queue.SimpleQueue()
        self._current: Order | None = None
        self._enough = ""  # why the current one is to end
        self._unwanted: set[str] = set()  # requests that are to end before they begin
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, order: Order) -> bool:
        """False where too many are waiting."""
        if self._thread is None:  # most hosts are never recorded
            self._thread = threading.Thread(target=self._work, name="recordings", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def paused(self, key: str) -> bool:
        """Its samples pause the process just now: that it is traced (state t) says nothing of it."""
        current = self._current
        return current is not None and current.key == key and current.wish.native

    def make_way(self, key: str) -> None:
        """Ends a recording that would keep a stack dump of the same process from attaching, and
        waits for that.
        """
        until = time.monotonic() + MAKE_WAY_S
        while self.paused(key) and time.monotonic() < until:
            self._enough = (
                self._enough or "stacks of this process were asked for, and they come first"
            )
            time.sleep(0.02)

    def stop(self, request: str) -> None:
        """Ends one recording with what it has, or before it begins."""
        current = self._current
        if current is not None and current.request == request:
            self._enough = self._enough or STOPPED
        else:
            self._unwanted = {request, *list(self._unwanted)[:WAITING]}

    def results(self) -> list[RecordingReply]:
        return [
            self._results.get_nowait() for _ in range(self._results.qsize())
        ]  # nobody else takes any

    def close(self) -> None:
        """Ends what runs, so that no py-spy outlives the node agent."""
        self._closed = True
        self._enough = "the node agent leaves"
        if self._thread is not None and self._current is not None:
            self._thread.join(MAKE_WAY_S)

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            self._enough, self._current = "", order
            if self._closed:
                return
            if order.request in self._unwanted:
                self._current = None
                self._tell(
                    RecordingReply(
                        key=order.key, request=order.request, error=f"{STOPPED} before it began"
                    )
                )
                continue
            self._tell(RecordingReply(key=order.key, request=order.request, begun=True))
            try:
                made = record(self._pyspy, order.wish, lambda: self._enough)
                told = RecordingReply(
                    key=order.key,
                    request=order.request,
                    seconds=made.seconds,
                    profile=pack_profile(made.profile),
                    note=made.note,
                )
            except PySpyError as error:
                told = RecordingReply(key=order.key, request=order.request, error=str(error))
            except (
                Exception
            ) as error:  # a request is always answered, and the thread serves the next one
                text = (
                    f"hangwatch failed to record: {type(error).__name__}: {error}; please report"
                    " this"
                )
                told = RecordingReply(key=order.key, request=order.request, error=text)
            self._current = None
            self._tell(told)

    def _tell(self, told: RecordingReply) -> None:
        self._results.put(told)
        self._wake()
