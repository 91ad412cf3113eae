"""Takes stacks that a rank writes itself, by faulthandler, for hosts where py-spy lacks permission.

The recorder's thread in the rank writes them on request, which stops and interrupts nothing. It
cannot run while another thread keeps the GIL in native code. Then, and only then, it gets a signal
whose handler writes the stacks without the GIL. The signal goes to the recorder's thread alone,
which waits for the GIL: a handler that ran in a thread of the job would end the system call that
this thread is in.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.ring.layout import LIVE_OFFSET, LiveWord

from ...environment import run_dir
from ..system import processes, thread_waits
from ..system.processes import ThreadStacks

ANSWER_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.02
# The recorder's thread runs ten times a second. If it has waited for the GIL for this long, no other
# thread runs Python either, since that thread would have given the GIL to it.
_GIL_HELD_AFTER_S = 1.0
_OUTPUT_SETTLE_S = 0.1  # the output is complete once it has not grown for this long
_MAX_OUTPUT_BYTES = 1 << 20
_TGKILL_NUMBERS = {"x86_64": 234, "aarch64": 131}  # glibc has the function only from 2.30 on

_THREAD_HEADER_RE = re.compile(
    r"(Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME_RE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class FaultStacksError(Exception):
    """The rank could not write its stacks. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaulthandlerRegistration:
    """How a rank has registered faulthandler, as recorded in its ring. ``signal`` is None if it has
    not: then it can only write its stacks while its recorder's thread runs.
    """

    signal: int | None
    fd: int
    main_thread: int | None

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> FaulthandlerRegistration:
        main_thread = identity.get("main_thread")
        if not isinstance(main_thread, int):
            main_thread = None
        number, fd = identity.get("stacks_signal"), identity.get("stacks_fd")
        is_real_time = isinstance(number, int) and signal.SIGRTMIN <= number <= signal.SIGRTMAX
        if not is_real_time or not isinstance(fd, int):
            number, fd = None, -1
        return cls(signal=number, fd=fd, main_thread=main_thread)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDump:
    """A rank's stacks. ``note``: where the thread is that keeps the GIL; empty if none does."""

    threads: ThreadStacks
    note: str = ""


def request_stacks(
    pid: int,
    start_ticks: int,
    ring_path: Path,
    registration: FaulthandlerRegistration,
    *,
    proc: str = processes.PROC_ROOT,
    wait_s: float = ANSWER_TIMEOUT_S,
) -> OwnDump:
    """Makes a rank write the stacks of its threads, and reads them. Raises FaultStacksError."""
    try:
        fd = os.open(ring_path, os.O_RDWR | os.O_NOFOLLOW)
        with open(fd, "r+b", buffering=0):
            rank = _DumpingRank(pid, ring_path, fd, registration, proc, wait_s)
            return rank.dump_stacks(start_ticks)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FaultStacksError(f"no dump can be requested: {reason}") from error


