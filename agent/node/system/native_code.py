"""Where a thread of another process is in native code: in which libraries.

The thread is paused for some 50 microseconds, however large its libraries are: only its registers and the
innermost part of its stack are read meanwhile. No symbols and no unwind tables are needed for what is asked
here, so the stack is not unwound: its words that point to code are taken for return addresses. A few of them
are left from earlier calls, so that one reading alone proves nothing.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import platform
import re
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .processes import PROC_ROOT, read_thread_stat

# ptrace(2). A thread that is seized is not stopped by that, and continues if its tracer ends.
_SEIZE, _INTERRUPT, _DETACH, _GETREGSET = 0x4206, 0x4207, 17, 0x4204
_NT_PRSTATUS = 1
_WAIT_FOR_ANY_THREAD = 0x40000000  # __WALL
_STOPPED = 0x7F  # the low byte of the status of a thread that stopped
_SET_TIMER_SLACK = 29  # prctl(2): the most, in nanoseconds, that a sleep may last longer

# The numbers of the registers that point to code, innermost first, and that of the stack pointer. On ARM,
# the return address of a function that calls no other one is in a register.
_REGISTERS = {"x86_64": ((16,), 19), "aarch64": ((32, 30), 31)}
_ADDRESS_MASK = (1 << 48) - 1  # without the signature that ARM may add to a return address
_STACK_BYTES = 16 << 10
# A thread that computes stops in microseconds if it has a CPU; one in a long system call does not.
_STOP_TIMEOUT_S = 0.003
_BUSY_POLLS = 100
_POLL_INTERVAL_US = 10  # it may need this CPU to stop
_ATTEMPTS, _ATTEMPT_GAP_S = 8, 0.01

# Libraries that have no purpose of their own: the thread is in what called them.
_SUPPORT_LIBRARY = re.compile(
    r"(lib(c|pthread|rt|dl|stdc\+\+|gcc_s)|ld(-linux|-musl)?)[-.]|\[vdso\]"
)
_DRIVER_LIBRARY = re.compile(r"lib(cuda|cudart|amdhip64|hsa-runtime64)[-.]")


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class CodeMap:
    """The mappings of a process that are executable, in the order of their addresses."""

    starts: list[int]
    ends: list[int]
    names: list[str]  # of their files, without the folder; empty for code without a file

    @classmethod
    def read(cls, pid: int, proc: str = PROC_ROOT) -> CodeMap:
        """Raises OSError if the process is gone or may not be read."""
        code = cls([], [], [])
        with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) >= 5 and "x" in fields[1]:
                    start, _, end = fields[0].partition("-")
                    code.starts.append(int(start, 16))
                    code.ends.append(int(end, 16))
                    code.names.append(os.path.basename(fields[5]) if len(fields) > 5 else "")
        return code

    def find_name(self, address: int) -> str | None:
        """The name of the file whose code is at an address; None if that is no code."""
        index = bisect.bisect_right(self.starts, address) - 1
        return self.names[index] if index >= 0 and address < self.ends[index] else None


def is_in_driver(pid: int, tid: int, code: CodeMap, proc: str = PROC_ROOT) -> bool:
    """Whether a thread executes code of a GPU's driver or runtime now, or support code that these called.
    False if it does not run, or cannot be read. Raises OSError if it has ended.
    """
    layout = _REGISTERS.get(platform.machine())
    for attempt in range(_ATTEMPTS if layout else 0):
        time.sleep(_ATTEMPT_GAP_S if attempt else 0.0)
        # A pause could end a system call in which a thread sleeps.
        if layout is None or read_thread_stat(pid, tid, proc).state != "R":
            return False
        reading = _PausedReading(pid, tid, stack_register=layout[1])
        # When a tracing thread ends, the kernel detaches it from a thread that it could not stop.
        tracer = threading.Thread(target=reading.run, name="tracer", daemon=True)
        tracer.start()
        tracer.join()
        if reading.stack_length:
            registers = [reading.registers[number] for number in layout[0]]
            words = struct.unpack_from(f"{reading.stack_length // 8}Q", reading.stack)
            return _is_driver_innermost((*registers, *words), code)
    return False


def _is_driver_innermost(addresses: Iterable[int], code: CodeMap) -> bool:
    for address in addresses:
        name = code.find_name(address & _ADDRESS_MASK)
        if name is not None and not _SUPPORT_LIBRARY.match(name):
            return bool(_DRIVER_LIBRARY.match(name))
    return False


class _PausedReading:
    """The registers and the innermost part of the stack of one thread."""

    def __init__(self, pid: int, tid: int, *, stack_register: int) -> None:
        self.registers = (ctypes.c_uint64 * 64)()
        self.stack = ctypes.create_string_buffer(_STACK_BYTES)
        self.stack_length = 0  # 0: it could not be read
        self._pid, self._tid, self._stack_register = pid, tid, stack_register
        # Its functions keep the GIL, so that no other thread of this process prolongs the pause.
        self._libc = ctypes.PyDLL(None)
        self._ptrace = self._libc.ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long
        self._read_memory = self._libc.process_vm_readv
        array = (ctypes.c_void_p, ctypes.c_ulong)
        self._read_memory.argtypes = (ctypes.c_int, *array, *array, ctypes.c_ulong)
        self._read_memory.restype = ctypes.c_ssize_t

    def run(self) -> None:
        """Reads them. It is called once, in a thread of its own."""
        self._libc.prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1))
        status = ctypes.c_int()
        registers = _IoVec(ctypes.addressof(self.registers), ctypes.sizeof(self.registers))
        mine, theirs = _IoVec(ctypes.addressof(self.stack), _STACK_BYTES), _IoVec(0, _STACK_BYTES)
        vectors = ctypes.addressof(mine), 1, ctypes.addressof(theirs), 1
        if self._ptrace(_SEIZE, self._tid, None, None):
            return
        try:
            self._ptrace(_INTERRUPT, self._tid, None, None)
            if self._wait_for_stop(status) and not self._ptrace(
                _GETREGSET, self._tid, _NT_PRSTATUS, ctypes.addressof(registers)
            ):
                theirs.base = self.registers[self._stack_register]
                self.stack_length = max(0, self._read_memory(self._pid, *vectors, 0))
        finally:
            # A thread that stopped for a signal, instead of the interrupt, is to get that signal.
            is_interrupt = status.value >> 16 != 0
            signal_number = 0 if is_interrupt else status.value >> 8
            self._ptrace(_DETACH, self._tid, None, signal_number)

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
