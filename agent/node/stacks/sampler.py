"""Takes the stacks of a rank, with everything that the diagnosis reads in them.

Separate threads do it, at most two at a time on a host, so that the node agent's loop never waits for
them. A sample has the threads of the rank, by py-spy or by the rank itself; marks on those that make
its calls; the main threads of child processes that the rank waits for (workers of a DataLoader or a
pool, and processes that it started itself); and source lines, with the ``except`` and ``while`` lines
around them.
"""

from __future__ import annotations

import ast
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.protocol.commands import Command
from hangwatch.protocol.heartbeat import StackReply
from hangwatch.ring.reader import Caller
from hangwatch.stacks.activities import LOCK, classify_activity, find_calling_thread
from hangwatch.stacks.frames import find_innermost_user_frame, is_user_frame, runs_user_code

from ..system import permission, processes
from ..system.awaited import Awaited, find_holders, read_awaited
from ..system.processes import ThreadStacks
from ..system.runtime import OrderWorker
from ..system.transfers import TransferMeter
from . import faulthandler_dumps
from .device_holds import mark_device_hold
from .pyspy import PySpy, PySpyError

MAX_CONCURRENT_DUMPS = 2
MAX_WAITING_ORDERS = 256
_CHECKS_PATH = f"{Path(__file__).resolve().parents[2] / 'recorder' / 'checks'}/"

MAX_CHILDREN = 8  # a rank with more is sampled in part
_MAX_DEPTH = 2  # a fork server's children count as the rank's
_IGNORED_COMMANDS = (
    "hangwatch.agent.node.main",
    "multiprocessing.resource_tracker",
    "torch._inductor.compile_worker",
    "torch_shm_manager",
)

MAX_INNERMOST_FRAMES = 8  # frames of a thread with source text, besides one of user code
_MAX_LINE_CHARS = 200
_MAX_FILE_BYTES = 4 << 20
_MAX_PARSED_LINES = 10_000  # longer files are not parsed
_COMPLETION_METHOD = "is_completed"  # the method of a Work that polls


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An order for the stacks of a process or, without a command, for a check of py-spy."""

    command: Command | None
    key: str
    pid: int
    start_ticks: int
    ring_path: Path | None  # the process writes its stacks beside its ring, if it has one
    registration: faulthandler_dumps.FaulthandlerRegistration | None
    callers: tuple[Caller, ...]  # the threads that make its calls
    newest_call: str  # this call is reported with its line where stacks cannot be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """``refusal`` is the reason why py-spy will never work for this process; None if it may work."""

    key: str
    sample: StackReply | None = None
    taken_ns: int = 0
    refusal: str | None = None


class ProcessLocks:
    """A lock for each process, so that only one debugger of the node agent attaches to it at a time."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}

    def get_lock(self, key: str) -> threading.Lock:
        return self._locks.setdefault(key, threading.Lock())


