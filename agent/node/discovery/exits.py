"""Detects when and how a process ends: immediately, through its pidfd, so that a reused pid is never
mistaken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time

from hangwatch.model.ranks import ExitInfo

from ..system import processes

# linux/pidfd.h, since Linux 6.13; the exit code since 6.15, and only once the process was reaped:
# u64 mask, u64 cgroupid, u32 pid, tgid, ppid and eight uids and gids, i32 exit_code
PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
PIDFD_INFO_EXIT = 1 << 3
_EXIT_INFO_PAUSES_S = (0.0, 0.0, 0.001, 0.005, 0.02)  # before each try
_PIDFD_INFO_STRUCT = struct.Struct("=2Q11Ii")


def open_pidfd(pid: int, start_ticks: int, proc: str = processes.PROC_ROOT) -> int | None:
    """A descriptor that becomes readable when this process ends; None if it has ended, or if the
    kernel does not support pidfds.

    For a zombie it is readable immediately, and gives the exit status.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if processes.read_stat(pid, proc).start_ticks == start_ticks:
            return fd
    except (OSError, ValueError):
        pass  # it ended between the two calls
    os.close(fd)
    return None


def from_wait_status(status: int) -> ExitInfo:
    """Decodes a status word of wait(2)."""
    if signal := status & 0x7F:
        return ExitInfo(signal=signal)
    return ExitInfo(exit_status=(status >> 8) & 0xFF)


def read_exit_info(
    pid: int, start_ticks: int, pidfd: int | None, proc: str = processes.PROC_ROOT
) -> ExitInfo:
    """Exit status or signal of a process that has ended; empty if neither can be read any more.

    Tries both sources several times: its parent may reap it after the first and before the second
    was read, from then on only the first has the status, and the kernel may publish it a moment
    later.
    """
    for pause_s in _EXIT_INFO_PAUSES_S:
        time.sleep(pause_s)
        if pidfd is not None and (status := _read_pidfd_status(pidfd)) is not None:
            return from_wait_status(status)
        with contextlib.suppress(OSError, ValueError):  # reaped: no longer in /proc
            stat = processes.read_stat(pid, proc)
            if stat.start_ticks == start_ticks and stat.state in "ZX":
                return from_wait_status(stat.exit_code)
        if pidfd is None:
            break
    return ExitInfo()


def _read_pidfd_status(pidfd: int) -> int | None:
    info = bytearray(_PIDFD_INFO_STRUCT.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:  # an older kernel, or the process is not reaped yet
        return None
    mask, *_, code = _PIDFD_INFO_STRUCT.unpack(info)
    return int(code) if mask & PIDFD_INFO_EXIT else None
