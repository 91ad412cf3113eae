"""CPU, memory and storage of the ranks, as the kernel accounts for them: their cgroups, pressure stall
information, and waits for storage; and the versions of the layers below Python.

See Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/ and Documentation/accounting/psi.rst of the
kernel. The fields of /proc/self/mountstats are those of net/sunrpc/stats.c and nfs-utils' mountstats.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hangwatch.model.hardware import Observation, Weight

from ..system.processes import list_cgroups, read_text
from .host import Host, SourceUnavailableError, list_names, observe

CGROUPS = "cgroup"
PRESSURE = "pressure"
STORAGE = "storage"
VERSIONS = "versions"

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
_NFS_MOUNT = re.compile(r"device \S+ mounted on (\S+) with fstype nfs")
_MAX_THREADS = 1000
# The wheel's folder lies beside the library: nvidia_nccl_cu12-2.27.3.dist-info.
_NCCL_LIBRARY = re.compile(r"\s(/\S*/nvidia/nccl/lib/libnccl\.so\S*)")
_NCCL_WHEEL = re.compile(r"nvidia_nccl_cu\d+-([\d.]+)\.dist-info")
_MAX_GROUPS = 64


def probe_cgroups(host: Host) -> Iterator[Observation]:
    """Kills for memory and withheld CPU time in the ranks' cgroups, if these have counters."""
    root = host.sys / _CGROUP_ROOT
    folders: dict[Path, None] = {}  # in the order of the ranks, each once
    for pid in host.pids:
        for base, folder in list_cgroups(pid, _CONTROLLERS, host.proc, root):
            folders[folder if folder.is_dir() else base] = None
    has_counters = False
    for folder in folders:
        about = "/" + str(folder.relative_to(root)).removeprefix(".")
        for file, fields in _CGROUP_FIELDS.items():
            for line in read_text(folder / file).splitlines():
                name, _, value = line.partition(" ")
                if name in fields and value.isdigit():
                    what, weight = fields[name]
                    has_counters = True
                    yield observe(CGROUPS, about, what, int(value), weight, is_counter=True)
    if not has_counters and host.pids:
        raise SourceUnavailableError(
            "the cgroups of the ranks cannot be read", "mount /sys/fs/cgroup into the container"
        )


def probe_pressure(host: Host) -> Iterator[Observation]:
    """The share of time in which tasks waited for CPU, memory or storage, if it is counted."""
    is_counted = False
    for resource, (kind, limit) in _PRESSURE_LIMITS.items():
        text = read_text(host.proc / "pressure" / resource)
        is_counted |= bool(text)
        match = re.search(rf"^{kind} avg10=([\d.]+)", text, re.MULTILINE)
        if match is not None:
            share = float(match[1])
            yield observe(PRESSURE, resource, "waiting_share", share, is_abnormal=share >= limit)
    if not is_counted:
        raise SourceUnavailableError(
            "the kernel does not count pressure", "start the kernel with psi=1"
        )


def probe_storage(host: Host) -> Iterator[Observation]:
    """Ranks that wait in the kernel for storage, and NFS requests without a reply."""
    for pid in host.pids:
        # The threads in uninterruptible sleep, by the kernel function that they wait in
        counts: Counter[str] = Counter()
        tasks = host.proc / str(pid) / "task"
        for tid in list_names(tasks)[:_MAX_THREADS]:
            _, _, fields = read_text(tasks / tid / "stat").rpartition(")")
            if fields.split()[:1] == ["D"]:
                channel = read_text(tasks / tid / "wchan")
                counts["the kernel" if channel in ("", "0") else channel] += 1
        for channel, count in counts.items():
            what = f"uninterruptible in {channel}"
            yield observe(STORAGE, f"process {pid}", what, count, Weight.FAULT, is_abnormal=True)
    mount = ""
    for line in read_text(host.proc / "self/mountstats").splitlines():
        words = line.split()
        if line.startswith("device "):
            match = _NFS_MOUNT.match(line)
            mount = match[1] if match is not None else ""
        elif mount and words[:2] == ["xprt:", "tcp"] and len(words) > _RECEIVES:
            unanswered = int(words[_SENDS]) - int(words[_RECEIVES])
            what = "nfs_requests_without_reply"
            yield observe(STORAGE, mount, what, unanswered, is_abnormal=unanswered > 0)


def probe_versions(host: Host) -> Iterator[Observation]:
    """The versions that are known, to be compared with known problems."""
    versions = {
        "kernel": read_text(host.proc / "sys/kernel/osrelease"),
        "machine": os.uname().machine,
        "driver": read_text(host.sys / "module/nvidia/version"),
    }
    for pid in host.pids[:1]:
        library = _NCCL_LIBRARY.search(read_text(host.proc / str(pid) / "maps"))
        if library is None:
            continue
        path = host.proc / str(pid) / "root" / library[1].lstrip("/")
        for name in list_names(path.parents[3]):
            if wheel := _NCCL_WHEEL.fullmatch(name):
                versions.setdefault("nccl", wheel[1])
    # How the IOMMU treats devices: "identity" is a passthrough, "DMA" translates addresses.
    groups = host.sys / "kernel/iommu_groups"
    types = {read_text(groups / name / "type") for name in list_names(groups)[:_MAX_GROUPS]}
    versions["iommu"] = " and ".join(sorted(types - {""}))
    for about, version in versions.items():
        if version:
            yield observe(VERSIONS, about, "version", version, Weight.FACT)
