"""How much memory the server may use, and what happens before it needs more: the stacks of the job that
has the most of them are dropped, the oldest first, and the job that takes the most memory loses calls and may not grow.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from hangwatch.protocol.heartbeat import get_family
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.process import Process, StackSample

from .limits import MAX_MEMORY_BYTES

# The part of the control group's or the machine's memory that is used: files are cached in the rest.
_USABLE_SHARE = 0.75
# Stacks are dropped beyond this part of the limit: the rest is for processes and groups.
EVIDENCE_SHARE = 0.75
# The largest job may not grow beyond this part, and others may up to the limit.
GROWTH_SHARE = 0.85
# A job with less keeps all, and may grow: the memory is needed by something else.
MIN_SAMPLE_BYTES = MIN_JOB_BYTES = 8 << 20
# Approximate sizes, as measured with CPython 3.11 on x86-64
_PROCESS_BYTES, _STREAM_BYTES, _CALL_BYTES, _NUMBER_BYTES, _MEMBER_BYTES = 1500, 1400, 600, 32, 40

_HeldSample = tuple[StackSample, Process]


def find_memory_limit(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int:
    """The bytes that the server may use. Sources: proc(5), and Documentation/admin-guide/cgroup-v{1,2} of
    the kernel.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        meminfo = (proc / "meminfo").read_text(encoding="ascii")
        limits.append(int(meminfo.partition("MemTotal:")[2].split()[0]) << 10)
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(errors="replace").splitlines():
            _, _, fields = line.partition(":")
            controllers, _, path = fields.partition(":")
            if controllers and "memory" not in controllers.split(","):
                continue
            base = cgroup_root / controllers
            # The path that a container sees may be that of the host, and its own group is at the root.
            group = base / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(base):
                    for name in ("memory.max", "memory.limit_in_bytes"):
                        with contextlib.suppress(OSError, ValueError):  # another version, or "max"
                            limits.append(int((folder / name).read_text()))
    usable = [int(limit * _USABLE_SHARE) for limit in limits]
    return min([MAX_MEMORY_BYTES, *usable])


def drop_samples(processes: Iterable[Process], excess_bytes: int) -> dict[str, int]:
    """Drops stacks of at least so many bytes, as far as jobs have more than `MIN_SAMPLE_BYTES`. Returns
    how many of each family of jobs.
    """
    held_bytes: defaultdict[str, int] = defaultdict(int)
    held: defaultdict[str, list[_HeldSample]] = defaultdict(list)
    for process in processes:
        if process.samples:
            family = get_family(process.attempt.job)
            for sample in process.samples:
                held_bytes[family] += sample.size_bytes
                held[family].append((sample, process))
    for samples in held.values():
        samples.sort(key=lambda entry: entry[0].taken_at)
        samples.reverse()  # the oldest is the last
    dropped: defaultdict[str, int] = defaultdict(int)
    while excess_bytes > 0 and held_bytes:
        family = max(held_bytes, key=held_bytes.__getitem__)
        if held_bytes[family] <= MIN_SAMPLE_BYTES:
            break
        sample, process = held[family].pop()
        process.samples = tuple(kept for kept in process.samples if kept is not sample)
        held_bytes[family] -= sample.size_bytes
        excess_bytes -= sample.size_bytes
        dropped[family] += 1
    return dropped


def find_largest_family(fleet: Fleet) -> str | None:
    """The family of jobs whose processes, groups and calls take the most memory; None if that is little."""
    held_bytes = Counter(
        {family: _MEMBER_BYTES * fleet.count_members(family) for family in fleet.process_counts}
    )
    for process in fleet.processes.values():
        identity = process.identity
        size = _PROCESS_BYTES
        size += len(identity.program) + len(identity.unrecorded) + len(identity.on_hang)
        for stream in process.streams.values():
            group = stream.group
            size += _STREAM_BYTES + len(group.name) + len(group.desc) + len(group.backend)
            for call in stream.calls.values():
                signature = call.signature
                lists = (*signature.shapes, *(signature.splits or ()))
                size += _CALL_BYTES + _NUMBER_BYTES * sum(map(len, lists))
                size += len(signature.detail or "")
        held_bytes[get_family(process.attempt.job)] += size
    for family, size_bytes in held_bytes.most_common(1):
        if size_bytes > MIN_JOB_BYTES:
            return family
    return None


def return_freed_memory() -> None:
    """Gives memory that was freed back to the kernel, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
