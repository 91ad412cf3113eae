"""Whether its device holds the thread that makes a rank's calls: it waits for its GPU.

A host does so at 100 % of a core, so that its use of the CPU does not tell it from one that works. It is in
the GPU's driver, at the same lines and with the same local variables, each time it is read. A loop that
evaluates is at one line of the driver nearly all the time, too, but changes variables.

To find the library whose code a thread executes, the thread is paused for some 50 microseconds, however
large its libraries are: only the address of its next instruction is read meanwhile. Its stack is not
unwound, which would need the tables of all libraries, and words of it that look like return addresses may
be left from earlier calls.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import hashlib
import os
import platform
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from hangwatch.model.ranks import ThreadStack
from hangwatch.stacks.activities import find_calling_thread

from ..system.permission import IoVec
from ..system.processes import (
    PROC_ROOT,
    MemoryMapping,
    ThreadStacks,
    read_mappings,
    read_thread_stat,
)
from .pyspy import PySpy, PySpyError

# The pauses before the readings. They are uneven, so that a loop is not read at the same step each time.
_READING_GAPS_S = (0.0, 0.11, 0.23, 0.17, 0.29)
# There are two for each gap. Some fail on a host whose processors are all in use.
_MAX_FAILED_READINGS = 4

# ptrace(2). A thread that is seized is not stopped by that, and continues if its tracer ends.
_SEIZE, _INTERRUPT, _DETACH, _GETREGSET = 0x4206, 0x4207, 17, 0x4204
_NT_PRSTATUS = 1
_WAIT_FOR_ANY_THREAD = 0x40000000  # __WALL
_STOPPED = 0x7F  # the low byte of the status of a thread that stopped
_SET_TIMER_SLACK = 29  # prctl(2): the most, in nanoseconds, that a sleep may last longer

# By machine, the numbers of the registers with the address of the next instruction, the stack pointer, and
# the return address of a function that calls no other one; 0: that is the first word of the stack.
_REGISTERS = {"x86_64": (16, 19, 0), "aarch64": (32, 31, 30)}
_MAX_REGISTERS = 64
_ADDRESS_MASK = (1 << 48) - 1  # removes the signature that ARM may add to a return address
# A thread that computes stops in microseconds if it has a CPU; one in a long system call does not.
_STOP_TIMEOUT_S = 0.003
_BUSY_POLLS = 100
_POLL_INTERVAL_US = 10  # the thread may need this CPU to stop
_ATTEMPTS, _ATTEMPT_GAP_S = 50, 0.002

# Libraries that have no purpose of their own: the thread is in what called them.
_SUPPORT_LIBRARY = re.compile(
    r"(lib(c|pthread|rt|dl|stdc\+\+|gcc_s)|ld(-linux|-musl)?)[-.]|\[vdso\]"
)
_DRIVER_LIBRARY = re.compile(r"lib(cuda|cudart|amdhip64|hsa-runtime64)[-.]")


def mark_device_hold(threads: Sequence[ThreadStack], pid: int, pyspy: PySpy) -> ThreadStacks:
    """The stacks of a process, with `ThreadStack.device_hold`, unless too many readings failed."""
    caller = find_calling_thread(threads)
    hold: int | None = 0
    if caller is not None and (tid := pid if caller.main else caller.tid):
        # The process may have ended, or may not be read.
        with contextlib.suppress(PySpyError, OSError, ValueError, RuntimeError):
            hold = _read_hold(pid, tid, pyspy)
    if hold is None:
        return tuple(threads)
    return tuple(replace(stack, device_hold=hold if stack is caller else 0) for stack in threads)


def _read_hold(pid: int, tid: int, pyspy: PySpy) -> int | None:
    mappings = read_mappings(pid, pyspy.proc)
    places = set()
    readings = []
    for gap_s in _READING_GAPS_S:
        time.sleep(gap_s)
        readings.append(is_in_driver(pid, tid, mappings, pyspy.proc))
        places.add(pyspy.read_place(pid, tid))
        readings.append(is_in_driver(pid, tid, mappings, pyspy.proc))
        if False in readings or len(places) > 1:
            return 0
    if readings.count(None) > _MAX_FAILED_READINGS:
        return None
    digest = hashlib.blake2b(repr(places).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _find_code_name(mappings: Sequence[MemoryMapping], address: int) -> str | None:
    """The name of the file whose code is at an address, empty for code without a file; None if that is no
    code.
    """
    index = bisect.bisect_right(mappings, address, key=lambda mapping: mapping.first) - 1
    if index < 0:
        return None
    mapping = mappings[index]
    is_code = address < mapping.end and "x" in mapping.modes
    return os.path.basename(mapping.path) if is_code else None


def is_in_driver(
    pid: int, tid: int, mappings: Sequence[MemoryMapping], proc: str = PROC_ROOT
) -> bool | None:
    """Whether a thread executes code of a GPU's driver or runtime now, or support code that these called.
    False if it does not run; None if it could not be read this time. Raises OSError if it has ended or may
    not be traced, and NotImplementedError on a machine whose registers are not known.
    """
    if platform.machine() not in _REGISTERS:
        raise NotImplementedError(f"registers of {platform.machine()}")
    for attempt in range(_ATTEMPTS):
        time.sleep(_ATTEMPT_GAP_S if attempt else 0.0)
        # A pause could end the system call of a sleeping thread.
        if read_thread_stat(pid, tid, proc).state != "R":
            return False
        reading = _PausedReading(pid, tid)
        # When a tracing thread ends, the kernel detaches it from a thread that it could not stop.
        tracer = threading.Thread(target=reading.run, name="tracer", daemon=True)
        tracer.start()
        tracer.join()
        # On a busy host, the kernel may not yet have ended the last tracing thread, which gave up.
        if reading.is_refused:
            continue
        name = _find_code_name(mappings, reading.address)
        if name is not None and not _SUPPORT_LIBRARY.match(name):
            return bool(_DRIVER_LIBRARY.match(name))
        # Whether this is the return address is only certain in a function that calls no other one.
        caller_name = _find_code_name(mappings, reading.caller_address & _ADDRESS_MASK)
        if _DRIVER_LIBRARY.match(caller_name or ""):
            return True
    if reading.is_refused:
        raise PermissionError(f"thread {tid} may not be traced")
    return None


class _PausedReading:
    """The address of the instruction that a thread executes, and what may be its return address."""

    def __init__(self, pid: int, tid: int) -> None:
        self.address = self.caller_address = 0  # 0: this could not be read
        self.is_refused = False
        self._pid, self._tid = pid, tid
        # Its functions keep the GIL, so that no other thread of this process prolongs the pause.
        self._libc = ctypes.PyDLL(None)
        self._ptrace, self._read_memory = self._libc.ptrace, self._libc.process_vm_readv
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long
        one_range = (ctypes.c_void_p, ctypes.c_ulong)
        self._read_memory.argtypes = (ctypes.c_int, *one_range, *one_range, ctypes.c_ulong)

    def run(self) -> None:
        """Reads them. It is called once, in a thread of its own."""
        counter, stack_pointer, link = _REGISTERS[platform.machine()]
        self._libc.prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1))
        registers = (ctypes.c_uint64 * _MAX_REGISTERS)()
        word = ctypes.c_uint64()
        vector = IoVec(ctypes.addressof(registers), ctypes.sizeof(registers))
        mine = IoVec(ctypes.addressof(word), 8)
        theirs = IoVec(0, 8)
        ranges = ctypes.addressof(mine), 1, ctypes.addressof(theirs), 1
        status = ctypes.c_int()
        self.is_refused = self._ptrace(_SEIZE, self._tid, None, None) != 0
        if self.is_refused:
            return
        try:
            self._ptrace(_INTERRUPT, self._tid, None, None)
            if self._wait_for_stop(status):
                self._ptrace(_GETREGSET, self._tid, _NT_PRSTATUS, ctypes.addressof(vector))
                theirs.base = registers[stack_pointer]
                self._read_memory(self._pid, *ranges, 0)
        finally:
            # A thread that stopped for a signal, instead of the interrupt, is to get that signal.
            is_interrupt = status.value >> 16 != 0
            signal_number = 0 if is_interrupt else status.value >> 8
            self._ptrace(_DETACH, self._tid, None, signal_number)
        self.address = registers[counter]
        self.caller_address = registers[link] if link else word.value

    def _wait_for_stop(self, status: ctypes.c_int) -> bool:
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        options = os.WNOHANG | _WAIT_FOR_ANY_THREAD
        polls = 0
        while not self._libc.waitpid(self._tid, ctypes.byref(status), options):
            if time.monotonic() >= deadline:
                return False
            polls += 1
            if polls > _BUSY_POLLS:
                self._libc.usleep(_POLL_INTERVAL_US)
        return status.value & 0xFF == _STOPPED
