"""Takes stacks in separate threads, at most two at a time on a host, so that the node agent's loop
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
from hangwatch.ring.snapshot import Caller

from ..system import permission
from . import children, faulthandler_dumps, source
from .callers import mark_callers
from .pyspy import PySpy, PySpyError

MAX_CONCURRENT_DUMPS = 2
MAX_WAITING_ORDERS = 256
# Frames of the checks are left out of stacks: they only pass a call on.
_CHECKS_PATH = f"{Path(__file__).resolve().parents[2] / 'recorder' / 'checks'}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An order for the stacks of one process; without ``request_id``, to check whether py-spy can
    take them.
    """

    key: str
    pid: int
    start_ticks: int
    request_id: str | None = None
    native: bool = False
    # Where the process writes its stacks itself; None if it has no ring.
    ring_path: Path | None = None
    registration: faulthandler_dumps.FaulthandlerRegistration | None = None
    callers: tuple[Caller, ...] = ()  # the threads that make its calls
    newest_call: str = ""  # with its line, in place of stacks that cannot be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The result of an order. ``refusal`` says why py-spy will never work for this process; None if
    it works or may work.
    """

    key: str
    sample: StackReply | None = None
    taken_ns: int = 0
    refusal: str | None = None
    was_continued: bool = False


class StackSampler:
    """Daemon threads that execute queued orders. They call ``wake`` for each result, which
    `take_results` returns.
    """

    def __init__(
        self, pyspy: PySpy, wake: Callable[[], None], preempt_recording: Callable[[str], None]
    ) -> None:
        """``preempt_recording`` ends the recording that would keep py-spy from attaching to the
        process with that key, and waits until it has ended.
        """
        self._pyspy = pyspy
        self._preempt_recording = preempt_recording
        self._wake = wake
        self._orders: queue.Queue[SampleOrder] = queue.Queue(MAX_WAITING_ORDERS)
        self._results: queue.SimpleQueue[SampleResult] = queue.SimpleQueue()
        self._own_dump_lock = threading.Lock()  # two dumps of one process share a file
        for number in range(MAX_CONCURRENT_DUMPS):
            threading.Thread(target=self._run_worker, name=f"sampler-{number}", daemon=True).start()

    def submit_order(self, order: SampleOrder) -> bool:
        """Returns False if too many orders are queued."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def take_results(self) -> list[SampleResult]:
        # No other thread takes results, so as many as there are now can be taken.
        return [self._results.get_nowait() for _ in range(self._results.qsize())]

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            try:
                result = self._execute_order(order)
            except Exception as error:  # every request gets a reply, and the thread continues
                result = SampleResult(key=order.key)
                if order.request_id:
                    text = (
                        f"hangwatch failed to take stacks: {type(error).__name__}: {error}; please"
                        " report this"
                    )
                    result = _make_result(order, order.request_id, "py-spy", (), text)
            self._results.put(result)
            self._wake()

    def _execute_order(self, order: SampleOrder) -> SampleResult:
        if order.request_id is None:
            return self._probe_access(order)
        return self._dump_stacks(order, order.request_id)

    def _probe_access(self, order: SampleOrder) -> SampleResult:
        """Tries py-spy without pausing the process, so that a refusal is known before stacks are
        needed.
        """
        try:
            if self._pyspy.path and self._is_access_refused(order.pid):
                return SampleResult(
                    key=order.key, refusal=permission.format_refusal(self._pyspy.proc)
                )
            self._pyspy.dump_stacks(order.pid, order.start_ticks, nonblocking=True)
        except ProcessLookupError:
            return SampleResult(key=order.key)
        except PySpyError as error:
            return SampleResult(key=order.key, refusal=str(error) if error.is_permanent else None)
        return SampleResult(key=order.key)

    def _is_access_refused(self, pid: int) -> bool:
        if not permission.may_read_memory(pid):
            return True
        return permission.read_ptrace_facts(self._pyspy.proc).is_ptrace_filtered

    def _dump_stacks(self, order: SampleOrder, request_id: str) -> SampleResult:
        """With py-spy or, if that fails, by the process itself."""
        self._preempt_recording(order.key)
        taken_ns = time.monotonic_ns()
        try:
            spied = self._pyspy.dump_stacks(order.pid, order.start_ticks, native=order.native)
            threads = mark_callers(spied.threads, order.pid, order.callers)
            threads = source.add_source_text(threads, order.pid, self._pyspy.proc)
            threads += children.collect_child_stacks(threads, order.pid, self._pyspy)
            result = _make_result(order, request_id, "py-spy", threads, None, taken_ns)
            return replace(result, was_continued=spied.was_continued)
        except PySpyError as error:
            problem = str(error)
            refusal = problem if error.is_permanent else None
        if order.registration is None or order.ring_path is None:
            return _make_result(order, request_id, "py-spy", (), problem, taken_ns, refusal)
        try:
            with self._own_dump_lock:
                taken_ns = time.monotonic_ns()
                dump = faulthandler_dumps.request_stacks(
                    order.pid,
                    order.start_ticks,
                    order.ring_path,
                    order.registration,
                    proc=self._pyspy.proc,
                )
        except faulthandler_dumps.FaultStacksError as error:
            problem = f"{problem}; and faulthandler: {error}"
            if order.newest_call:
                problem += f"; the newest recorded call is {order.newest_call}"
            return _make_result(order, request_id, "py-spy", (), problem, taken_ns, refusal)
        if dump.note:
            problem = f"{problem}; {dump.note}"
        threads = mark_callers(dump.threads, order.pid, order.callers)
        threads = source.add_source_text(threads, order.pid, self._pyspy.proc)
        return _make_result(order, request_id, "faulthandler", threads, problem, taken_ns, refusal)


def _make_result(
    order: SampleOrder,
    request_id: str | None,
    source: str,
    threads: tuple[ThreadStack, ...],
    error: str | None,
    taken_ns: int = 0,
    refusal: str | None = None,
) -> SampleResult:
    threads = tuple(_drop_check_frames(thread) for thread in threads)
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
    )


def _drop_check_frames(thread: ThreadStack) -> ThreadStack:
    frames = [frame for frame in thread.frames if not frame.file.startswith(_CHECKS_PATH)]
    return replace(thread, frames=tuple(frames))
