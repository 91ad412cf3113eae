"""Takes the stacks of the child processes that a rank's calling thread waits for: workers of a
DataLoader or a pool, and processes that it started itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.stacks.activities import classify_activity
from hangwatch.stacks.calling_thread import find_calling_thread

from ..system import processes
from . import source
from .pyspy import PySpy, PySpyError

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
    (main,) = source.add_source_text(dump.threads[:1], pid, pyspy.proc)
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
