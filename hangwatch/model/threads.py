"""Frames and the stacks of threads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    function: str
    file: str
    line: int
    text: str | None = (
        None  # the source line, where the node agent could read it; told for the innermost frames
    )
    handler: str | None = (
        None  # the ``except`` line of the exception handler that this line is in, likewise
    )
    polls: str | None = (
        # the ``while`` line of a loop around it that goes on until a Work is complete, likewise
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread's stack, innermost frame first."""

    thread: str
    frames: tuple[Frame, ...]
    main: bool = False
    active: bool | None = None  # on the CPU when sampled; None where the source cannot tell
    holds_gil: bool | None = None
    pid: int | None = (
        None  # of a child process that the rank waits for; None: the rank's own thread
    )
    error: str | None = None  # why there are no frames of that child, with the remedy
    tid: int | None = None  # the system's number of it
    cpu_s: float | None = (
        # CPU time that it has used; of a child that the rank started itself, with all that it
        # started in turn
        None
    )
    ready_s: float | None = None  # for which it was ready to run and had no CPU, likewise
