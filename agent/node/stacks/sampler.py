"""Takes stacks in separate threads, at most two at a time on a host, so that the node agent's loop
never waits for them.

MERGED: Takes the stacks of the child processes that a rank's calling thread waits for: workers of a
DataLoader or a pool, and processes that it started itself.

MERGED: Marks the threads that make a rank's calls in a dump of its stacks.

MERGED: Adds source lines to stacks, with the ``except`` and ``while`` lines around them, from the files
as the process sees them.
"""

from __future__ import annotations

import ast
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.protocol.heartbeat import StackReply
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import Caller
from hangwatch.stacks.activities import classify_activity, find_calling_thread
from hangwatch.stacks.frames import find_innermost_user_frame, is_user_frame, runs_user_code

from ..system import permission, processes
from . import faulthandler_dumps
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
            threads = add_source_text(threads, order.pid, self._pyspy.proc)
            threads += collect_child_stacks(threads, order.pid, self._pyspy)
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
        threads = add_source_text(threads, order.pid, self._pyspy.proc)
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


MAX_CHILDREN = 8  # children of one rank
_MAX_DEPTH = 2  # a fork server's children count as the rank's
_IGNORED_COMMANDS = (
    "hangwatch.agent.node.main",
    "multiprocessing.resource_tracker",
    "torch._inductor.compile_worker",
    "torch_shm_manager",
)


def collect_child_stacks(
    threads: Sequence[ThreadStack], pid: int, pyspy: PySpy
) -> tuple[ThreadStack, ...]:
    """The main threads of the children that a rank with these stacks waits for; empty if it waits
    for something else.

    Its own children come first, the newest of them at the front: most likely the rank waits for
    that one. If there are many, running ones are preferred.
    """
    waits = classify_activity(find_calling_thread(threads)).waits
    if waits is None or not waits.waits_for_child:
        return ()
    children = list(_iter_descendants(pid, pyspy.proc, _MAX_DEPTH))
    children.reverse()  # to newest first: the kernel's order, where start ticks are equal
    is_selection = len(children) > MAX_CHILDREN

    def get_priority(child: _ChildProcess) -> tuple[bool, bool, int]:
        is_idle = child.stat.state != "R"
        return not child.is_own, is_selection and is_idle, -child.stat.start_ticks

    children.sort(key=get_priority)
    return tuple(_sample_child(child, pyspy) for child in children[:MAX_CHILDREN])


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChildProcess:
    """``is_own``: the rank started it itself, or through its fork server."""

    pid: int
    stat: processes.ProcStat
    is_own: bool


def _iter_descendants(
    pid: int, proc: str, depth: int, is_own: bool = True
) -> Iterator[_ChildProcess]:
    for child in processes.list_children(pid, proc):
        try:
            command = " ".join(processes.read_cmdline(child, proc))
            stat = processes.read_stat(child, proc)
        except (OSError, ValueError):  # it has just ended
            continue
        if stat.state in "ZX" or any(mark in command for mark in _IGNORED_COMMANDS):
            continue
        is_fork_server = "multiprocessing.forkserver" in command
        # A fork server without children still imports modules for them: the rank waits for that.
        if not is_fork_server or not processes.list_children(child, proc):
            yield _ChildProcess(pid=child, stat=stat, is_own=is_own)
        if depth > 1:
            yield from _iter_descendants(child, proc, depth - 1, is_own=is_fork_server)


def _sample_child(child: _ChildProcess, pyspy: PySpy) -> ThreadStack:
    stack = _read_stack(child.pid, child.stat, pyspy)
    if not child.is_own:
        return replace(stack, cpu_s=None, ready_s=None)
    cpu_s, ready_s = processes.read_tree_usage_s(child.pid, pyspy.proc)
    return replace(stack, cpu_s=cpu_s, ready_s=ready_s)


def _read_stack(pid: int, stat: processes.ProcStat, pyspy: PySpy) -> ThreadStack:
    name = "process"
    try:
        name = os.path.basename(processes.read_cmdline(pid, pyspy.proc)[0])[:60] or name
        if not name.startswith("python"):
            raise PySpyError(
                f"{name} is not a Python process: cat /proc/{pid}/stack or gdb -p {pid} on its host"
                " shows where it is"
            )
        dump = pyspy.dump_stacks(pid, stat.start_ticks)
    except (OSError, ValueError):
        return ThreadStack(
            thread=_format_thread_name(pid, name), frames=(), pid=pid, error="the process has ended"
        )
    except PySpyError as error:
        return ThreadStack(
            thread=_format_thread_name(pid, name), frames=(), pid=pid, error=str(error)
        )
    (main,) = add_source_text(dump.threads[:1], pid, pyspy.proc)
    frames = _drop_parent_frames(main.frames)
    return replace(
        main, thread=_format_thread_name(pid, name, frames), frames=frames, main=False, pid=pid
    )


def _drop_parent_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Drops the parent's frames, which a forked child still has on its stack."""
    for index, frame in enumerate(frames):
        if frame.function.endswith("_bootstrap") and "/multiprocessing/" in frame.file:
            return frames[: index + 1]
    return frames


def _format_thread_name(pid: int, name: str, frames: Sequence[Frame] = ()) -> str:
    if any(frame.file.endswith("torch/utils/data/_utils/worker.py") for frame in frames):
        return f"DataLoader worker (pid {pid})"
    return f"child process {name} (pid {pid})"


def read_callers(reader: RingReader | None) -> tuple[Caller, ...]:
    """The threads that made the calls in a ring; none if it cannot be read."""
    if reader is None:
        return ()
    try:
        return reader.read_callers()
    except Exception:  # the ring is corrupt, which the reading of its state reports
        return ()