@dataclass(frozen=True, slots=True)
class _DumpingRank:
    """A rank that writes its own stacks. In its ring, only the node agent's word is written."""

    pid: int
    ring_path: Path
    ring_fd: int
    registration: FaulthandlerRegistration
    proc: str
    wait_s: float

    def dump_stacks(self, start_ticks: int) -> OwnDump:
        """Requests the stacks from the recorder's thread, and waits until they are written. If another
        thread keeps the GIL from it, takes them by a signal. Raises FaultStacksError.
        """
        stat = processes.read_live_stat(self.pid, start_ticks, self.proc)
        if stat is None:
            raise FaultStacksError("the process has ended")
        if stat.state in "Tt":
            raise FaultStacksError(
                "the process is stopped and cannot answer until it is continued: kill -CONT"
            )
        thread = self._read_word(LiveWord.RECORDER_THREAD)
        if not thread or not os.path.exists(f"{self.proc}/{self.pid}/task/{thread}"):
            raise FaultStacksError(
                "the recorder's thread, which would write them, does not run: Python is starting or"
                " exiting"
            )
        number = time.monotonic_ns()
        request_offset = LIVE_OFFSET + 8 * LiveWord.STACKS_REQUEST
        os.pwrite(self.ring_fd, number.to_bytes(8, "little"), request_offset)
        deadline = time.monotonic() + self.wait_s
        candidates: list[int] = []  # the threads that may keep the GIL
        while not candidates:
            if time.monotonic() >= deadline:
                wait = thread_waits.describe_wait(self.pid, thread, self.proc)
                raise FaultStacksError(
                    f"the recorder's thread did not answer within {self.wait_s:g} s: it is {wait}"
                )
            if self._read_word(LiveWord.STACKS_ANSWER) == number:
                return OwnDump(threads=self._parse_output(offset=0))
            pulse_age_s = (time.monotonic_ns() - self._read_word(LiveWord.PULSE_NS)) / 1e9
            if pulse_age_s > _GIL_HELD_AFTER_S:
                candidates = thread_waits.find_gil_candidates(self.pid, thread, self.proc)
            if not candidates:
                time.sleep(_POLL_INTERVAL_S)
        try:
            stacks = self._dump_by_signal(thread)
        except FaultStacksError as error:
            note = self._describe_holders(candidates)
            raise FaultStacksError(f"{note}; {error}") from None
        holders = [s for s in stacks if s.frames and s.tid in candidates]
        if len(holders) == 1:
            stacks = tuple(replace(s, holds_gil=s is holders[0]) for s in stacks)
        if holders:
            candidates = [s.tid for s in holders if s.tid is not None]
        return OwnDump(threads=stacks, note=self._describe_holders(candidates))

    def _read_word(self, word: LiveWord) -> int:
        return int.from_bytes(os.pread(self.ring_fd, 8, LIVE_OFFSET + 8 * word), "little")

    def _dump_by_signal(self, thread: int) -> ThreadStacks:
        """The stacks that the handler writes without the GIL. Raises FaultStacksError."""
        number = self.registration.signal
        if number is None:
            raise FaultStacksError("no signal was free for faulthandler")
        # A signal that is not caught would kill the process, and the stacks could go to another file.
        status = processes.read_fields(f"{self.proc}/{self.pid}/task/{thread}/status")
        bit = 1 << (number - 1)
        if not int(status.get("SigCgt", "0"), 16) & bit:
            raise FaultStacksError(
                f"the process no longer catches signal {number}: something removed its handler"
            )
        if int(status.get("SigBlk", "0"), 16) & bit:
            raise FaultStacksError(f"the recorder's thread blocks signal {number}")
        output = self.ring_path.with_suffix(run_dir.STACKS_SUFFIX)
        written = os.stat(f"{self.proc}/{self.pid}/fd/{self.registration.fd}")
        if not os.path.samestat(written, output.stat()):
            raise FaultStacksError("the process has closed the file for its stacks")
        # tgkill(2) lets the system calls of other threads continue.
        machine = platform.machine()
        if machine not in _TGKILL_NUMBERS:
            raise FaultStacksError(f"a signal cannot be sent to a single thread on {machine}")
        offset = size = output.stat().st_size
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(ctypes.c_long(_TGKILL_NUMBERS[machine]), self.pid, thread, number):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        now = changed_at = time.monotonic()
        deadline = now + self.wait_s
        while now < deadline:
            new_size = output.stat().st_size
            if new_size != size:
                size, changed_at = new_size, now
            elif size > offset and now - changed_at >= _OUTPUT_SETTLE_S:
                break
            time.sleep(_POLL_INTERVAL_S)
            now = time.monotonic()
        if size == offset:
            raise FaultStacksError(f"its handler wrote nothing within {self.wait_s:g} s")
        return self._parse_output(offset)

    def _parse_output(self, offset: int) -> ThreadStacks:
        """The stacks that the rank wrote from ``offset`` on, with names, ids and CPU times."""
        with open(self.ring_path.with_suffix(run_dir.STACKS_SUFFIX), "rb") as output:
            output.seek(offset)
            text = output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
        thread_list = {}
        # Threads that are not in this file are named by their ident.
        with contextlib.suppress(OSError, ValueError, TypeError):
            listed = self.ring_path.with_suffix(run_dir.THREADS_SUFFIX).read_bytes()
            for ident, tid, name in json.loads(listed):
                thread_list[int(ident)] = (tid if isinstance(tid, int) else None, str(name))
        stacks = parse_stacks(text, self.registration.main_thread, thread_list)
        if stacks[0].main:
            stacks = (replace(stacks[0], tid=self.pid), *stacks[1:])
        return processes.add_cpu_times(stacks, self.pid, self.proc)

    def _describe_holders(self, candidates: Sequence[int]) -> str:
        """The place in the kernel of the thread that keeps the GIL, or of several that may."""
        texts = []
        for tid in sorted(candidates, key=lambda tid: tid != self.pid)[:3]:
            name = "the main thread" if tid == self.pid else f"thread {tid}"
            wait = thread_waits.describe_wait(self.pid, tid, self.proc)
            texts.append(f"{name} is {wait}")
        where = "" if len(candidates) == 1 else " in one of the threads that do not wait for it"
        return f"native code keeps the GIL{where}: {', '.join(texts)}"


def parse_stacks(
    text: str,
    main_thread: int | None = None,
    thread_list: Mapping[int, tuple[int | None, str]] = MappingProxyType({}),
) -> ThreadStacks:
    """The stacks in faulthandler's output, main thread first; ``main_thread`` is its ident
    (threading.main_thread().ident), and ``thread_list`` the system's ids and names by ident.

    Raises FaultStacksError if there is no stack in it.
    """
    if text == run_dir.NO_GIL_TEXT:
        raise FaultStacksError(
            "this Python runs without the GIL: to read its stacks from inside, all threads would"
            " have to stop"
        )
    stacks = []
    for line in text.splitlines():
        if header := _THREAD_HEADER_RE.match(line):
            _, number, name = header.groups()
            ident = int(number, 16)
            is_main = ident == main_thread
            tid, known_name = thread_list.get(ident, (None, ""))
            name = known_name or name
            if not name:
                name = "MainThread" if is_main else f"thread {number}"
            stacks.append(ThreadStack(thread=name, frames=(), main=is_main, tid=tid))
        elif stacks and (match := _FRAME_RE.match(line)):
            file, number, function = match.groups()
            line_number = int(number) if number.isdigit() else 0
            frame = Frame(function=function, file=file, line=line_number)
            newest = stacks[-1]
            stacks[-1] = replace(newest, frames=(*newest.frames, frame))
    if not stacks:
        raise FaultStacksError("there is no stack in faulthandler's output")
    return tuple(sorted(stacks, key=lambda stack: not stack.main))
