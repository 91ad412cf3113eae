"""The ring files of a run dir: which there are, and each as a mapped reader."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hangwatch.ring import RingError
from hangwatch.ring_reader import RingReader, Snapshot

from .. import rundir

_NAME = re.compile(r"(\d{1,10})-(\d{1,20})" + re.escape(rundir.RING))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFile:
    """One file and the process that its name tells of."""

    path: Path
    pid: int
    start_ticks: int

    @property
    def key(self) -> str:
        return rundir.process_key(self.pid, self.start_ticks)

    @property
    def stacks_path(self) -> Path:
        return self.path.with_suffix(rundir.STACKS)

    def number(self) -> int:
        """Of the file that has the name now: a process that replaces its program by another makes its ring anew. 0 where none has it."""
        try:
            return os.stat(self.path).st_ino
        except OSError:  # removed; the pages live on in a mapping
            return 0

    def open(self) -> RingReader:
        """Maps it, read-only. Raises RingError where it is no ring, OSError where it cannot be read."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            if not size:
                raise RingError("truncated: it is empty")
            mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except ValueError as error:
            raise RingError(f"cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return RingReader(mapped)

    def snapshot(self, reader: RingReader, now_ns: int) -> Snapshot:
        """Raises RingError where there is nothing to read, or where it is another process's."""
        if self._shrunk(reader):
            raise RingError("truncated: it was cut short while its process lives")
        snapshot = reader.snapshot(now_ns)
        if (snapshot.pid, snapshot.start_ticks) != (self.pid, self.start_ticks):
            raise RingError(f"foreign: it was written by process {rundir.process_key(snapshot.pid, snapshot.start_ticks)}")
        return snapshot

    def _shrunk(self, reader: RingReader) -> bool:
        """The file was cut after it was mapped: reading on would be a SIGBUS."""
        try:
            return os.stat(self.path).st_size < len(reader.data)
        except OSError:  # removed; the pages live on in the mapping
            return False

    def remove(self) -> None:
        for path in (self.path, self.stacks_path):
            with contextlib.suppress(OSError):  # gone already, or the disk is read-only: the next agent tries again
                path.unlink()


def find(folder: Path) -> tuple[list[RingFile], list[str]]:
    """The ring files in a folder, and the names of those that belong to no process. Raises OSError where it is gone."""
    found, foreign = [], []
    for name in os.listdir(folder):
        if not name.endswith(rundir.RING):
            continue
        if match := _NAME.fullmatch(name):
            found.append(RingFile(path=folder / name, pid=int(match[1]), start_ticks=int(match[2])))
        else:
            foreign.append(name)
    return sorted(found, key=lambda ring: ring.start_ticks), foreign
