"""The ring files of a run dir: which there are, and each as a mapped reader."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hangwatch.ring.layout import RingError
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import RingSnapshot

from ...environment import run_dir

_RING_NAME_RE = re.compile(r"(\d{1,10})-(\d{1,20})" + re.escape(run_dir.RING_SUFFIX))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFile:
    """One file and the process that its name tells of."""

    path: Path
    pid: int
    start_ticks: int

    @property
    def key(self) -> str:
        return run_dir.format_process_key(self.pid, self.start_ticks)

    @property
    def stacks_path(self) -> Path:
        return self.path.with_suffix(run_dir.STACKS_SUFFIX)

    def stat_file(self) -> os.stat_result | None:
        """Of the file that has the name now: a process that replaces its program by another makes
        its ring anew. None where none has it.
        """
        try:
            return os.stat(self.path)
        except OSError:  # removed; the pages live on in a mapping
            return None

    def open_reader(self) -> tuple[int, RingReader]:
        """The number of the file, and it mapped, read-only. Raises RingError where it is no ring,
        OSError where it cannot be read.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if not status.st_size:
                raise RingError("truncated: it is empty")
            mapped = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
        except ValueError as error:
            raise RingError(f"cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return status.st_ino, RingReader(mapped)

    def read_snapshot(self, reader: RingReader, now_ns: int) -> RingSnapshot:
        """Raises RingError where there is nothing to read, or where it is another process's."""
        snapshot = reader.read_snapshot(now_ns)
        if (snapshot.pid, snapshot.start_ticks) != (self.pid, self.start_ticks):
            raise RingError(
                "foreign: it was written by process"
                f" {run_dir.format_process_key(snapshot.pid, snapshot.start_ticks)}"
            )
        return snapshot

    def remove_files(self) -> None:
        for path in (self.path, self.stacks_path):
            with contextlib.suppress(
                OSError
            ):  # gone already, or the disk is read-only: the next agent tries again
                path.unlink()


def find_ring_files(folder: Path) -> tuple[list[RingFile], list[str]]:
    """The ring files in a folder, and the names of those that belong to no process. Raises OSError
    where it is gone.
    """
    found, foreign = [], []
    for name in os.listdir(folder):
        if not name.endswith(run_dir.RING_SUFFIX):
            continue
        if match := _RING_NAME_RE.fullmatch(name):
            found.append(RingFile(path=folder / name, pid=int(match[1]), start_ticks=int(match[2])))
        else:
            foreign.append(name)
    return sorted(found, key=lambda ring: ring.start_ticks), foreign
