"""Takes stacks with py-spy: within a time limit, and so that the process continues to run whatever
happens to py-spy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hangwatch.model.threads import Frame, ThreadStack

from ..system import permission, processes

DUMP_TIMEOUT_S = 5.0
NATIVE_DUMP_TIMEOUT_S = 20.0  # the first native dump reads the symbols of every library
_RESUME_TIMEOUT_S = 0.5  # /proc may show a process as stopped for this long after py-spy detached
_MAX_FRAMES = 500

# In py-spy's messages, in lower case.
_PERMISSION_MARKS = (
    "permission denied",
    "os error 13",
    "os error 1)",
    "operation not permitted",
)
_ENDED_MARKS = ("os error 2)", "os error 3)", "no such process")
_VERSION_MARKS = ("python version", "version of python", "unsupported version")


class PySpyError(Exception):
    """py-spy failed. The message says why and what to do; ``is_permanent`` if it would fail again."""

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


@dataclass(frozen=True, slots=True, kw_only=True)
class PySpyDump:
    threads: tuple[ThreadStack, ...]
    was_continued: bool = False  # the process had been left stopped and was continued


def locate_pyspy() -> str | None:
    """The path of py-spy: beside this Python, else on PATH; None if it is not installed."""
    path = Path(sys.executable).with_name("py-spy")
    return str(path) if os.access(path, os.X_OK) else shutil.which("py-spy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PySpy:
    """Runs the py-spy at ``path``."""

    path: str | None
    proc: str = processes.PROC_ROOT
    timeout_s: float = DUMP_TIMEOUT_S
    native_timeout_s: float = NATIVE_DUMP_TIMEOUT_S

    def dump_stacks(
        self, pid: int, start_ticks: int, *, native: bool = False, nonblocking: bool = False
    ) -> PySpyDump:
        """The stacks of one process. With ``nonblocking`` it is not paused. Raises PySpyError."""
        if self.path is None:
            raise PySpyError("py-spy is not installed: pip install py-spy", is_permanent=True)
        before = self.read_state(pid, start_ticks)
        if before == "D":
            raise PySpyError(
                "in uninterruptible sleep (state D): it cannot be paused. It waits in the kernel,"
                f" for a disk, a network file system or a driver: see /proc/{pid}/stack and dmesg"
                " on its host"
            )
        is_stopped = before in "Tt"
        command = [self.path, "dump", "--pid", str(pid), "--json", "--full-filenames"]
        if native:
            command.append("--native")
        elif is_stopped or nonblocking:
            command.append("--nonblocking")
        timeout_s = self.native_timeout_s if native else self.timeout_s
        was_continued = False
        try:
            output = self._run_pyspy(command, timeout_s)
        finally:
            if not is_stopped:
                was_continued = self.ensure_running(pid, start_ticks)
        threads = tuple(self._add_cpu_times(stack, pid) for stack in parse_dump(output))
        return PySpyDump(threads=threads, was_continued=was_continued)

    def _add_cpu_times(self, stack: ThreadStack, pid: int) -> ThreadStack:
        try:
            ticks = processes.read_thread_stat(pid, stack.tid or 0, self.proc).cpu_ticks
        except (OSError, ValueError):  # it has ended, or py-spy does not know its thread id
            return stack
        turns = processes.read_schedstat(pid, stack.tid or 0, self.proc)
        return replace(
            stack,
            cpu_s=ticks / processes.TICKS_PER_S,
            ready_s=processes.parse_ready_ns(turns) / 1e9,
        )

    def _run_pyspy(self, command: list[str], timeout_s: float) -> bytes:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PySpyError(
                f"py-spy took more than {timeout_s:g} s and was killed; the host may be overloaded:"
                " try again with hangwatch dump"
            ) from None
        except OSError as error:
            raise PySpyError(
                f"{self.path} cannot be run ({error.strerror}): pip install --force-reinstall"
                " py-spy",
                is_permanent=True,
            ) from error
        if done.returncode:
            raise explain_failure(done.stderr.decode(errors="replace"), self.proc)
        return done.stdout

    def read_state(self, pid: int, start_ticks: int) -> str:
        """The state in /proc. Raises PySpyError if the process has ended."""
        try:
            stat = processes.read_stat(pid, self.proc)
        except (OSError, ValueError):
            stat = None
        if stat is None or stat.start_ticks != start_ticks or stat.state in "ZX":
            raise PySpyError("the process has ended")
        return stat.state

    def ensure_running(self, pid: int, start_ticks: int) -> bool:
        """Continues a process that py-spy left stopped. Returns True if that was necessary."""
        deadline = time.monotonic() + _RESUME_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if self.read_state(pid, start_ticks) not in "Tt":
                    return False
            except PySpyError:  # it has ended
                return False
            time.sleep(0.02)
        with contextlib.suppress(OSError):  # it ended just now
            os.kill(pid, signal.SIGCONT)
        return True


def explain_failure(stderr: str, proc: str = processes.PROC_ROOT) -> PySpyError:
    """The error for py-spy's output on stderr, with the remedy."""
    text = stderr.partition("Stack backtrace:")[0]
    reason = " ".join(text.split())[:300] or "no reason given"
    lower = text.lower()
    if any(mark in lower for mark in _PERMISSION_MARKS):
        return PySpyError(permission.format_refusal(proc), is_permanent=True)
    if any(mark in lower for mark in _ENDED_MARKS):
        return PySpyError("the process has ended")
    if any(mark in lower for mark in _VERSION_MARKS):
        return PySpyError(
            f"py-spy does not know this Python: pip install --upgrade py-spy ({reason})",
            is_permanent=True,
        )
    if "failed to find" in lower and "python" in lower:
        return PySpyError(
            "not a Python process that py-spy can read: pip install --upgrade py-spy may help"
            f" ({reason})",
            is_permanent=True,
        )
    return PySpyError(f"py-spy failed: {reason}")


def parse_dump(output: bytes) -> tuple[ThreadStack, ...]:
    """The stacks in py-spy's JSON, main thread first; frames run from the innermost outwards, as in
    the JSON. Raises PySpyError.
    """
    try:
        stacks = [_parse_thread(thread) for thread in json.loads(output)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PySpyError(
            f"py-spy's output is not understood ({error!r}): pip install --upgrade py-spy"
        ) from error
    if not any(stack.main for stack in stacks):
        stacks = [
            mark_as_main(stack) if stack.thread == "MainThread" else stack for stack in stacks
        ]
    return tuple(sorted(stacks, key=lambda stack: not stack.main))


def mark_as_main(stack: ThreadStack) -> ThreadStack:
    """A copy of the stack that is marked as the main thread's."""
    return replace(stack, main=True)


def _parse_thread(data: dict[str, Any]) -> ThreadStack:
    is_main = data.get("os_thread_id") == data["pid"]
    name = data.get("thread_name")
    if not name:
        number = data.get("os_thread_id") or data.get("thread_id")
        name = "MainThread" if is_main else f"thread {number}"
    return ThreadStack(
        thread=str(name),
        frames=tuple(_parse_frame(frame) for frame in data["frames"][:_MAX_FRAMES]),
        main=is_main,
        active=bool(data.get("active")),
        holds_gil=bool(data.get("owns_gil")),
        tid=data.get("os_thread_id"),
    )


def _parse_frame(data: dict[str, Any]) -> Frame:
    return Frame(function=str(data["name"]), file=str(data["filename"]), line=int(data["line"]))
