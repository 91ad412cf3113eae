"""Measures the free memory of the host, or of the container that this process is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from . import processes

_CGROUP_ROOT = "/sys/fs/cgroup"
# For each version of control groups: the files of the limit and of the usage, and the counters in
# memory.stat of memory that the kernel can reclaim.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def get_free_memory_bytes(proc: str = processes.PROC_ROOT, cgroup_root: str = _CGROUP_ROOT) -> int:
    """Bytes; 0 if unknown. Sources: proc(5), and Documentation/admin-guide/cgroup-v{1,2} of the
    kernel.
    """
    free_bytes: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free_bytes.append(_parse_counters(Path(proc, "meminfo"))["MemAvailable:"] << 10)
    for folder in _iter_cgroups(proc, Path(cgroup_root)):
        for limit_file, usage_file, reclaimable in _MEMORY_FILES:
            with contextlib.suppress(OSError, KeyError, ValueError):  # another version, or "max"
                counters = _parse_counters(folder / "memory.stat")
                limit = int((folder / limit_file).read_text())
                usage = int((folder / usage_file).read_text())
                usage -= sum(counters[name] for name in reclaimable)
                free_bytes.append(limit - usage)
    return min(free_bytes, default=0)


def _iter_cgroups(proc: str, root: Path) -> Iterator[Path]:
    """The control group of this process, and its ancestors. A container may see only its own group,
    as the root.
    """
    with contextlib.suppress(OSError):
        for line in Path(proc, "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = root / controllers
            group = base / path.lstrip("/")
            yield group
            for parent in group.parents:
                if parent.is_relative_to(base):
                    yield parent


def _parse_counters(file: Path) -> dict[str, int]:
    counters: dict[str, int] = {}
    for line in file.read_text().splitlines():
        name, value, *_ = line.split()
        counters[name] = int(value)
    return counters
