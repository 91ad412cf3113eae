"""Takes stacks with faulthandler, for hosts where py-spy lacks permission: the rank has registered
it for a signal whose handler works without the GIL.
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
_OUTPUT_SETTLE_S = 0.1  # the output is complete once it has not grown for this long
_MAX_OUTPUT_BYTES = 1 << 20

_THREAD_HEADER_RE = re.compile(
    r"(Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME_RE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class FaultStacksError(Exception):
    """faulthandler could not dump the stacks. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaulthandlerRegistration:
    """How a rank has registered faulthandler, as recorded in its ring."""

    signal: int
    fd: int
    main_thread: int | None

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> FaulthandlerRegistration | None:
        """None if the rank has not registered it, or the values are invalid."""
        number = identity.get("stacks_signal")
        fd = identity.get("stacks_fd")
        main_thread = identity.get("main_thread")
        if not isinstance(number, int) or not isinstance(fd, int):
            return None
        if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
            return None
        if not isinstance(main_thread, int):
            main_thread = None
        return cls(signal=number, fd=fd, main_thread=main_thread)


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
    """Signals the process to dump its stacks, and reads them. Raises FaultStacksError.

    The signal is only sent to a process that still catches it and still has our file open:
    otherwise it would kill the process, or write the stacks into another file.
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
        raise FaultStacksError(f"no dump can be requested: {error.strerror or error}") from error
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
            "the process is stopped and cannot answer until it is continued: kill -CONT"
        )
    caught = int(processes.read_status(pid, proc).get("SigCgt", "0"), 16)
    if not caught >> (registration.signal - 1) & 1:
        raise FaultStacksError(
            f"the process no longer catches signal {registration.signal}: something removed its"
            " handler"
        )
    if not os.path.samestat(os.stat(f"{proc}/{pid}/fd/{registration.fd}"), os.stat(output)):
        raise FaultStacksError("the process has closed the file for its stacks")


def _prepare_output(pid: int, fd: int, output: Path, proc: str) -> int:
    """The offset at which the new output will begin. The file is truncated if the process appends
    to it; otherwise that would leave a hole.
    """
    with open(f"{proc}/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as fdinfo:
        for line in fdinfo:
            if line.startswith("flags:") and int(line.split()[1], 8) & os.O_APPEND:
                os.truncate(output, 0)
    return output.stat().st_size


def _read_output(output: Path, offset: int, wait_s: float) -> str:
    """The output, once it is complete. Raises FaultStacksError if there is none in time."""
    now = changed_at = time.monotonic()
    deadline = now + wait_s
    size = offset
    while now < deadline:
        new_size = output.stat().st_size
        if new_size != size:
            size, changed_at = new_size, now
        elif size > offset and now - changed_at >= _OUTPUT_SETTLE_S:
            break
        time.sleep(0.02)
        now = time.monotonic()
    if size == offset:
        raise FaultStacksError(
            f"the process did not answer within {wait_s:g} s: its main thread is in the kernel or"
            " blocks signals"
        )
    with open(output, "rb") as f:
        f.seek(offset)
        return f.read(_MAX_OUTPUT_BYTES).decode(errors="replace")


def parse_stacks(text: str, main_thread: int | None = None) -> tuple[ThreadStack, ...]:
    """The stacks in faulthandler's output, main thread first; ``main_thread`` is its ident
    (threading.main_thread().ident).

    Raises FaultStacksError if there is no stack in it.
    """
    stacks: list[ThreadStack] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        header = _THREAD_HEADER_RE.match(line)
        if header:
            frames = []
            stacks.append(_parse_thread_header(header, main_thread))
            continue
        frame = _FRAME_RE.match(line)
        if stacks and frame:
            file, line_number, function = frame.groups()
            number = int(line_number) if line_number.isdigit() else 0
            frames.append(Frame(function=function, file=file, line=number))
            stacks[-1] = replace(stacks[-1], frames=tuple(frames))
    if not stacks:
        raise FaultStacksError("there is no stack in faulthandler's output")
    return tuple(sorted(stacks, key=lambda stack: not stack.main))


def _parse_thread_header(header: re.Match[str], main_thread: int | None) -> ThreadStack:
    _, ident, name = header.groups()
    is_main = main_thread is not None and int(ident, 16) == main_thread
    if not name:
        name = "MainThread" if is_main else f"thread {ident}"
    return ThreadStack(thread=name, frames=(), main=is_main)
