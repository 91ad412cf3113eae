"""The ring files of a run dir, and the ends of the processes that wrote them.

A pidfd shows an end immediately, and a reused pid is never mistaken for the process. The node agent
opens pidfds before it loads anything else, so that this module imports little.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from hangwatch.model.ranks import ExitInfo
from hangwatch.ring.layout import RingError
from hangwatch.ring.reader import RingReader

from ...environment import run_dir
from ..system import processes

_RING_NAME_RE = re.compile(r"(\d{1,10})-(\d{1,20})" + re.escape(run_dir.RING_SUFFIX))

# linux/pidfd.h, since Linux 6.13; the exit code since 6.15, and only once the process was reaped:
# u64 mask, u64 cgroupid, u32 pid, tgid, ppid and eight uids and gids, i32 exit_code
PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
PIDFD_INFO_EXIT = 1 << 3
_EXIT_INFO_PAUSES_S = (0.0, 0.0, 0.001, 0.005, 0.02)  # the pause before each try
_PIDFD_INFO_STRUCT = struct.Struct("=2Q11Ii")


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFile:
    """A ring file and the process in its name."""

    path: Path
    pid: int
    start_ticks: int

    @property
    def key(self) -> str:
        return run_dir.format_process_key(self.pid, self.start_ticks)

    def open_reader(self) -> RingReader:
        """A reader of its read-only mapping. Raises OSError if it cannot be read, RingError if it is not
        a ring, or that of another process.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if not status.st_size:
                raise RingError("truncated: it is empty")
            mapped = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
        except ValueError as error:
            raise RingError(f"cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        reader = RingReader(mapped, status.st_ino)
        if (reader.pid, reader.start_ticks) != (self.pid, self.start_ticks):
            writer = run_dir.format_process_key(reader.pid, reader.start_ticks)
            raise RingError(f"foreign: it was written by process {writer}")
        return reader

    def refresh_reader(self, reader: RingReader | None) -> RingReader:
        """The given reader, or one of the file that has the name now: a process that calls exec()
        makes a new ring under the same name. Raises as `open_reader` does.
        """
        try:
            status = os.stat(self.path)
        except OSError:  # the file was removed; an existing mapping stays valid
            status = None
        if reader is None or (status is not None and status.st_ino != reader.inode):
            return self.open_reader()
        if status is not None and status.st_size < len(reader.data):
            # Reading beyond the end of the file would raise SIGBUS.
            raise RingError("truncated: it became shorter while its process lives")
        return reader

    def remove_files(self) -> None:
        for suffix in (run_dir.RING_SUFFIX, run_dir.STACKS_SUFFIX, run_dir.THREADS_SUFFIX):
            # The file was removed already, or the disk is read-only: then the next agent tries again.
            with contextlib.suppress(OSError):
                self.path.with_suffix(suffix).unlink()
        for suffix in (run_dir.GPU_CORE_SUFFIX, run_dir.GPU_PIPE_SUFFIX):
            with contextlib.suppress(OSError):  # most jobs want no core dumps
                self.path.with_name(f"{self.pid}{suffix}").unlink()


def find_ring_files(folder: Path) -> tuple[list[RingFile], list[str]]:
    """The ring files, oldest process first, and the names that match no process. Raises OSError."""
    files = []
    foreign_names = []
    for name in os.listdir(folder):
        if not name.endswith(run_dir.RING_SUFFIX):
            continue
        match = _RING_NAME_RE.fullmatch(name)
        if match is None:
            foreign_names.append(name)
            continue
        pid, start_ticks = map(int, match.groups())
        files.append(RingFile(path=folder / name, pid=pid, start_ticks=start_ticks))
    files.sort(key=lambda file: file.start_ticks)
    return files, foreign_names


def open_pidfd(pid: int, start_ticks: int) -> int | None:
    """A descriptor that becomes readable when this process ends; None if it has ended, or if the
    kernel does not support pidfds.

    The descriptor of a zombie is readable immediately, and gives the exit status.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if processes.read_stat(pid).start_ticks == start_ticks:
            return fd
    except (OSError, ValueError):
        pass  # the process ended between the two calls
    os.close(fd)
    return None


def from_wait_status(status: int) -> ExitInfo:
    """Decodes a status word of wait(2)."""
    code = os.waitstatus_to_exitcode(status)
    return ExitInfo(signal=-code) if code < 0 else ExitInfo(exit_status=code)


def read_exit_info(
    pid: int, start_ticks: int, pidfd: int | None, proc: str = processes.PROC_ROOT
) -> ExitInfo:
    """Exit status or signal of a process that has ended; empty if neither can be read any more.

    The pidfd and /proc are tried several times. The parent may reap the process after the pidfd and
    before /proc was read: from then on only the pidfd has the status, perhaps a moment later.
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
