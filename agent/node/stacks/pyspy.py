"""Stacks by py-spy: with a limit on its time, and so that the process runs on afterwards whatever
became of py-spy.
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
# a process may still be shown as stopped for so long after py-spy let go of it
_RESUME_TIMEOUT_S = 0.5
_MAX_FRAMES = 500


class PySpyError(Exception):
    """There are no stacks. The message says why and what to do. ``lasting``: it will not work the
    next time either.
    """

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


@dataclass(frozen=True, slots=True, kw_only=True)
class PySpyDump:
    threads: tuple[ThreadStack, ...]
    was_continued: bool = False  # the process had been left stopped and was continued


def locate_pyspy() -> str | None:
    """py-spy's path: installed beside this Python, else on PATH; None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


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
        """The stacks of one process; ``quiet`` does not pause it for that. Raises PySpyError."""
        if self.path is None:
            raise PySpyError("py-spy is not installed: pip install py-spy", is_permanent=True)
        before = self.read_state(pid, start_ticks)
        if before == "D":
            raise PySpyError(
                "in uninterruptible sleep (state D): it cannot be stopped to be read. It waits in"
                f" the kernel, for a disk, a network file system or a driver: see /proc/{pid}/stack"
                " and dmesg on its host"
            )
        stopped = before in "Tt"
        command = [self.path, "dump", "--pid", str(pid), "--json", "--full-filenames"]
        command += ["--native"] if native else []
        command += ["--nonblocking"] if (stopped or nonblocking) and not native else []
        limit = self.native_timeout_s if native else self.timeout_s
        continued = False
        try:
            output = self._run_pyspy(command, limit)
        finally:
            if not stopped:
                continued = self.ensure_running(pid, start_ticks)
        return PySpyDump(
            threads=tuple(self._add_cpu_times(stack, pid) for stack in parse_dump(output)),
            was_continued=continued,
        )

    def _add_cpu_times(self, stack: ThreadStack, pid: int) -> ThreadStack:
        try:
            ticks = processes.read_thread_stat(pid, stack.tid or 0, self.proc).cpu_ticks
        except (OSError, ValueError):  # it has ended, or py-spy cannot tell which it is
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
                " ask again with hangwatch dump"
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
        """As /proc has it. Raises PySpyError where the process has ended."""
        try:
            stat = processes.read_stat(pid, self.proc)
        except (OSError, ValueError):
            stat = None
        if stat is None or stat.start_ticks != start_ticks or stat.state in "ZX":
            raise PySpyError("the process has ended")
        return stat.state

    def ensure_running(self, pid: int, start_ticks: int) -> bool:
        """Continues a process that py-spy left stopped. True where that was needed."""
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
    """py-spy's complaint as an error that says what to do."""
    text = stderr.partition("Stack backtrace:")[0]
    said = (
        " ".join(line.strip() for line in text.splitlines() if line.strip())[:300]
        or "no reason given"
    )
    low = text.lower()
    if (
        "permission denied" in low
        or "os error 13" in low
        or "os error 1)" in low
        or "operation not permitted" in low
    ):
        return PySpyError(permission.format_refusal(proc), is_permanent=True)
    if "os error 2)" in low or "os error 3)" in low or "no such process" in low:
        return PySpyError("the process has ended")
    if "python version" in low or "version of python" in low or "unsupported version" in low:
        return PySpyError(
            f"py-spy does not know this Python: pip install --upgrade py-spy ({said})",
            is_permanent=True,
        )
    if "failed to find" in low and "python" in low:
        return PySpyError(
            "not a Python process that py-spy can read: pip install --upgrade py-spy may help"
            f" ({said})",
            is_permanent=True,
        )
    return PySpyError(f"py-spy failed: {said}")


def parse_dump(output: bytes) -> tuple[ThreadStack, ...]:
    """py-spy's JSON, main thread first. Its frames already run from the innermost outwards. Raises
    PySpyError.
    """
    try:
        told = json.loads(output)
        stacks = [_parse_thread(thread) for thread in told]
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
    """The same stack as the main thread's."""
    return replace(stack, main=True)


def _parse_thread(data: dict[str, Any]) -> ThreadStack:
    name = data.get("thread_name")
    main = data.get("os_thread_id") == data["pid"]
    number = data.get("os_thread_id") or data.get("thread_id")
    return ThreadStack(
        thread=str(name) if name else "MainThread" if main else f"thread {number}",
        frames=tuple(
            Frame(function=str(frame["name"]), file=str(frame["filename"]), line=int(frame["line"]))
            for frame in data["frames"][:_MAX_FRAMES]
        ),
        main=main,
        active=bool(data.get("active")),
        holds_gil=bool(data.get("owns_gil")),
        tid=data.get("os_thread_id"),
    )
