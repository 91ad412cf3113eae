"""The ring files of this process and of its ancestors.

An ancestor's ring shows which world this process joins: its job's, or one of its own in a rank.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hangwatch.model.groups import Group, format_group_address, is_group_address
from hangwatch.model.ranks import Lifecycle
from hangwatch.ring.layout import IDENTITY, LIVE_OFFSET, LiveWord, RingError
from hangwatch.ring.parts import RingParts

from ..environment import run_dir
from ..environment.identity import LaunchInfo, parse_environ
from .writer import RingWriter


def create_ring(pid: int, start_ticks: int, **parts: bool) -> tuple[Path, RingWriter]:
    """Creates the ring of this process; returns it after the run directory that it is in. ``parts``
    are the optional ones that `RingWriter` takes.

    It tries twice. A node agent that exits may remove its empty run directory before the ring is
    created there, and a program that replaced itself by another (exec) left a ring of the same
    name. Raises OSError if there can be no ring.
    """
    try:
        return _create_ring_once(pid, start_ticks, parts)
    except FileNotFoundError:
        pass
    except FileExistsError as error:
        # The name has this process's pid and start time, so this process wrote it before an exec.
        existing = Path(error.filename)
        with existing.open("rb") as file:
            file.seek(LIVE_OFFSET + 8 * LiveWord.LIFECYCLE)
            lifecycle = int.from_bytes(file.read(8), "little")
        if lifecycle > Lifecycle.STARTING:
            raise
        existing.unlink()
    return _create_ring_once(pid, start_ticks, parts)


def _create_ring_once(
    pid: int, start_ticks: int, parts: Mapping[str, bool]
) -> tuple[Path, RingWriter]:
    folder = run_dir.ensure_run_dir(os.environ["HANGWATCH_URL"])
    path = folder / (run_dir.format_process_key(pid, start_ticks) + run_dir.RING_SUFFIX)
    return folder, RingWriter(path, pid=pid, start_ticks=start_ticks, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AncestorRank:
    """The nearest ancestor of this process that has a ring."""

    lifecycle: Lifecycle
    job: str
    rank: int
    world_size: int
    master_address: str  # the address at which the ranks of its world meet; empty if unknown


def find_ancestor_rank() -> AncestorRank | None:
    """Finds the nearest ancestor that is a rank of a world or was started as one, by its ring; None if no
    ancestor is.

    A DataLoader worker or other subprocess inherits RANK, but the rank is its ancestor with a ring.
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
                ancestor = _read_ancestor(ring)
                if not is_group_address(ancestor.master_address):
                    return ancestor
            fields_after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            pid = int(fields_after_name[1])
        except (OSError, ValueError, RingError):
            return None
    return None


def _read_ancestor(ring: Path) -> AncestorRank:
    """Raises OSError, ValueError or RingError if the file cannot be read."""
    with ring.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        parts = RingParts(data)
        identity = parts.read_note(IDENTITY)
        lifecycle = parts.read_live_word(LiveWord.LIFECYCLE)
    if identity is None:
        raise RingError("its identity is being written")
    return AncestorRank(
        # A newer recorder may have further numbers, which count as the last known one.
        lifecycle=Lifecycle(min(lifecycle, Lifecycle.EXITING)),
        job=identity["job"],
        rank=identity["rank"],
        world_size=identity["world_size"],
        master_address=identity["master"],
    )


def get_master_address() -> str:
    """The ``address:port`` of the rendezvous in the environment; both parts may be empty."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def find_rendezvous(arguments: Mapping[str, Any]) -> str:
    """The place where the ranks meet by the arguments of init_process_group: ``address:port``, a
    path, or the port of a store; empty if the environment defines it, or nothing is known.

    The address of a store is left out, since the rank that serves it may name it localhost.
    """
    method = arguments.get("init_method")
    if method is not None:
        for prefix in ("tcp://", "file://"):
            if str(method).startswith(prefix):
                return str(method).removeprefix(prefix).partition("?")[0]
        return ""
    store = arguments.get("store")
    if isinstance(port := getattr(store, "port", None), int):
        return f"tcp:{port}"
    path = getattr(store, "path", None)
    return path if isinstance(path, str) else ""


def is_started_as_rank(launch: LaunchInfo) -> bool:
    """Whether the launcher gave this process the environment of a rank. Processes that a rank starts
    have the rank's environment, or that of a world of their own.
    """
    if launch.rank is None:
        return False
    ancestor = find_ancestor_rank()
    return ancestor is None or _is_same_world(
        ancestor, launch.rank, launch.world_size, get_master_address()
    )


def choose_launch(
    launch: LaunchInfo, rank: int, world_size: int, rendezvous: str
) -> LaunchInfo | None:
    """Chooses the job under which a process that joins a world is recorded, if it is.

    Some launchers run in rank 0 and start the other ranks from there, which meet at the same
    address. A rank may also start the ranks of a world of its own, which is a job of its own.
    """
    ancestor = find_ancestor_rank()
    if ancestor is None or ancestor.lifecycle not in (
        Lifecycle.INITIALISING,
        Lifecycle.INITIALISED,
    ):
        return launch
    address = rendezvous or get_master_address()
    if _is_same_world(ancestor, rank, world_size, address):
        return replace(launch, job=ancestor.job)
    if world_size < 2:
        return None
    if launch.job != ancestor.job:
        return launch
    return replace(launch, job=f"{launch.job}/{address}")


def choose_member_launch(group: Group) -> LaunchInfo | None:
    """Chooses the job under which a process is recorded that is a rank only as a member of a foreign
    group; None if a launcher or an ancestor has to do with ranks, such as a rank's helper process.
    """
    launch = parse_environ(os.environ, format_group_address(group))
    if launch.rank is not None or find_ancestor_rank() is not None:
        return None
    return launch


def _is_same_world(ancestor: AncestorRank, rank: int, world_size: int, address: str) -> bool:
    return (
        ancestor.master_address == address
        and ancestor.world_size == world_size
        and ancestor.rank != rank
    )
