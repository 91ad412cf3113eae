"""Takes stacks with py-spy: within a time limit, and so that the process continues to run whatever
happens to py-spy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hangwatch.model.ranks import RECORDER_THREAD_NAME, Frame, ThreadStack

from ..system import permission, processes, thread_waits
from ..system.processes import ThreadStacks

DUMP_TIMEOUT_S = 5.0
NATIVE_DUMP_TIMEOUT_S = 20.0  # the first native dump reads the symbols of every library
_MAX_FRAMES = 500
_UNDISTURBED_ATTEMPTS = 2

# Parts of py-spy's messages, in lower case, by which its reasons are distinguished.
_PERMISSION_MARKS = ("permission denied", "os error 13", "os error 1)", "operation not permitted")
_ENDED_MARKS = ("os error 2)", "os error 3)", "no such process")
_VERSION_MARKS = ("python version", "version of python", "unsupported version")


# The file, the function and the line of a frame, and the name, the address and the text of each variable.
_FramePlace = tuple[tuple[str, str, int], tuple[tuple[str, int, str], ...]]
ThreadPlace = tuple[_FramePlace, ...]


class PySpyError(Exception):
    """py-spy failed. The message says why and what to do; ``is_permanent`` if it would fail again."""

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


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

    def dump_stacks(
        self, pid: int, start_ticks: int, *, native: bool = False, nonblocking: bool = False
    ) -> ThreadStacks:
        """The stacks of one process. Raises PySpyError.

        The process is paused if it runs Python or ``native`` frames are read, but never with
        ``nonblocking``. A pause ends system calls that the kernel does not restart, such as
        epoll_wait, with EINTR; most hung processes need none, since their stacks do not change.
        """
        self.require_path()
        before = self.read_state(pid, start_ticks)
        if before == "D":
            raise PySpyError(
                "in uninterruptible sleep (state D): it cannot be paused. It waits in the kernel,"
                f" for a disk, a network file system or a driver: see /proc/{pid}/stack and dmesg"
                " on its host"
            )
        is_stopped = before in "Tt"
        if not (native or nonblocking or is_stopped):
            threads = self._dump_undisturbed(pid)
            if threads is not None:
                return threads
        options = []
        if native:
            options.append("--native")
        elif is_stopped or nonblocking:
            options.append("--nonblocking")
        timeout_s = NATIVE_DUMP_TIMEOUT_S if native else self.timeout_s
        try:
            return self._run_dump(pid, options, timeout_s)
        except PySpyError as error:
            # After a py-spy that was not to pause the process, whoever stopped it meant to.
            is_pausing = "--nonblocking" not in options
            if is_pausing and processes.continue_stopped(pid, start_ticks, self.proc):
                raise PySpyError(
                    f"{error}; py-spy left the process stopped, and it was continued",
                    is_permanent=error.is_permanent,
                ) from error
            raise

    def _dump_undisturbed(self, pid: int) -> ThreadStacks | None:
        """The stacks of a process that is not paused; None if they changed while they were read.
        Raises PySpyError if a pause would not help.
        """
        for _ in range(_UNDISTURBED_ATTEMPTS):
            began_at = time.monotonic()
            try:
                before = thread_waits.read_turns(pid, self.proc)
                main = before.get(pid)
                is_running = main is not None and main.is_running
                if is_running or not permission.may_read_memory(pid):
                    return None
                threads = self._run_dump(pid, ["--nonblocking"], self.timeout_s)
                after = thread_waits.read_turns(pid, self.proc)
            except PySpyError as error:
                if error.is_permanent or time.monotonic() - began_at >= self.timeout_s:
                    raise
                continue
            except OSError:  # the process has ended, which the next attempt reports
                return None
            # A thread that holds the GIL and does not run keeps all others from running Python.
            deciding = [thread for thread in threads if thread.holds_gil]
            if not deciding:
                deciding = [thread for thread in threads if thread.thread != RECORDER_THREAD_NAME]
            for thread in deciding:
                tid = thread.tid or 0
                if not thread_waits.was_asleep(before.get(tid), after.get(tid)):
                    return None
            return threads if deciding else None
        return None

    def read_place(self, pid: int, tid: int) -> ThreadPlace:
        """Where a thread of a process is, without a pause. If the thread moves meanwhile, it fails or gives
        what never was. Raises PySpyError.
        """
        return parse_place(self._read_dump(pid, ["--locals", "--nonblocking"], self.timeout_s), tid)

    def _run_dump(self, pid: int, options: Sequence[str], timeout_s: float) -> ThreadStacks:
        output = self._read_dump(pid, options, timeout_s)
        return processes.add_cpu_times(parse_dump(output), pid, self.proc)

    def _read_dump(self, pid: int, options: Sequence[str], timeout_s: float) -> bytes:
        command = [self.require_path(), "dump", "--pid", str(pid), "--json", "--full-filenames"]
        try:
            done = subprocess.run(
                [*command, *options],
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
            raise self.explain_start_failure(error) from error
        if done.returncode:
            raise explain_failure(done.stderr.decode(errors="replace"), self.proc)
        return done.stdout

    def require_path(self) -> str:
        """The path of py-spy. Raises PySpyError if it is not installed."""
        if self.path is None:
            raise PySpyError("py-spy is not installed: pip install py-spy", is_permanent=True)
        return self.path

    def explain_start_failure(self, error: OSError) -> PySpyError:
        return PySpyError(
            f"{self.path} cannot be run ({error.strerror}): pip install --force-reinstall py-spy",
            is_permanent=True,
        )

    def read_state(self, pid: int, start_ticks: int) -> str:
        """The state in /proc. Raises PySpyError if the process has ended."""
        stat = processes.read_live_stat(pid, start_ticks, self.proc)
        if stat is None:
            raise PySpyError("the process has ended")
        return stat.state


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


def parse_place(output: bytes, tid: int) -> ThreadPlace:
    """Where the thread ``tid`` is, in a dump with local variables. Raises PySpyError."""
    try:
        for thread in json.loads(output):
            own_tid = thread["os_thread_id"]
            if own_tid is None and thread["thread_name"] == "MainThread":
                own_tid = thread["pid"]
            if own_tid != tid:
                continue
            frames = []
            for frame in thread["frames"][:_MAX_FRAMES]:
                variables = [(v["name"], v["addr"], v["repr"]) for v in frame["locals"] or ()]
                line = (str(frame["filename"]), str(frame["name"]), int(frame["line"]))
                frames.append((line, tuple(variables)))
            return tuple(frames)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PySpyError(f"py-spy's output is not understood ({error!r})") from error
    raise PySpyError("the thread has ended")


def parse_dump(output: bytes) -> ThreadStacks:
    """The stacks in py-spy's JSON, main thread first. Raises PySpyError."""
    stacks = []
    try:
        for thread in json.loads(output):
            tid = thread.get("os_thread_id")
            is_main = tid == thread["pid"]
            name = "MainThread" if is_main else f"thread {tid or thread.get('thread_id')}"
            frames = [
                Frame(function=str(f["name"]), file=str(f["filename"]), line=int(f["line"]))
                for f in thread["frames"][:_MAX_FRAMES]
            ]
            stack = ThreadStack(
                thread=str(thread.get("thread_name") or name),
                frames=tuple(frames),
                main=is_main,
                active=bool(thread.get("active")),
                holds_gil=bool(thread.get("owns_gil")),
                tid=tid,
            )
            stacks.append(stack)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PySpyError(
            f"py-spy's output is not understood ({error!r}): pip install --upgrade py-spy"
        ) from error
    if not any(stack.main for stack in stacks):
        stacks = [replace(stack, main=stack.thread == "MainThread") for stack in stacks]
    return tuple(sorted(stacks, key=lambda stack: not stack.main))
