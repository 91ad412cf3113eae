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
from .pyspy_record import RecordingSpec, record_profile

MAX_WAITING_RECORDINGS = 256
PREEMPT_TIMEOUT_S = 4.0
STOPPED_REASON = "it was stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOrder:
    key: str
    request_id: str
    spec: RecordingSpec


class RecordingWorker:
    """One daemon thread, one py-spy at a time. Results are handed over by `results`, after ``wake``
    was called.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self._pyspy = pyspy
        self._wake = wake
        self._orders: queue.Queue[RecordingOrder] = queue.Queue(MAX_WAITING_RECORDINGS)
        self._results: queue.SimpleQueue[RecordingReply] = queue.SimpleQueue()
        self._current: RecordingOrder | None = None
        self._stop_reason = ""  # why the current one is to end
        self._cancelled_request_ids: set[str] = set()  # requests that are to end before they begin
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit_order(self, order: RecordingOrder) -> bool:
        """False where too many are waiting."""
        if self._thread is None:  # most hosts are never recorded
            self._thread = threading.Thread(target=self._run_worker, name="recordings", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def is_pausing(self, key: str) -> bool:
        """Its samples pause the process just now: that it is traced (state t) says nothing of it."""
        current = self._current
        return current is not None and current.key == key and current.spec.native

    def preempt_recording(self, key: str) -> None:
        """Ends a recording that would keep a stack dump of the same process from attaching, and
        waits for that.
        """
        until = time.monotonic() + PREEMPT_TIMEOUT_S
        while self.is_pausing(key) and time.monotonic() < until:
            self._stop_reason = (
                self._stop_reason or "stacks of this process were asked for, and they come first"
            )
            time.sleep(0.02)

    def stop_recording(self, request_id: str) -> None:
        """Ends one recording with what it has, or before it begins."""
        current = self._current
        if current is not None and current.request_id == request_id:
            self._stop_reason = self._stop_reason or STOPPED_REASON
        else:
            self._cancelled_request_ids = {
                request_id,
                *list(self._cancelled_request_ids)[:MAX_WAITING_RECORDINGS],
            }

    def take_results(self) -> list[RecordingReply]:
        return [
            self._results.get_nowait() for _ in range(self._results.qsize())
        ]  # nobody else takes any

    def close(self) -> None:
        """Ends what runs, so that no py-spy outlives the node agent."""
        self._closed = True
        self._stop_reason = "the node agent leaves"
        if self._thread is not None and self._current is not None:
            self._thread.join(PREEMPT_TIMEOUT_S)

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            self._stop_reason, self._current = "", order
            if self._closed:
                return
            if order.request_id in self._cancelled_request_ids:
                self._current = None
                self._publish_reply(
                    RecordingReply(
                        key=order.key,
                        request=order.request_id,
                        error=f"{STOPPED_REASON} before it began",
                    )
                )
                continue
            self._publish_reply(RecordingReply(key=order.key, request=order.request_id, begun=True))
            try:
                made = record_profile(self._pyspy, order.spec, lambda: self._stop_reason)
                told = RecordingReply(
                    key=order.key,
                    request=order.request_id,
                    seconds=made.seconds,
                    profile=pack_profile(made.profile),
                    note=made.note,
                )
            except PySpyError as error:
                told = RecordingReply(key=order.key, request=order.request_id, error=str(error))
            except (
                Exception
            ) as error:  # a request is always answered, and the thread serves the next one
                text = (
                    f"hangwatch failed to record: {type(error).__name__}: {error}; please report"
                    " this"
                )
                told = RecordingReply(key=order.key, request=order.request_id, error=text)
            self._current = None
            self._publish_reply(told)

    def _publish_reply(self, reply: RecordingReply) -> None:
        self._results.put(reply)
        self._wake()
