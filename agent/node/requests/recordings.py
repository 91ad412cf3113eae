"""Records processes one after the other, in a separate thread, so that neither heartbeats nor stack
dumps wait for it.
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
PREEMPTED_REASON = "stacks of this process were requested, and they come first"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOrder:
    key: str
    request_id: str
    spec: RecordingSpec


class RecordingWorker:
    """One daemon thread that runs one py-spy at a time. It calls ``wake`` for each reply, which
    `take_results` returns.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self._pyspy = pyspy
        self._wake = wake
        self._orders: queue.Queue[RecordingOrder] = queue.Queue(MAX_WAITING_RECORDINGS)
        self._results: queue.SimpleQueue[RecordingReply] = queue.SimpleQueue()
        self._current: RecordingOrder | None = None
        self._stop_reason = ""  # why the current recording is to end
        self._cancelled_request_ids: set[str] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit_order(self, order: RecordingOrder) -> bool:
        """Returns False if too many orders are queued."""
        if self._thread is None:  # started only now: most hosts are never recorded
            self._thread = threading.Thread(target=self._run_worker, name="recordings", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def is_pausing(self, key: str) -> bool:
        """A recording pauses this process now: its state t (traced) means nothing else."""
        current = self._current
        return current is not None and current.key == key and current.spec.native

    def preempt_recording(self, key: str) -> None:
        """Ends a recording that would keep a stack dump of the same process from attaching, and
        waits until it has ended.
        """
        deadline = time.monotonic() + PREEMPT_TIMEOUT_S
        while self.is_pausing(key) and time.monotonic() < deadline:
            self._stop_reason = self._stop_reason or PREEMPTED_REASON
            time.sleep(0.02)

    def stop_recording(self, request_id: str) -> None:
        """Ends one recording, which keeps its samples, or cancels it before it begins."""
        current = self._current
        if current is not None and current.request_id == request_id:
            self._stop_reason = self._stop_reason or STOPPED_REASON
        else:
            kept_ids = list(self._cancelled_request_ids)[:MAX_WAITING_RECORDINGS]
            self._cancelled_request_ids = {request_id, *kept_ids}

    def take_results(self) -> list[RecordingReply]:
        # No other thread takes results, so as many as there are now can be taken.
        return [self._results.get_nowait() for _ in range(self._results.qsize())]

    def close(self) -> None:
        """Ends the current recording, so that no py-spy outlives the node agent."""
        self._closed = True
        self._stop_reason = "the node agent exits"
        if self._thread is not None and self._current is not None:
            self._thread.join(PREEMPT_TIMEOUT_S)

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            self._stop_reason = ""
            self._current = order
            if self._closed:
                return
            if order.request_id in self._cancelled_request_ids:
                reply = _make_error_reply(order, f"{STOPPED_REASON} before it began")
            else:
                self._publish_reply(
                    RecordingReply(key=order.key, request=order.request_id, begun=True)
                )
                reply = self._record_process(order)
            self._current = None
            self._publish_reply(reply)

    def _record_process(self, order: RecordingOrder) -> RecordingReply:
        try:
            recording = record_profile(self._pyspy, order.spec, lambda: self._stop_reason)
            return RecordingReply(
                key=order.key,
                request=order.request_id,
                seconds=recording.seconds,
                profile=pack_profile(recording.profile),
                note=recording.note,
            )
        except PySpyError as error:
            return _make_error_reply(order, str(error))
        except Exception as error:  # every request gets a reply, and the thread continues
            return _make_error_reply(
                order,
                f"hangwatch failed to record: {type(error).__name__}: {error}; please report this",
            )

    def _publish_reply(self, reply: RecordingReply) -> None:
        self._results.put(reply)
        self._wake()


def _make_error_reply(order: RecordingOrder, error: str) -> RecordingReply:
    return RecordingReply(key=order.key, request=order.request_id, error=error)
