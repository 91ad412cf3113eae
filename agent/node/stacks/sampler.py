"""Takes stacks in threads of its own, at most two at once on a host, so that the node agent's loop
never waits for them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hangwatch.model.threads import ThreadStack
from hangwatch.protocol.heartbeat import StackReply

from ..system import permission
from . import children, faulthandler_dumps, source
from .pyspy import PySpy, PySpyError

MAX_CONCURRENT_DUMPS = 2
MAX_WAITING_ORDERS = 256
# waits in the place of the function that called it
_CHECKS_PATH = f"{Path(__file__).resolve().parents[2] / 'recorder' / 'checks'}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Stacks of one process; without ``request`` only whether they could be had."""

    key: str
    pid: int
    start_ticks: int
    request_id: str | None = None
    native: bool = False
    registration: faulthandler_dumps.FaulthandlerRegistration | None = None
    stacks_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What came of an order. ``refused`` says why py-spy will never serve for this process; None
    where it does or may.
    """

    key: str
    sample: StackReply | None = None
    taken_ns: int = 0
    refusal: str | None = None
    was_continued: bool = False


class StackSampler:
    """Two daemon threads and a queue. Results are handed over by `results`, after ``wake`` was
    called.
    """

    def __init__(
        self, pyspy: PySpy, wake: Callable[[], None], preempt_recording: Callable[[str], None]
    ) -> None:
        """``make_way`` ends, and waits for, what would keep py-spy from attaching to the process
        with that key.
        """
        self._pyspy = pyspy
        self._preempt_recording = preempt_recording
        self._wake = wake
        self._orders: queue.Queue[SampleOrder] = queue.Queue(MAX_WAITING_ORDERS)
        self._results: queue.SimpleQueue[SampleResult] = queue.SimpleQueue()
        self._signal_lock = threading.Lock()  # two requests to one process would mix their output
        for number in range(MAX_CONCURRENT_DUMPS):
            threading.Thread(target=self._run_worker, name=f"sampler-{number}", daemon=True).start()

    def submit_order(self, order: SampleOrder) -> bool:
        """False where too many are waiting."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def take_results(self) -> list[SampleResult]:
        return [
            self._results.get_nowait() for _ in range(self._results.qsize())
        ]  # nobody else takes any

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            try:
                result = (
                    self._probe_access(order)
                    if order.request_id is None
                    else self._dump_stacks(order, order.request_id)
                )
            except (
                Exception
            ) as error:  # a request is always answered, and the thread serves the next one
                text = (
                    f"hangwatch failed to take stacks: {type(error).__name__}: {error}; please"
                    " report this"
                )
                result = (
                    _make_result(order, order.request_id, "py-spy", (), text)
                    if order.request_id
                    else SampleResult(key=order.key)
                )
            self._results.put(result)
            self._wake()

    def _probe_access(self, order: SampleOrder) -> SampleResult:
        """Tries without pausing the process, so that a refusal is known before the stacks are
        needed.
        """
        try:
            if self._pyspy.path and (
                not permission.may_read_memory(order.pid)
                or permission.read_ptrace_facts(self._pyspy.proc).is_ptrace_filtered
            ):
                return SampleResult(
                    key=order.key, refusal=permission.format_refusal(self._pyspy.proc)
                )
            self._pyspy.dump_stacks(order.pid, order.start_ticks, nonblocking=True)
        except ProcessLookupError:
            return SampleResult(key=order.key)
        except PySpyError as error:
            return SampleResult(key=order.key, refusal=str(error) if error.is_permanent else None)
        return SampleResult(key=order.key)

    def _dump_stacks(self, order: SampleOrder, request_id: str) -> SampleResult:
        self._preempt_recording(order.key)
        taken_ns = time.monotonic_ns()
        try:
            dump = self._pyspy.dump_stacks(order.pid, order.start_ticks, native=order.native)
            threads = source.add_source_text(dump.threads, order.pid, self._pyspy.proc)
            threads += children.collect_child_stacks(threads, order.pid, self._pyspy)
            return _make_result(
                order,
                request_id,
                "py-spy",
                threads,
                None,
                taken_ns,
                was_continued=dump.was_continued,
            )
        except PySpyError as error:
            why, refused = str(error), str(error) if error.is_permanent else None
        if order.registration is None or order.stacks_path is None:
            return _make_result(order, request_id, "py-spy", (), why, taken_ns, refused)
        try:
            with self._signal_lock:
                taken_ns = time.monotonic_ns()
                threads = faulthandler_dumps.request_stacks(
                    order.pid,
                    order.start_ticks,
                    order.registration,
                    order.stacks_path,
                    proc=self._pyspy.proc,
                )
        except faulthandler_dumps.FaultStacksError as error:
            return _make_result(
                order,
                request_id,
                "py-spy",
                (),
                f"{why}; and faulthandler: {error}",
                taken_ns,
                refused,
            )
        threads = source.add_source_text(threads, order.pid, self._pyspy.proc)
        return _make_result(order, request_id, "faulthandler", threads, why, taken_ns, refused)


def _make_result(
    order: SampleOrder,
    request_id: str | None,
    source: str,
    threads: tuple[ThreadStack, ...],
    error: str | None,
    taken_ns: int = 0,
    refusal: str | None = None,
    was_continued: bool = False,
) -> SampleResult:
    threads = tuple(
        replace(t, frames=tuple(f for f in t.frames if not f.file.startswith(_CHECKS_PATH)))
        for t in threads
    )
    sample = StackReply(
        key=order.key,
        request=request_id or "",
        source=source,
        native=order.native,
        threads=threads,
        error=error,
    )
    return SampleResult(
        key=order.key,
        sample=sample,
        taken_ns=taken_ns or time.monotonic_ns(),
        refusal=refusal,
        was_continued=was_continued,
    )
