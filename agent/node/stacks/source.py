"""Adds source lines to stacks, with the ``except`` and ``while`` lines around them, from the files
as the process sees them.
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
