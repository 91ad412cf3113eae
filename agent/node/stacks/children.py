"""The stacks of the processes that a rank's main thread waits for: workers of a DataLoader, of a
pool, and what it started itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.stacks.activities import classify_activity

from ..system import processes
from . import source
from .pyspy import PySpy, PySpyError

MOST = 8  # children of one rank
_DEPTH = 2  # a fork server's children count as the rank's
_NONE_OF_ITS = (
    "hangwatch.agent.node.main",
    "multiprocessing.resource_tracker",
    "torch._inductor.compile_worker",
    "torch_shm_manager",
)


def awaited(threads: Sequence[ThreadStack], pid: int, pyspy: PySpy) -> tuple[ThreadStack, ...]:
    """The main threads of the children that a rank with these stacks waits for; none where it waits
    for something else.

    Its own children come first, the newest of them foremost: that is most likely whom it waits for.
    Of many, those that run now.
    """
    waits = classify_activity(next((t for t in threads if t.main), None)).waits
    if waits is None or not waits.waits_for_child:
        return ()
    found = list(_descendants(pid, pyspy.proc, _DEPTH))[
        ::-1
    ]  # the kernel lists them as they were born, which a tick may not tell apart
    many = len(found) > MOST
    found.sort(
        key=lambda child: (not child.own, many and child.stat.state != "R", -child.stat.start_ticks)
    )
    return tuple(_look(child, pyspy) for child in found[:MOST])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """``own``: the rank started it itself, or had its fork server do so."""

    pid: int
    stat: processes.Stat
    own: bool


def _descendants(pid: int, proc: str, depth: int, own: bool = True) -> Iterator[_Child]:
    for child in processes.children(pid, proc):
        try:
            command = " ".join(processes.read_cmdline(child, proc))
            stat = processes.read_stat(child, proc)
        except (OSError, ValueError):  # it ends just now
            continue
        if stat.state in "ZX" or any(mark in command for mark in _NONE_OF_ITS):
            continue
        server = "multiprocessing.forkserver" in command
        if not server or not processes.children(
            child, proc
        ):  # without any yet, it imports what they are to have
            yield _Child(pid=child, stat=stat, own=own)
        if depth > 1:
            yield from _descendants(child, proc, depth - 1, own=server)


def _look(child: _Child, pyspy: PySpy) -> ThreadStack:
    stack = _stack(child.pid, child.stat, pyspy)
    if not child.own:
        return replace(stack, cpu_s=None, ready_s=None)
    cpu_s, ready_s = processes.tree_use_s(child.pid, pyspy.proc)
    return replace(stack, cpu_s=cpu_s, ready_s=ready_s)


def _stack(pid: int, stat: processes.Stat, pyspy: PySpy) -> ThreadStack:
    name = "process"
    try:
        name = os.path.basename(processes.read_cmdline(pid, pyspy.proc)[0])[:60] or name
        if not name.startswith("python"):
            raise PySpyError(
                f"{name} is no Python: cat /proc/{pid}/stack or gdb -p {pid} on its host says where"
                " it is"
            )
        dump = pyspy.dump(pid, stat.start_ticks)
    except (OSError, ValueError):
        return ThreadStack(
            thread=_named(pid, name), frames=(), pid=pid, error="the process has ended"
        )
    except PySpyError as error:
        return ThreadStack(thread=_named(pid, name), frames=(), pid=pid, error=str(error))
    (main,) = source.with_text(dump.threads[:1], pid, pyspy.proc)
    frames = _own(main.frames)
    return replace(main, thread=_named(pid, name, frames), frames=frames, main=False, pid=pid)


def _own(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Without those of the parent, which a forked child still has on its stack."""
    born = next(
        (
            i
            for i, f in enumerate(frames)
            if f.function.endswith("_bootstrap") and "/multiprocessing/" in f.file
        ),
        len(frames),
    )
    return frames[: born + 1]


def _named(pid: int, name: str, frames: Sequence[Frame] = ()) -> str:
    worker = any(f.file.endswith("torch/utils/data/_utils/worker.py") for f in frames)
    return f"{'DataLoader worker' if worker else f'child process {name}'} (pid {pid})"
