"""Frames and the stacks of threads."""

from __future__ import annotations

from dataclasses import dataclass

RECORDER_THREAD_NAME = "hangwatch"  # our own thread in the training process


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    function: str
    file: str
    line: int
    # The next three are only set for the innermost frames, if the node agent can read the source.
    text: str | None = None  # the source line
    handler: str | None = None  # the ``except`` line of the enclosing exception handler
    polls: str | None = None  # the ``while`` line of an enclosing loop that waits for a Work


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread's stack, innermost frame first."""

    thread: str
    frames: tuple[Frame, ...]
    main: bool = False
    active: bool | None = None  # on a CPU when sampled; None if unknown
    holds_gil: bool | None = None
    pid: int | None = None  # of a child process that the rank waits for; None: the rank itself
    error: str | None = None  # why that child's frames are missing, with the remedy
    tid: int | None = None  # the operating system's thread id
    # CPU time used; for a direct child of the rank, including the child's descendants.
    cpu_s: float | None = None
    # Time ready to run but without a CPU, counted like `cpu_s`.
    ready_s: float | None = None
    # 0 for the thread that made the process's newest call, 1 for the thread whose newest call was
    # the last one before that, and so on; None: no call by it is known.
    call_recency: int | None = None
    called_uids: tuple[int, ...] = ()  # the streams whose newest call it made
