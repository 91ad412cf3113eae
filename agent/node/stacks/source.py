"""The source lines that stacks speak of, and what these are in, read where the process would read
them.
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterable
from dataclasses import replace

from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.stacks.frames import find_innermost_user_frame, is_user_frame

from ..system import processes

MAX_INNERMOST_FRAMES = 8  # frames a thread whose lines are told, and the user's innermost
_MAX_LINE_CHARS = 200  # characters
_MAX_FILE_BYTES = 4 << 20  # bytes of a file
_MAX_PARSED_LINES = 10_000  # lines of a file that is looked through for what is around one
_COMPLETION_METHOD = "is_completed"  # of a Work


def add_source_text(
    threads: Iterable[ThreadStack], pid: int, proc: str = processes.PROC_ROOT
) -> tuple[ThreadStack, ...]:
    """The stacks with the text of their innermost lines and of the user's innermost one, as far as
    the files can be read.

    A file that was edited since it was loaded gives another line than the one that runs: it is told
    all the same.
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
        mine = find_innermost_user_frame(
            thread.frames
        )  # a DataLoader or an import alone puts more frames before it
        return replace(
            thread,
            frames=tuple(
                add_frame_text(f) if n < MAX_INNERMOST_FRAMES or f is mine else f
                for n, f in enumerate(thread.frames)
            ),
        )

    return tuple(map(add_thread_text, threads))


def _find_enclosing_blocks(frame: Frame, lines: list[str]) -> tuple[str | None, str | None]:
    """Of a line of the user's: the ``except`` line of the innermost handler around it, and the
    ``while`` line of the innermost loop around it that goes on until a Work is complete.
    """
    handled = any(line.lstrip().startswith("except") for line in lines[: frame.line])
    polled = any(_COMPLETION_METHOD in line for line in lines)
    if not (handled or polled) or len(lines) > _MAX_PARSED_LINES or not is_user_frame(frame):
        return None, None
    try:
        tree = ast.parse("\n".join(lines))
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # another Python's, or half-edited
        return None, None
    handlers, loops = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.body[0].lineno <= frame.line <= (
            node.end_lineno or node.lineno
        ):
            handlers.append(node.lineno)
        elif (
            isinstance(node, ast.While)
            and node.lineno <= frame.line <= (node.body[-1].end_lineno or node.lineno)
            and _polls_completion(node.test)
        ):
            loops.append(node.lineno)
    return _format_line(handlers, lines), _format_line(loops, lines)


def _polls_completion(test: ast.expr) -> bool:
    """Whether a Work is complete."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == _COMPLETION_METHOD
        for node in ast.walk(test)
    )


def _format_line(numbers: list[int], lines: list[str]) -> str | None:
    return lines[max(numbers) - 1].strip().rstrip(":")[:_MAX_LINE_CHARS] if numbers else None


def _read_lines(file: str, pid: int, proc: str) -> list[str]:
    """Through the process's own root and folder, which may be a container's. Only plain Python
    files: anything else may block.
    """
    if not file.endswith(".py"):
        return []
    own = f"{proc}/{pid}/root{file}" if file.startswith("/") else f"{proc}/{pid}/cwd/{file}"
    for path in (own, file):  # another's root may not be looked into without the right to trace it
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as f:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_size <= _MAX_FILE_BYTES:
                return f.read().decode(errors="replace").splitlines()
    return []
