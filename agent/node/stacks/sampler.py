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

AT_ONCE = 2
WAITING = 256
# waits in the place of the function that called it
_CHECKS = f"{Path(__file__).resolve().parents[2] / 'recorder' / 'checks'}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Stacks of one process; without ``request`` only whether they could be had."""

    key: str
    pid: int
    start_ticks: int
    request: str | None = None
    native: bool = False
    registration: faulthandler_dumps.Registration | None = None
    stacks_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of an order. ``refused`` says why py-spy will never serve for this process; None
    where it does or may.
    """

    key: str
    sample: StackReply | None = None
    taken_ns: int = 0
    refused: str | None = None
    continued: bool = False


class Sampler:
    """Two daemon threads and a queue. Results are handed over by `results`, after ``wake`` was
    called.
    """

    def __init__(
        self, pyspy: PySpy, wake: Callable[[], None], make_way: Callable[[str], None]
    ) -> None:
        """``make_way`` ends, and waits for, what would keep py-spy from attaching to the process
        with that key.
        """
        self._pyspy = pyspy
        self._make_way = make_way
        self._wake = wake
        self._orders: queue.Queue[Order] = queue.Queue(WAITING)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._one_signal = threading.Lock()  # two requests to one process would mix their output
        for number in range(AT_ONCE):
            threading.Thread(target=self._work, name=f"sampler-{number}", daemon=True).start()

    def submit(self, order: Order) -> bool:
        """False where too many are waiting."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def results(self) -> list[Result]:
        return [
            self._results.get_nowait() for _ in range(self._results.qsize())
        ]  # nobody else takes any

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            try:
                result = (
                    self._probe(order)
                    if order.request is None
                    else self._dump(order, order.request)
                )
            except (
                Exception
            ) as error:  # a request is always answered, and the thread serves the next one
                text = (
                    f"hangwatch failed to take stacks: {type(error).__name__}: {error}; please"
                    " report this"
                )
                result = (
                    _result(order, order.request, "py-spy", (), text)
                    if order.request
                    else Result(key=order.key)
                )
            self._results.put(result)
            self._wake()

    def _probe(self, order: Order) -> Result:
        """Tries without pausing the process, so that a refusal is known before the stacks are
        needed.
        """
        try:
            if self._pyspy.path and (
                not permission.may_read(order.pid) or permission.facts(self._pyspy.proc).filtered
            ):
                return Result(key=order.key, refused=permission.refusal(self._pyspy.proc))
            self._pyspy.dump(order.pid, order.start_ticks, quiet=True)
        except ProcessLookupError:
            return Result(key=order.key)
        except PySpyError as error:
            return Result(key=order.key, refused=str(error) if error.lasting else None)
        return Result(key=order.key)

    def _dump(self, order: Order, request: str) -> Result:
        self._make_way(order.key)
        taken_ns = time.monotonic_ns()
        try:
            dump = self._pyspy.dump(order.pid, order.start_ticks, native=order.native)
            threads = source.with_text(dump.threads, order.pid, self._pyspy.proc)
            threads += children.awaited(threads, order.pid, self._pyspy)
            return _result(
                order, request, "py-spy", threads, None, taken_ns, continued=dump.continued
            )
        except PySpyError as error:
            why, refused = str(error), str(error) if error.lasting else None
        if order.registration is None or order.stacks_path is None:
            return _result(order, request, "py-spy", (), why, taken_ns, refused)
        try:
            with self._one_signal:
                taken_ns = time.monotonic_ns()
                threads = faulthandler_dumps.dump(
                    order.pid,
                    order.start_ticks,
                    order.registration,
                    order.stacks_path,
                    proc=self._pyspy.proc,
                )
        except faulthandler_dumps.FaultStacksError as error:
            return _result(
                order, request, "py-spy", (), f"{why}; and faulthandler: {error}", taken_ns, refused
            )
        threads = source.with_text(threads, order.pid, self._pyspy.proc)
        return _result(order, request, "faulthandler", threads, why, taken_ns, refused)


def _result(
    order: Order,
    request: str | None,
    source: str,
    threads: tuple[ThreadStack, ...],
    error: str | None,
    taken_ns: int = 0,
    refused: str | None = None,
    continued: bool = False,
) -> Result:
    threads = tuple(
        replace(t, frames=tuple(f for f in t.frames if not f.file.startswith(_CHECKS)))
        for t in threads
    )
    sample = StackReply(
        key=order.key,
        request=request or "",
        source=source,
        native=order.native,
        threads=threads,
        error=error,
    )
    return Result(
        key=order.key,
        sample=sample,
        taken_ns=taken_ns or time.monotonic_ns(),
        refused=refused,
        continued=continued,
    )
