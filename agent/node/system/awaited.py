"""What a thread waits for in the kernel: the descriptors, the child process or the semaphore of the
system call in which it sleeps, and the processes that hold the other end.

/proc/PID/task/TID/syscall and /proc/PID/mem can be read by those who may trace the process (ptrace). The
numbers are those of the kernel's tables for x86-64 and, from include/uapi/asm-generic/unistd.h, ARM64.
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .processes import MemoryMapping, read_descriptors, read_fields, read_mappings, read_text

_MAX_POLLED = 4096  # descriptors
_POLL_ENTRY = struct.Struct("=ihh")  # struct pollfd
_ACCESS_MODES = ("r", "w", "rw")  # O_RDONLY, O_WRONLY, O_RDWR
_ACCESS_MASK = 3  # O_ACCMODE


class _CallNumbers(NamedTuple):
    """The numbers of system calls by what their first argument is."""

    descriptor: frozenset[int]  # a descriptor
    poll: frozenset[int]  # an array of pollfd
    epoll: frozenset[int]  # a descriptor of epoll
    wait4: int  # a process
    futex: int  # an address


_NUMBERS = {
    "x86_64": _CallNumbers(
        # read write pread64 pwrite64 readv writev sendfile connect accept sendto recvfrom sendmsg
        # recvmsg fsync fdatasync accept4 preadv pwritev recvmmsg
        frozenset({0, 1, 17, 18, 19, 20, 40, 42, 43, 44, 45, 46, 47, 74, 75, 288, 295, 296, 299}),
        frozenset({7, 271}),
        frozenset({232, 281, 441}),
        wait4=61,
        futex=202,
    ),
    "aarch64": _CallNumbers(
        frozenset(
            {63, 64, 65, 66, 67, 68, 69, 70, 71, 82, 83, 202, 203, 206, 207, 211, 212, 242, 243}
        ),
        frozenset({73}),
        frozenset({22, 441}),
        wait4=260,
        futex=98,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """What the system call of a thread waits for. ``descriptors`` is None if that cannot be known: the
    thread runs, or its system call may not be read.
    """

    descriptors: frozenset[int] | None = frozenset()
    child: int = 0  # the process whose end it waits for; 0 if it waits for none
    address: int = 0  # that of a futex


_UNKNOWN = Awaited(descriptors=None)


def read_awaited(pid: int, tid: int, proc: str) -> Awaited:
    """What a thread waits for, as far as it can be read."""
    numbers = _NUMBERS.get(platform.machine())
    fields = read_text(f"{proc}/{pid}/task/{tid}/syscall").split()
    try:
        number, first, second = int(fields[0]), int(fields[1], 16), int(fields[2], 16)
    except (ValueError, IndexError):  # "running" has no arguments
        return _UNKNOWN
    if numbers is None:
        return _UNKNOWN
    if number in numbers.descriptor:
        return Awaited(descriptors=frozenset({first}))
    if number in numbers.epoll:
        text = read_text(f"{proc}/{pid}/fdinfo/{first}")
        targets = [line.split()[1] for line in text.splitlines() if line.startswith("tfd:")]
        return Awaited(descriptors=frozenset(map(int, targets)) if text else None)
    if number in numbers.poll:
        size = min(second, _MAX_POLLED) * _POLL_ENTRY.size
        try:
            with open(f"{proc}/{pid}/mem", "rb", buffering=0) as memory:
                data = os.pread(memory.fileno(), size, first)
        except (OSError, OverflowError):
            return _UNKNOWN
        whole = data[: len(data) // _POLL_ENTRY.size * _POLL_ENTRY.size]
        return Awaited(descriptors=frozenset(fd for fd, _, _ in _POLL_ENTRY.iter_unpack(whole)))
    if number == numbers.wait4:
        child = first & 0xFFFFFFFF
        return Awaited(child=child if child < 1 << 31 else 0)
    return Awaited(address=first if number == numbers.futex else 0)


def find_holders(
    awaited_by_tid: Mapping[int, Awaited], pid: int, children: Collection[int], proc: str
) -> dict[int, tuple[int, ...]]:
    """The child processes for which threads of ``pid`` wait, each with these threads: those whose end a
    thread waits for; those that have the other end of a pipe from which it reads, or into which it writes;
    those that share the memory of a semaphore with it. A forked child inherits both ends of its parent's
    pipes: it does not count where others have one end alone.
    """
    own = read_descriptors(pid, proc)
    has_address = any(awaited.address for awaited in awaited_by_tid.values())
    own_memory = _list_shared_memory(pid, proc) if has_address else []
    wanted = {}  # the pipes and the shared memory, by thread
    for tid, awaited in awaited_by_tid.items():
        links = {own.get(fd, "") for fd in awaited.descriptors or ()}
        wanted[tid] = {link for link in links if link.startswith("pipe:")}
        for mapping in own_memory:
            if mapping.first <= awaited.address < mapping.end:
                wanted[tid].add(mapping.file_id)
    all_wanted = set().union(*wanted.values())
    ends = {child: _read_ends(child, all_wanted, proc) for child in children if all_wanted}
    waiters: dict[int, list[int]] = {}
    for tid, awaited in awaited_by_tid.items():
        holders = {awaited.child}.intersection(children)
        for name in wanted[tid]:
            having = {child for child in ends if name in ends[child]}
            alone = {child for child in having if len(ends[child][name]) == 1}
            holders |= alone or having
        for child in holders:
            waiters.setdefault(child, []).append(tid)
    return {child: tuple(tids) for child, tids in waiters.items()}


def _read_ends(pid: int, wanted: Collection[str], proc: str) -> dict[str, set[str]]:
    """Which of these pipes and shared memories a process has, and of a pipe the modes of its ends: "r", "w"
    or both.
    """
    ends: dict[str, set[str]] = {}
    for fd, link in read_descriptors(pid, proc).items():
        if link not in wanted:
            continue
        # A descriptor may be closed by now.
        with contextlib.suppress(OSError, LookupError, ValueError):
            flags = int(read_fields(f"{proc}/{pid}/fdinfo/{fd}")["flags"], 8)
            modes = _ACCESS_MODES[flags & _ACCESS_MASK]
            ends.setdefault(link, set()).update(modes)
    if not all(name.startswith("pipe:") for name in wanted):
        for mapping in _list_shared_memory(pid, proc):
            ends[mapping.file_id] = set()
    return ends


def _list_shared_memory(pid: int, proc: str) -> list[MemoryMapping]:
    """The mappings of files in /dev/shm, where semaphores are; empty if they may not be read."""
    try:
        return [m for m in read_mappings(pid, proc) if "/dev/shm/" in m.path]
    except (OSError, ValueError):
        return []
