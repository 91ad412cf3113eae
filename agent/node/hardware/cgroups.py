"""The cgroups of the ranks: processes that were killed for memory, and CPU time that was withheld.

See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hangwatch.model.hardware import Observation, Weight

from .host import Host, SourceUnavailableError, read_text

SOURCE = "cgroup"

_ROOT = Path("fs/cgroup")
_CONTROLLERS = frozenset(("memory", "cpu"))  # of version 1
# By file and field: what it counts, and how much a change explains.
_FIELDS = {
    "memory.events": {
        "oom_kill": ("oom_kill", Weight.FAULT),
        "max": ("memory_at_limit", Weight.HINT),
    },
    "memory.oom_control": {"oom_kill": ("oom_kill", Weight.FAULT)},  # version 1
    "cpu.stat": {"nr_throttled": ("nr_throttled", Weight.HINT)},
}


def probe(host: Host) -> tuple[Observation, ...]:
    """The cgroups that the ranks are in. Raises SourceUnavailableError if they have no counters."""
    folders = {folder: None for pid in host.pids for folder in _find_folders(host, pid)}
    observations = tuple(
        observation for folder in folders for observation in _read_folder(host, folder)
    )
    if not observations and host.pids:
        raise SourceUnavailableError(
            "the cgroups of the ranks cannot be read", "mount /sys/fs/cgroup into the container"
        )
    return observations


def _find_folders(host: Host, pid: int) -> Iterator[Path]:
    """The folders of a process's cgroup: one in version 2, one for each controller in version 1."""
    root = host.sys / _ROOT
    for line in (read_text(host.proc / str(pid) / "cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and not _CONTROLLERS.intersection(controllers.split(",")):
            continue
        base = root / controllers
        folder = base / path.lstrip("/")
        # Inside a container, the path may be that of the host, and the files are at the root.
        yield folder if folder.is_dir() else base


def _read_folder(host: Host, folder: Path) -> Iterator[Observation]:
    about = "/" + str(folder.relative_to(host.sys / _ROOT)).removeprefix(".")
    for file, fields in _FIELDS.items():
        for line in (read_text(folder / file) or "").splitlines():
            name, _, value = line.partition(" ")
            if name in fields and value.isdigit():
                what, weight = fields[name]
                yield Observation(
                    source=SOURCE,
                    about=about,
                    what=what,
                    now=int(value),
                    weight=weight,
                    is_counter=True,
                )