class StackSampler(OrderWorker[SampleOrder, SampleResult]):
    """The threads that take stacks."""

    def __init__(
        self, pyspy: PySpy, wake: Callable[[], None], preempt_recording: Callable[[str], None]
    ) -> None:
        """``preempt_recording`` ends the recording that would keep py-spy from attaching to the
        process with that key, and waits until it has ended.
        """
        super().__init__(
            "sampler", wake, max_waiting=MAX_WAITING_ORDERS, thread_count=MAX_CONCURRENT_DUMPS
        )
        self._pyspy = pyspy
        self._preempt_recording = preempt_recording
        self._meter = TransferMeter(pyspy.proc)
        self.locks = ProcessLocks()

    def explain_failure(self, order: SampleOrder, error: str) -> SampleResult | None:
        if order.command is None:
            return None
        problem = f"hangwatch failed to take stacks: {error}; please report this"
        failed = make_stack_reply(order.command, problem)
        return SampleResult(key=order.key, sample=failed, taken_ns=time.monotonic_ns())

    def _probe_access(self, order: SampleOrder) -> SampleResult:
        """Tries py-spy without a pause, to know of a refusal before stacks are needed."""
        proc = self._pyspy.proc
        refusal = None
        try:
            if self._pyspy.path and (
                not permission.may_read_memory(order.pid)
                or permission.read_ptrace_facts(proc).is_ptrace_filtered
            ):
                refusal = permission.format_refusal(proc)
            else:
                self._pyspy.dump_stacks(order.pid, order.start_ticks, nonblocking=True)
        except ProcessLookupError:
            pass  # the process has ended
        except PySpyError as error:
            refusal = str(error) if error.is_permanent else None
        return SampleResult(key=order.key, refusal=refusal)

    def execute_order(self, order: SampleOrder) -> SampleResult:
        """The stacks that py-spy reads or, if it fails, that the process writes itself."""
        # Two dumps that a process writes itself share a file, too.
        with self.locks.get_lock(order.key):
            if order.command is None:
                return self._probe_access(order)
            return self._take_sample(order, order.command)

    def _take_sample(self, order: SampleOrder, command: Command) -> SampleResult:
        self._preempt_recording(order.key)
        taken_ns = time.monotonic_ns()
        try:
            threads = self._pyspy.dump_stacks(order.pid, order.start_ticks, native=command.native)
            threads = self._annotate_threads(threads, order, command, with_children=True)
            sample = replace(make_stack_reply(command), threads=threads)
            return SampleResult(key=order.key, sample=sample, taken_ns=taken_ns)
        except PySpyError as error:
            problem = str(error)
            refusal = problem if error.is_permanent else None
        sample = make_stack_reply(command)
        if order.registration is not None and order.ring_path is not None:
            try:
                taken_ns = time.monotonic_ns()
                dump = faulthandler_dumps.request_stacks(
                    order.pid,
                    order.start_ticks,
                    order.ring_path,
                    order.registration,
                    proc=self._pyspy.proc,
                )
                threads = self._annotate_threads(dump.threads, order, command, with_children=False)
                sample = replace(sample, source="faulthandler", threads=threads)
                if dump.note:
                    problem += f"; {dump.note}"
            except faulthandler_dumps.FaultStacksError as error:
                problem += f"; and faulthandler: {error}"
                if order.newest_call:
                    problem += f"; the newest recorded call is {order.newest_call}"
        sample = replace(sample, error=problem)
        return SampleResult(key=order.key, sample=sample, taken_ns=taken_ns, refusal=refusal)

    def _annotate_threads(
        self,
        threads: ThreadStacks,
        order: SampleOrder,
        command: Command,
        *,
        with_children: bool,
    ) -> ThreadStacks:
        """The stacks with all that is known of their threads, and those of child processes."""
        pid, proc = order.pid, self._pyspy.proc
        threads = mark_callers(threads, pid, order.callers)
        if command.device:
            threads = mark_device_hold(threads, pid, self._pyspy)
        threads = add_source_text(threads, pid, proc)
        tids = {pid if thread.main else thread.tid for thread in threads}
        awaited = {tid: read_awaited(pid, tid, proc) for tid in tids if tid}
        threads = self._meter.measure_threads(threads, pid, awaited)
        if with_children:
            threads += collect_child_stacks(threads, pid, self._pyspy, self._meter, awaited)
        return threads


def make_stack_reply(command: Command, error: str | None = None) -> StackReply:
    """A reply without stacks yet, as by py-spy."""
    return StackReply(
        key=command.key, request=command.id, source="py-spy", native=command.native, error=error
    )


