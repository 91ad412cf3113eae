"""When a process ends, to the millisecond, and how: through its pidfd, so that a pid given again is
never taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

from hangwatch.model.ranks import ExitInfo

from ..system import processes

# linux/pidfd.h, since Linux 6.13; the exit code since 6.15, and only once the process was reaped:
# u64 mask, u64 cgroupid, u32 pid, tgid, ppid and eight uids and gids, i32 exit_code
PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_STRUCT = struct.Struct("=2Q11Ii")


def open_pidfd(pid: int, start_ticks: int, proc: str = processes.PROC_ROOT) -> int | None:
    """A descriptor that becomes readable when this very process ends; None where it has, or the
    kernel has none.

    A zombie still gets one: it is readable at once, and tells how it ended.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if processes.read_stat(pid, proc).start_ticks == start_ticks:
            return fd
    except (OSError, ValueError):
        pass  # gone between the two: below as any other that is not ours
    os.close(fd)
    return None


def from_wait_status(status: int) -> ExitInfo:
    """wait(2)'s status word in the shape that is shown."""
    if signal := status & 0x7F:
        return ExitInfo(signal=signal)
    return ExitInfo(exit_status=(status >> 8) & 0xFF)


def read_exit_info(
    pid: int, start_ticks: int, pidfd: int | None, proc: str = processes.PROC_ROOT
) -> ExitInfo:
    """Exit status or signal of a process that has ended; neither where nobody can tell any more.

    Asked twice: between the two places its parent may reap it, and then only the first one answers.
    """
    for _ in range(2):
        if pidfd is not None and (status := _read_pidfd_status(pidfd)) is not None:
            return from_wait_status(status)
        with contextlib.suppress(OSError, ValueError):  # reaped: /proc has forgotten it
            stat = processes.read_stat(pid, proc)
            if stat.start_ticks == start_ticks and stat.state in "ZX":
                return from_wait_status(stat.exit_code)
    return ExitInfo()


def _read_pidfd_status(pidfd: int) -> int | None:
    asked = bytearray(_PIDFD_INFO_STRUCT.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, asked)
    except OSError:  # an older kernel, or the process is not reaped yet
        return None
    mask, *_, code = _PIDFD_INFO_STRUCT.unpack(asked)
    return int(code) if mask & PIDFD_INFO_EXIT else None
