"""How much memory a host, or the container that this process is in, has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from . import processes

_CGROUPS = "/sys/fs/cgroup"
# By version of control groups: (the limit, what is used, the parts of memory.stat that the kernel
# takes back where it must)
_NAMES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def left(proc: str = processes.PROC, cgroups: str = _CGROUPS) -> int:
    """Bytes; 0 where nothing is known. Source: proc(5), and Documentation/admin-guide/cgroup-v{1,2}
    of the kernel.
    """
    known: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        known.append(_numbers(Path(proc, "meminfo"))["MemAvailable:"] << 10)
    for folder in _groups(proc, Path(cgroups)):
        for limit, used, reclaimed in _NAMES:
            with contextlib.suppress(OSError, KeyError, ValueError):  # another version, or "max"
                stat = _numbers(folder / "memory.stat")
                known.append(
                    int((folder / limit).read_text())
                    - int((folder / used).read_text())
                    + sum(stat[name] for name in reclaimed)
                )
    return min(known, default=0)


def _groups(proc: str, root: Path) -> Iterator[Path]:
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


def _numbers(file: Path) -> dict[str, int]:
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}
