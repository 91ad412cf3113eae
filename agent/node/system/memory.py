"""How much memory a host, or the container that this process is in, has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from . import processes

_CGROUP_ROOT = "/sys/fs/cgroup"
# By version of control groups: (the limit, what is used, the parts of memory.stat that the kernel
# takes back where it must)
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def get_free_memory_bytes(proc: str = processes.PROC_ROOT, cgroup_root: str = _CGROUP_ROOT) -> int:
    """Bytes; 0 where nothing is known. Source: proc(5), and Documentation/admin-guide/cgroup-v{1,2}
    of the kernel.
    """
    known: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        known.append(_parse_counters(Path(proc, "meminfo"))["MemAvailable:"] << 10)
    for folder in _iter_cgroups(proc, Path(cgroup_root)):
        for limit, used, reclaimed in _MEMORY_FILES:
            with contextlib.suppress(OSError, KeyError, ValueError):  # another version, or "max"
                stat = _parse_counters(folder / "memory.stat")
                known.append(
                    int((folder / limit).read_text())
                    - int((folder / used).read_text())
                    + sum(stat[name] for name in reclaimed)
                )
    return min(known, default=0)


def _iter_cgroups(proc: str, root: Path) -> Iterator[Path]:
    """The group that this process is in, and those around it. A container may see only its own, as
    the root.
    """
    with contextlib.suppress(OSError):
        for line in Path(proc, "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                base = root / controllers
                group = base / path.lstrip("/")
                yield from (
                    group,
                    *(
                        parent
                        for parent in group.parents
                        if parent == base or base in parent.parents
                    ),
                )


def _parse_counters(file: Path) -> dict[str, int]:
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}
