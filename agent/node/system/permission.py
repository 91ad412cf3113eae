"""Whether this process may look into another one, why not, and what to do about it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from dataclasses import dataclass

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
    """What decides over ptrace here."""

    has_capability: bool  # CAP_SYS_PTRACE is in effect
    yama_scope: int | None  # kernel.yama.ptrace_scope; None without Yama
    has_seccomp_filter: bool  # a system call filter is installed
    is_ptrace_filtered: bool  # and it refuses ptrace

    def explain_refusal(self) -> str:
        """The likeliest reason for a refusal, in a few words."""
        if self.is_ptrace_filtered:
            return "a seccomp filter refuses ptrace, as container runtimes install it"
        if self.yama_scope == 3:
            return (
                "kernel.yama.ptrace_scope is 3: nobody may attach until the host restarts with"
                " another"
            )
        if self.yama_scope and not self.has_capability:
            return f"kernel.yama.ptrace_scope is {self.yama_scope} and CAP_SYS_PTRACE is missing"
        if not self.has_capability:
            return (
                "CAP_SYS_PTRACE is missing and the process belongs to another user or may not be"
                " dumped"
            )
        return "the kernel refuses it" + (
            ", perhaps by the seccomp filter that is installed" if self.has_seccomp_filter else ""
        )


def read_ptrace_facts(proc: str = processes.PROC_ROOT) -> PtraceFacts:
    """Reads them for this process."""
    status: dict[str, str] = {}
    with contextlib.suppress(OSError):  # no /proc: nothing is known, and `filtered` is still tried
        status = processes.read_status("self", proc)
    yama = None
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{proc}/sys/kernel/yama/ptrace_scope", "rb") as f,
    ):
        yama = int(f.read())
    return PtraceFacts(
        has_capability=bool(int(status.get("CapEff", "0"), 16) & _CAP_SYS_PTRACE),
        yama_scope=yama,
        has_seccomp_filter=status.get("Seccomp", "0") != "0",
        is_ptrace_filtered=_is_ptrace_filtered(),
    )


def _is_ptrace_filtered() -> bool:
    """A system call filter answers before the kernel looks for the process, and this one cannot
    exist (ESRCH).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace(ctypes.c_long(_PTRACE_ATTACH), ctypes.c_long(_IMPOSSIBLE_PID), None, None)
    return ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def may_read_memory(pid: int) -> bool:
    """The memory of another process may be read, which is the same permission as to attach to it.

    Nothing is read and the process is not touched: an address that cannot be is EFAULT only to who
    may. Raises ProcessLookupError once it is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    mine, theirs = _IoVec(ctypes.addressof(byte), 1), _IoVec(None, 1)
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


def format_refusal(proc: str = processes.PROC_ROOT) -> str:
    """Why py-spy may not look in, with the remedy."""
    return f"py-spy may not attach: {read_ptrace_facts(proc).explain_refusal()}. {PTRACE_REMEDY}"
