"""Stacks by faulthandler, where py-spy may not look in: the rank registered it on a signal that
works without the GIL.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hangwatch.model.threads import Frame, ThreadStack

from ..system import processes

ANSWER_TIMEOUT_S = 2.0
_OUTPUT_SETTLE_S = 0.1  # the output is whole once it has not grown for so long
_MAX_OUTPUT_BYTES = 1 << 20

_THREAD_HEADER_RE = re.compile(
    r"(Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME_RE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class FaultStacksError(Exception):
    """There are no stacks from faulthandler either. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaulthandlerRegistration:
    """What a rank's ring says of it."""

    signal: int
    fd: int
    main_thread: int | None

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> FaulthandlerRegistration | None:
        """None where the rank registered nothing, or nothing that makes sense."""
        number, fd, main = (
            identity.get("stacks_signal"),
            identity.get("stacks_fd"),
            identity.get("main_thread"),
        )
        if (
            not isinstance(number, int)
            or not isinstance(fd, int)
            or not signal.SIGRTMIN <= number <= signal.SIGRTMAX
        ):
            return None
        return cls(signal=number, fd=fd, main_thread=main if isinstance(main, int) else None)


def request_stacks(
    pid: int,
    start_ticks: int,
    registration: FaulthandlerRegistration,
    output: Path,
    *,
    proc: str = processes.PROC_ROOT,
    wait_s: float = ANSWER_TIMEOUT_S,
    send_signal: Callable[[int, int], None] = signal.pidfd_send_signal,
) -> tuple[ThreadStack, ...]:
    """Asks the process for its stacks. Raises FaultStacksError.

    The signal is sent only to a process that still catches it and still holds our file: else it
    would kill, or have the stacks written into somebody else's file.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise FaultStacksError(f"the process cannot be signalled: {error.strerror}") from error
    try:
        _check_registration(pid, start_ticks, registration, output, proc)
        offset = _prepare_output(pid, registration.fd, output, proc)
        send_signal(pidfd, registration.signal)
        text = _read_output(output, offset, wait_s)
    except OSError as error:
        raise FaultStacksError(f"the process cannot be asked: {error.strerror or error}") from error
    finally:
        os.close(pidfd)
    return parse_stacks(text, registration.main_thread)


def _check_registration(
    pid: int, start_ticks: int, registration: FaulthandlerRegistration, output: Path, proc: str
) -> None:
    stat = processes.read_stat(pid, proc)
    if stat.start_ticks != start_ticks or stat.state in "ZX":
        raise FaultStacksError("the process has ended")
    if stat.state in "Tt":
        raise FaultStacksError(
            "the process is stopped and cannot answer before somebody continues it: kill -CONT"
        )
    caught = int(processes.read_status(pid, proc).get("SigCgt", "0"), 16)
    if not caught >> (registration.signal - 1) & 1:
        raise FaultStacksError(
            f"the process no longer catches signal {registration.signal}: something took its"
            " handler away"
        )
    held, ours = os.stat(f"{proc}/{pid}/fd/{registration.fd}"), os.stat(output)
    if (held.st_dev, held.st_ino) != (ours.st_dev, ours.st_ino):
        raise FaultStacksError("the process has closed the file for its stacks")


def _prepare_output(pid: int, fd: int, output: Path, proc: str) -> int:
    """Where the new output will begin. The file is emptied where the process appends to it; else
    there would be a hole.
    """
    with open(f"{proc}/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as f:
        flags = next((int(line.split()[1], 8) for line in f if line.startswith("flags:")), 0)
    if flags & os.O_APPEND:
        os.truncate(output, 0)
    return output.stat().st_size


def _read_output(output: Path, offset: int, wait_s: float) -> str:
    """The output once it is whole. Raises FaultStacksError where none comes in time."""
    deadline = time.monotonic() + wait_s
    size, since = offset, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (grown := output.stat().st_size) != size:
            size, since = grown, now
        elif size > offset and now - since >= _OUTPUT_SETTLE_S:
            break
        time.sleep(0.02)
    if size == offset:
        raise FaultStacksError(
            f"the process did not answer within {wait_s:g} s: its main thread is in the kernel or"
            " blocks signals"
        )
    with open(output, "rb") as f:
        f.seek(offset)
        return f.read(_MAX_OUTPUT_BYTES).decode(errors="replace")


def parse_stacks(text: str, main_thread: int | None = None) -> tuple[ThreadStack, ...]:
    """faulthandler's output, main thread first; ``main_thread`` is its ident
    (threading.main_thread().ident).

    Raises FaultStacksError where there is no stack in it.
    """
    stacks: list[ThreadStack] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        if head := _THREAD_HEADER_RE.match(line):
            frames = []
            main = main_thread is not None and int(head[2], 16) == main_thread
            stacks.append(
                ThreadStack(
                    thread=head[3] or ("MainThread" if main else f"thread {head[2]}"),
                    frames=(),
                    main=main,
                )
            )
        elif stacks and (frame := _FRAME_RE.match(line)):
            frames.append(
                Frame(
                    function=frame[3],
                    file=frame[1],
                    line=int(frame[2]) if frame[2].isdigit() else 0,
                )
            )
            stacks[-1] = replace(stacks[-1], frames=tuple(frames))
    if not stacks:
        raise FaultStacksError("faulthandler's output holds no stack")
    return tuple(sorted(stacks, key=lambda stack: not stack.main))
