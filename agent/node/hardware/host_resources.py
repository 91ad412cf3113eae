"""CPU, memory and storage of the ranks, as the kernel accounts for them: their cgroups, pressure stall
information, and waits for storage.

See Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/ and Documentation/accounting/psi.rst of the
kernel. The fields of /proc/self/mountstats are those of net/sunrpc/stats.c and nfs-utils' mountstats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hangwatch.model.hardware import Observation, Weight

from ..system.processes import list_cgroups
from .host import Host, SourceUnavailableError, list_names, observe, read_text

CGROUPS = "cgroup"
PRESSURE = "pressure"
STORAGE = "storage"

_CGROUP_ROOT = Path("fs/cgroup")
_CONTROLLERS = frozenset(("memory", "cpu"))  # the controllers of version 1 that are read
# What each field of a file counts, and how much a change explains.
_CGROUP_FIELDS = {
    "memory.events": {
        "oom_kill": ("oom_kill", Weight.FAULT),
        "max": ("memory_at_limit", Weight.HINT),
    },
    "memory.oom_control": {"oom_kill": ("oom_kill", Weight.FAULT)},  # version 1
    "cpu.stat": {"nr_throttled": ("nr_throttled", Weight.HINT)},
}
# The line of each resource, and the lowest percentage of the last ten seconds that is abnormal.
_PRESSURE_LIMITS = {"cpu": ("some", 80.0), "memory": ("full", 10.0), "io": ("full", 25.0)}
# Positions of two counters in a line of mountstats that begins with "xprt: tcp".
_SENDS, _RECEIVES = 8, 9
_MAX_THREADS = 1000


def probe_cgroups(host: Host) -> tuple[Observation, ...]:
    """Processes that were killed for memory, and CPU time that was withheld, in the cgroups that the
    ranks are in. Raises SourceUnavailableError if these have no counters.
    """
    folders: dict[Path, None] = {}
    for pid in host.pids:
        for base, folder in list_cgroups(pid, _CONTROLLERS, host.proc, host.sys / _CGROUP_ROOT):
            folders[folder if folder.is_dir() else base] = None
    observations: list[Observation] = []
    for folder in folders:
        about = "/" + str(folder.relative_to(host.sys / _CGROUP_ROOT)).removeprefix(".")
        for file, fields in _CGROUP_FIELDS.items():
            for line in (read_text(folder / file) or "").splitlines():
                name, _, value = line.partition(" ")
                if name in fields and value.isdigit():
                    what, weight = fields[name]
                    observations.append(
                        observe(CGROUPS, about, what, int(value), weight, is_counter=True)
                    )
    if not observations and host.pids:
        raise SourceUnavailableError(
            "the cgroups of the ranks cannot be read", "mount /sys/fs/cgroup into the container"
        )
    return tuple(observations)


def probe_pressure(host: Host) -> tuple[Observation, ...]:
    """How much of the time tasks waited for CPU, memory or storage. Raises SourceUnavailableError
    if the kernel does not count it.
    """
    folder = host.proc / "pressure"
    texts = {resource: read_text(folder / resource) for resource in _PRESSURE_LIMITS}
    if not any(texts.values()):
        raise SourceUnavailableError(
            "the kernel does not count pressure", "start the kernel with psi=1"
        )
    observations: list[Observation] = []
    for resource, (kind, limit) in _PRESSURE_LIMITS.items():
        for line in (texts[resource] or "").splitlines():
            name, _, fields = line.partition(" ")
            values = dict(field.partition("=")[::2] for field in fields.split())
            if name == kind and "avg10" in values:
                share = float(values["avg10"])
                is_abnormal = share >= limit
                observations.append(
                    observe(PRESSURE, resource, "waiting_share", share, is_abnormal=is_abnormal)
                )
    return tuple(observations)


def probe_storage(host: Host) -> tuple[Observation, ...]:
    """Ranks that wait in the kernel for storage, and NFS requests without a reply."""
    observations = [o for pid in host.pids for o in _read_blocked_threads(host, pid)]
    observations += _read_mounts(read_text(host.proc / "self" / "mountstats") or "")
    return tuple(observations)


def _read_blocked_threads(host: Host, pid: int) -> Iterator[Observation]:
    """The threads of a rank in uninterruptible sleep, by the kernel function that they wait in."""
    counts: Counter[str] = Counter()
    tasks = host.proc / str(pid) / "task"
    for tid in list_names(tasks)[:_MAX_THREADS]:
        state = (read_text(tasks / tid / "stat") or "").rpartition(")")[2].split()[:1]
        if state == ["D"]:
            counts[read_text(tasks / tid / "wchan") or "the kernel"] += 1
    for channel, count in counts.items():
        what = f"uninterruptible in {'the kernel' if channel == '0' else channel}"
        yield observe(STORAGE, f"process {pid}", what, count, Weight.FAULT, is_abnormal=True)


def _read_mounts(mountstats: str) -> Iterator[Observation]:
    mount = ""
    for line in mountstats.splitlines():
        words = line.split()
        if line.startswith("device ") and "fstype" in words:
            kind = words[words.index("fstype") + 1]
            is_nfs = kind.startswith("nfs") and "on" in words
            mount = words[words.index("on") + 1] if is_nfs else ""
        elif mount and words[:2] == ["xprt:", "tcp"] and len(words) > _RECEIVES:
            unanswered = int(words[_SENDS]) - int(words[_RECEIVES])
            what = "nfs_requests_without_reply"
            yield observe(STORAGE, mount, what, unanswered, is_abnormal=unanswered > 0)