def describe_newest_call(reader: RingReader | None) -> str:
    """The newest call in a ring and its line; empty if it cannot be read."""
    if reader is None:
        return ""
    try:
        call = reader.read_newest_call(time.monotonic_ns())
    except Exception:  # the ring is corrupt, which the reading of its state reports
        return ""
    if call is None:
        return ""
    return call.signature.op if call.site is None else f"{call.signature.op} at {call.site}"


def mark_callers(
    threads: Iterable[ThreadStack], pid: int, callers: Sequence[Caller]
) -> tuple[ThreadStack, ...]:
    """The stacks, with what is known of the calls that their threads made.

    faulthandler, and py-spy for Python before 3.11, may not give the ids of threads. Then a caller
    that is not the main thread must be the only other thread in the user's code.
    """
    by_tid = {caller.thread: recency for recency, caller in enumerate(callers)}
    marked: list[ThreadStack] = []
    for thread in threads:
        tid = pid if thread.main else thread.tid
        marked.append(_mark_caller(thread, by_tid.get(tid or 0), callers))
    if any(thread.tid for thread in marked if not thread.main):
        return tuple(marked)
    unmatched = [recency for tid, recency in by_tid.items() if tid != pid]
    others = [
        index for index, thread in enumerate(marked) if not thread.main and runs_user_code(thread)
    ]
    if unmatched and len(others) == 1:
        marked[others[0]] = _mark_caller(marked[others[0]], unmatched[0], callers)
    return tuple(marked)


def _mark_caller(
    thread: ThreadStack, recency: int | None, callers: Sequence[Caller]
) -> ThreadStack:
    if recency is None:
        return thread
    return replace(thread, call_recency=recency, called_uids=callers[recency].uids)


MAX_INNERMOST_FRAMES = 8  # of each thread; and the innermost frame of user code
_MAX_LINE_CHARS = 200
_MAX_FILE_BYTES = 4 << 20
_MAX_PARSED_LINES = 10_000  # longer files are not parsed
_COMPLETION_METHOD = "is_completed"  # of a Work


def add_source_text(
    threads: Iterable[ThreadStack], pid: int, proc: str = processes.PROC_ROOT
) -> tuple[ThreadStack, ...]:
    """The stacks with the source text of their innermost frames and of the innermost frame of user
    code, as far as the files can be read.

    The text may be wrong if a file was edited after it was loaded.
    """
    files: dict[str, list[str]] = {}

    def add_frame_text(frame: Frame) -> Frame:
        if frame.file not in files:
            files[frame.file] = _read_lines(frame.file, pid, proc)
        lines = files[frame.file]
        if not 0 < frame.line <= len(lines):
            return frame
        handler, polls = _find_enclosing_blocks(frame, lines)
        return replace(
            frame,
            text=lines[frame.line - 1].strip()[:_MAX_LINE_CHARS],
            handler=handler,
            polls=polls,
        )

    def add_thread_text(thread: ThreadStack) -> ThreadStack:
        # It may be further out: a DataLoader or an import alone adds more than the limit.
        user_frame = find_innermost_user_frame(thread.frames)
        frames = list(thread.frames)
        for index, frame in enumerate(frames):
            if index < MAX_INNERMOST_FRAMES or frame is user_frame:
                frames[index] = add_frame_text(frame)
        return replace(thread, frames=tuple(frames))

    return tuple(map(add_thread_text, threads))


def _find_enclosing_blocks(frame: Frame, lines: list[str]) -> tuple[str | None, str | None]:
    """For a line of user code: the ``except`` line of the innermost handler around it, and the
    ``while`` line of the innermost loop around it that polls whether a Work is complete.
    """
    has_handler = any(line.lstrip().startswith("except") for line in lines[: frame.line])
    has_polling = any(_COMPLETION_METHOD in line for line in lines)
    if not has_handler and not has_polling:
        return None, None
    if len(lines) > _MAX_PARSED_LINES or not is_user_frame(frame):
        return None, None
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of another Python, or edited
        return None, None
    handler_lines: list[int] = []
    loop_lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.body[0].lineno <= frame.line <= (node.end_lineno or node.lineno):
                handler_lines.append(node.lineno)
        elif isinstance(node, ast.While):
            last_line = node.body[-1].end_lineno or node.lineno
            if node.lineno <= frame.line <= last_line and _polls_completion(node.test):
                loop_lines.append(node.lineno)
    return _format_line(handler_lines, lines), _format_line(loop_lines, lines)


def _polls_completion(test: ast.expr) -> bool:
    """The condition of a loop tests whether a Work is complete."""
    attributes = [node for node in ast.walk(test) if isinstance(node, ast.Attribute)]
    return any(attribute.attr == _COMPLETION_METHOD for attribute in attributes)


def _format_line(numbers: list[int], lines: list[str]) -> str | None:
    if not numbers:
        return None
    innermost = lines[max(numbers) - 1]
    return innermost.strip().rstrip(":")[:_MAX_LINE_CHARS]


def _read_lines(file: str, pid: int, proc: str) -> list[str]:
    """Reads a file below the process's own root and folder, which may be a container's. Only
    regular Python files: anything else may block.
    """
    if not file.endswith(".py"):
        return []
    own_path = f"{proc}/{pid}/root{file}" if file.startswith("/") else f"{proc}/{pid}/cwd/{file}"
    for path in (own_path, file):  # the process's root is not accessible without ptrace permission
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as opened:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_FILE_BYTES:
                return opened.read().decode(errors="replace").splitlines()
    return []