def collect_child_stacks(
    threads: Sequence[ThreadStack],
    pid: int,
    pyspy: PySpy,
    meter: TransferMeter,
    awaited_by_tid: Mapping[int, Awaited],
) -> ThreadStacks:
    """The main threads of the children that a rank with these stacks waits for, by what its stack or the
    system calls of its threads show; empty if it waits for something else.

    Those that a thread waits for come first, then the rank's own children, with the newest of them at the
    front: most likely the rank waits for that one. If there are many, running ones are preferred.
    """
    caller = find_calling_thread(threads)
    waits = classify_activity(caller).waits
    caller_tid = caller and (pid if caller.main else caller.tid)
    # Another thread may wait for a child, and the calling thread for that one.
    waits_for_thread = waits.waits_for_thread and waits is not LOCK
    relevant = {}
    for tid, awaited in awaited_by_tid.items():
        is_known = awaited.descriptors or awaited.child or awaited.address
        if is_known and (tid == caller_tid or waits_for_thread):
            relevant[tid] = awaited
    if not (waits.waits_for_child or relevant):
        return ()
    children = list(_iter_descendants(pid, pyspy.proc, _MAX_DEPTH))
    pids = {child.pid for child in children}
    holders = find_holders(relevant, pid, pids, pyspy.proc) if relevant and children else {}
    if not waits.waits_for_child:
        children = [child for child in children if child.pid in holders]
    children.reverse()  # the kernel lists the oldest first; start ticks may be equal
    is_selection = len(children) > MAX_CHILDREN
    children.sort(
        key=lambda child: (
            child.pid not in holders,
            not child.is_own,
            is_selection and child.stat.state != "R",
            -child.stat.start_ticks,
        )
    )
    stacks = []
    for child in children[:MAX_CHILDREN]:
        stack = _read_stack(child, pyspy)
        if child.is_own:
            stack = replace(stack, moved_bytes=meter.measure_tree(child.pid, pid))
        stacks.append(replace(stack, awaited_by=holders.get(child.pid, ())))
    return tuple(stacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChildProcess:
    """A descendant of a rank; ``is_own`` if the rank started it itself, or through its fork server."""

    pid: int
    program: str  # the name of its file
    stat: processes.ProcStat
    is_own: bool


def _iter_descendants(
    pid: int, proc: str, depth: int, is_own: bool = True
) -> Iterator[_ChildProcess]:
    for child in processes.list_children(pid, proc):
        try:
            arguments = processes.read_cmdline(child, proc)
            stat = processes.read_stat(child, proc)
        except (OSError, ValueError):  # the child has just ended
            continue
        command = " ".join(arguments)
        if stat.state in "ZX" or any(mark in command for mark in _IGNORED_COMMANDS):
            continue
        is_fork_server = "multiprocessing.forkserver" in command
        # A fork server without children still imports modules for them: the rank waits for that.
        if not is_fork_server or not processes.list_children(child, proc):
            program = os.path.basename(arguments[0])[:60] or "process"
            yield _ChildProcess(pid=child, program=program, stat=stat, is_own=is_own)
        if depth > 1:
            yield from _iter_descendants(child, proc, depth - 1, is_own=is_fork_server)


def _read_stack(child: _ChildProcess, pyspy: PySpy) -> ThreadStack:
    pid = child.pid
    main = ThreadStack(thread="", frames=())
    if child.program.startswith("python"):
        try:
            threads = pyspy.dump_stacks(pid, child.stat.start_ticks)
            main = next(iter(add_source_text(threads[:1], pid, pyspy.proc)), main)
        except PySpyError as error:
            main = replace(main, error=str(error))
    else:
        reason = (
            f"{child.program} is not a Python process: cat /proc/{pid}/stack or gdb -p {pid} on its"
            " host shows where it is"
        )
        main = replace(main, error=reason)
    frames = _drop_parent_frames(main.frames)
    title = f"child process {child.program} (pid {pid})"
    if any(frame.file.endswith("torch/utils/data/_utils/worker.py") for frame in frames):
        title = f"DataLoader worker (pid {pid})"
    cpu_s, ready_s = None, None
    if child.is_own:
        cpu_s, ready_s = processes.read_tree_usage_s(pid, pyspy.proc)
    return replace(
        main,
        thread=title,
        frames=frames,
        main=False,
        pid=pid,
        cpu_s=cpu_s,
        ready_s=ready_s,
    )


def _drop_parent_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Drops the parent's frames, which a forked child still has on its stack."""
    for index, frame in enumerate(frames):
        if frame.function.endswith("_bootstrap") and "/multiprocess" in frame.file:
            return frames[: index + 1]
    return frames


def mark_callers(
    threads: Sequence[ThreadStack], pid: int, callers: Sequence[Caller]
) -> ThreadStacks:
    """The stacks, with what is known of the calls that their threads made.

    faulthandler, and py-spy for Python before 3.11, may not give the ids of threads. Then a caller
    that is not the main thread must be the only other thread in the user's code.
    """
    likely_caller: ThreadStack | None = None
    others = [thread for thread in threads if not thread.main]
    if not any(thread.tid for thread in others):
        in_user_code = [thread for thread in others if runs_user_code(thread)]
        if len(in_user_code) == 1:
            likely_caller = in_user_code[0]
    marked = []
    for thread in threads:
        own_tid = pid if thread.main else thread.tid
        stack = thread
        for recency, caller in enumerate(callers):
            is_likely = thread is likely_caller and caller.thread != pid
            if caller.thread == own_tid or is_likely:
                stack = replace(thread, call_recency=recency, called_uids=caller.uids)
                break
        marked.append(stack)
    return tuple(marked)


def add_source_text(
    threads: Iterable[ThreadStack], pid: int, proc: str = processes.PROC_ROOT
) -> ThreadStacks:
    """The stacks with the source text of their innermost frames and of the innermost frame of user
    code, as far as the files can be read; without the frames of the checks, which only pass a call
    on. The text may be wrong if a file was edited after it was loaded.
    """
    files: dict[str, list[str]] = {}
    stacks = []
    for thread in threads:
        # The user's frame may be further out: a DataLoader or an import alone adds many frames.
        user_frame = find_innermost_user_frame(thread.frames)
        frames = list(thread.frames)
        for index, frame in enumerate(frames):
            if index >= MAX_INNERMOST_FRAMES and frame is not user_frame:
                continue
            if frame.file not in files:
                files[frame.file] = _read_lines(frame.file, pid, proc)
            lines = files[frame.file]
            if 0 < frame.line <= len(lines):
                text = lines[frame.line - 1].strip()[:_MAX_LINE_CHARS]
                handler, polls = _find_enclosing_blocks(frame, lines)
                frames[index] = replace(frame, text=text, handler=handler, polls=polls)
        shown = [frame for frame in frames if not frame.file.startswith(_CHECKS_PATH)]
        stacks.append(replace(thread, frames=tuple(shown)))
    return tuple(stacks)


def _find_enclosing_blocks(frame: Frame, lines: list[str]) -> tuple[str | None, str | None]:
    """The ``except`` line of the innermost handler around a line of user code, and the ``while`` line of
    the innermost loop around it that polls whether a Work is complete.
    """
    has_handler = any(line.lstrip().startswith("except") for line in lines[: frame.line])
    has_polling = any(_COMPLETION_METHOD in line for line in lines)
    if not has_handler and not has_polling:
        return None, None
    if len(lines) > _MAX_PARSED_LINES or not is_user_frame(frame):
        return None, None
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None, None  # the file is for another Python, or it was edited
    handler_line = loop_line = 0  # the innermost of each kind
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.body[0].lineno <= frame.line <= (node.end_lineno or node.lineno):
                handler_line = max(handler_line, node.lineno)
        elif isinstance(node, ast.While):
            last_line = node.body[-1].end_lineno or node.lineno
            attributes = [getattr(part, "attr", "") for part in ast.walk(node.test)]
            if node.lineno <= frame.line <= last_line and _COMPLETION_METHOD in attributes:
                loop_line = max(loop_line, node.lineno)
    return _format_line(handler_line, lines), _format_line(loop_line, lines)


def _format_line(number: int, lines: list[str]) -> str | None:
    if not number:
        return None
    return lines[number - 1].strip().rstrip(":")[:_MAX_LINE_CHARS]


def _read_lines(file: str, pid: int, proc: str) -> list[str]:
    """Reads a file below the process's own root and folder, which may be a container's. Only regular
    Python files are read, since anything else may block.
    """
    if not file.endswith(".py"):
        return []
    folder = "root" if file.startswith("/") else "cwd/"
    # Without ptrace permission, the process's root cannot be read.
    for path in (f"{proc}/{pid}/{folder}{file}", file):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as opened:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_FILE_BYTES:
                return opened.read().decode(errors="replace").splitlines()
    return []
