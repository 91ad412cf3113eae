"""The ring files of this process and of its ancestors: where they are, how one is created, and the
lifecycle that one shows.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from hangwatch.model.ranks import Lifecycle
from hangwatch.ring.layout import (
    IDENTITY_OFFSET,
    IDENTITY_SIZE,
    LIVE_OFFSET,
    LiveWord,
    RingError,
)
from hangwatch.ring.parts import RingParts

from ..environment import run_dir
from .writer import RingWriter


def create_ring(
    key: str, pid: int, start_ticks: int, extra_bytes: int = 0
) -> tuple[Path, RingWriter]:
    """Creates the ring of this process; returns it after the run directory that it is in.

    It tries twice. A node agent that exits may remove its empty run directory before the ring is
    created there, and a program that replaced itself by another (exec) left a ring of the same
    name. Raises OSError if there can be no ring.
    """
    try:
        return _create_ring_once(key, pid, start_ticks, extra_bytes)
    except FileNotFoundError:
        pass
    except FileExistsError as error:
        # The name has this process's pid and start time, so this process wrote it before an exec.
        existing = Path(error.filename)
        if read_lifecycle(existing) > Lifecycle.STARTING:
            raise
        existing.unlink()
    return _create_ring_once(key, pid, start_ticks, extra_bytes)


def _create_ring_once(
    key: str, pid: int, start_ticks: int, extra_bytes: int
) -> tuple[Path, RingWriter]:
    folder = run_dir.ensure_run_dir(os.environ["HANGWATCH_URL"])
    path = folder / (key + run_dir.RING_SUFFIX)
    return folder, RingWriter(path, pid=pid, start_ticks=start_ticks, extra_bytes=extra_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AncestorRank:
    """The nearest ancestor of this process that has a ring."""

    lifecycle: Lifecycle
    job: str
    rank: int
    world_size: int
    master_address: str  # where the ranks of its world meet; empty if unknown


def find_ancestor_rank() -> AncestorRank | None:
    """None if no ancestor has a ring.

    A DataLoader worker or another subprocess inherits RANK but is no rank itself: one of its
    ancestors has the ring.
    """
    try:
        folder = run_dir.ensure_run_dir(os.environ["HANGWATCH_URL"])
    except run_dir.RunDirError:  # creating this process's own ring reports it
        return None
    pid = os.getppid()
    while pid > 1:
        try:
            key = run_dir.format_process_key(pid, run_dir.read_start_ticks(pid))
            ring = folder / (key + run_dir.RING_SUFFIX)
            if ring.exists():
                return _read_ancestor(ring)
            pid = _read_parent_pid(pid)
        except (OSError, ValueError, RingError):
            return None
    return None


def _read_ancestor(ring: Path) -> AncestorRank:
    """Raises OSError, ValueError or RingError if the file cannot be read."""
    with ring.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        parts = RingParts(data)
        identity = parts.read_note(IDENTITY_OFFSET, IDENTITY_SIZE)
        lifecycle = parts.read_live_word(LiveWord.LIFECYCLE)
    if identity is None:
        raise RingError("its identity is being written")
    return AncestorRank(
        lifecycle=_parse_lifecycle(lifecycle),
        job=identity["job"],
        rank=identity["rank"],
        world_size=identity["world_size"],
        master_address=identity["master"],
    )


def _read_parent_pid(pid: int) -> int:
    fields_after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields_after_name[1])


def read_lifecycle(ring: Path) -> Lifecycle:
    """The lifecycle in a ring file. Raises OSError if the file cannot be read."""
    with ring.open("rb") as file:
        file.seek(LIVE_OFFSET + 8 * LiveWord.LIFECYCLE)
        value = int.from_bytes(file.read(8), "little")
    return _parse_lifecycle(value)


def _parse_lifecycle(value: int) -> Lifecycle:
    """Of a newer recorder's value that is not known here, the last known one."""
    return Lifecycle(min(value, Lifecycle.EXITING))
