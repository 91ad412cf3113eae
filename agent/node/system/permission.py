"""Determines whether this process may attach to another one, why not, and the remedy."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from . import processes

_CAP_SYS_PTRACE = 1 << 19
_IMPOSSIBLE_PID = 0x7FFFFFFE  # above the kernel's highest possible pid (PID_MAX_LIMIT, 2**22)
_PTRACE_ATTACH = 16

PTRACE_REMEDY = (
    "give the job CAP_SYS_PTRACE: docker run --cap-add SYS_PTRACE; Kubernetes"
    " securityContext.capabilities.add: [SYS_PTRACE]; on the host itself: sysctl"
    " kernel.yama.ptrace_scope=0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PtraceFacts:
    """What determines whether ptrace is permitted."""

    has_capability: bool  # CAP_SYS_PTRACE is in effect
    yama_scope: int | None  # kernel.yama.ptrace_scope; None without Yama
    has_seccomp_filter: bool
    is_ptrace_filtered: bool  # the seccomp filter refuses ptrace

    def explain_refusal(self) -> str:
        """The most likely reason for a refusal."""
        if self.is_ptrace_filtered:
            return "a seccomp filter refuses ptrace, as container runtimes install it"
        if self.yama_scope == 3:
            return (
                "kernel.yama.ptrace_scope is 3: no process may attach until the host restarts with"
                " another value"
            )
        if self.yama_scope and not self.has_capability:
            return f"kernel.yama.ptrace_scope is {self.yama_scope} and CAP_SYS_PTRACE is missing"
        if not self.has_capability:
            return (
                "CAP_SYS_PTRACE is missing and the process belongs to another user or may not be"
                " dumped"
            )
        if self.has_seccomp_filter:
            return "the kernel refuses it, perhaps because of the installed seccomp filter"
        return "the kernel refuses it"


def read_ptrace_facts(proc: str = processes.PROC_ROOT) -> PtraceFacts:
    """Reads the facts for this process."""
    status: dict[str, str] = {}
    with contextlib.suppress(OSError):  # the filter can be tested without /proc
        status = processes.read_fields(f"{proc}/self/status")
    # A filter refuses ptrace before the kernel finds that there is no such process.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace(ctypes.c_long(_PTRACE_ATTACH), ctypes.c_long(_IMPOSSIBLE_PID), None, None)
    is_filtered = ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES)
    yama = None
    with contextlib.suppress(OSError, ValueError):
        yama = int(Path(proc, "sys/kernel/yama/ptrace_scope").read_text())
    return PtraceFacts(
        has_capability=bool(int(status.get("CapEff", "0"), 16) & _CAP_SYS_PTRACE),
        yama_scope=yama,
        has_seccomp_filter=status.get("Seccomp", "0") != "0",
        is_ptrace_filtered=is_filtered,
    )


class IoVec(ctypes.Structure):
    """A range of memory, as in process_vm_readv(2) and ptrace(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def may_read_memory(pid: int) -> bool:
    """Whether this process may read the memory of another one, which takes the permission to attach.

    Nothing is read, and the process is not affected: an invalid address gives EFAULT only if
    permission is granted. Raises ProcessLookupError if the process is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    mine, theirs = IoVec(ctypes.addressof(byte), 1), IoVec(None, 1)
    read = libc.process_vm_readv(
        pid,
        ctypes.byref(mine),
        ctypes.c_ulong(1),
        ctypes.byref(theirs),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    if read >= 0:
        return True
    code = ctypes.get_errno()
    if code == errno.ESRCH:
        raise ProcessLookupError(code, os.strerror(code))
    return code == errno.EFAULT


def format_refusal(proc: str, program: str = "py-spy") -> str:
    """Why a program may not attach, with the remedy."""
    reason = read_ptrace_facts(proc).explain_refusal()
    return f"{program} may not attach: {reason}. {PTRACE_REMEDY}"
