"""What a thread waits for in the kernel: the descriptors, the child process or the semaphore of the
system call in which it sleeps, and the processes that hold the other end.

/proc/PID/task/TID/syscall and /proc/PID/mem can be read by those who may trace the process (ptrace). The
numbers are those of the kernel's tables for x86-64 and, from include/uapi/asm-generic/unistd.h, ARM64.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_MAX_DESCRIPTORS = 4096  # of a process, and of a poll
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
    try:
        with open(f"{proc}/{pid}/task/{tid}/syscall", encoding="ascii") as file:
            fields = file.read(400).split()
        number, first, second = int(fields[0]), int(fields[1], 16), int(fields[2], 16)
    except (OSError, ValueError, IndexError):  # "running" has no arguments
        return _UNKNOWN
    if numbers is None:
        return _UNKNOWN
    if number in numbers.descriptor:
        return Awaited(descriptors=frozenset({first}))
    if number in numbers.epoll:
        return Awaited(descriptors=_read_epoll_targets(pid, first, proc))
    if number in numbers.poll:
        return Awaited(descriptors=_read_polled(pid, first, second, proc))
    if number == numbers.wait4:
        child = first & 0xFFFFFFFF
        return Awaited(child=child if child < 1 << 31 else 0)
    return Awaited(address=first if number == numbers.futex else 0)


def _read_polled(pid: int, address: int, count: int, proc: str) -> frozenset[int] | None:
    try:
        fd = os.open(f"{proc}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = min(count, _MAX_DESCRIPTORS) * _POLL_ENTRY.size
            data = os.pread(fd, size, address)
        finally:
            os.close(fd)
    except (OSError, OverflowError):
        return None
    whole = data[: len(data) // _POLL_ENTRY.size * _POLL_ENTRY.size]
    return frozenset(fd for fd, _, _ in _POLL_ENTRY.iter_unpack(whole))


def _read_epoll_targets(pid: int, descriptor: int, proc: str) -> frozenset[int] | None:
    try:
        with open(f"{proc}/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("tfd:")]
    except OSError:
        return None
    return frozenset(int(fields[1]) for fields in lines)


def read_descriptors(pid: int, proc: str) -> dict[int, str]:
    """What the descriptors of a process are, such as ``socket:[4711]``; empty if that may not be read."""
    links: dict[int, str] = {}
    try:
        for name in os.listdir(f"{proc}/{pid}/fd")[:_MAX_DESCRIPTORS]:
            try:
                links[int(name)] = os.readlink(f"{proc}/{pid}/fd/{name}")
            except OSError:
                continue  # it was closed just now
    except OSError:
        return {}
    return links


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The ends of pipes and the shared memory that a process has."""

    pipes: Mapping[str, str]  # the modes of its ends, as in "rw"
    memory: Collection[str]


def find_holders(
    awaited_by_tid: Mapping[int, Awaited], pid: int, children: Collection[int], proc: str
) -> dict[int, tuple[int, ...]]:
    """The child processes for which threads of ``pid`` wait, each with these threads: those whose end a
    thread waits for; those that have the other end of a pipe from which it reads, or into which it writes;
    those that share the memory of a semaphore with it. A forked child inherits both ends of its parent's
    pipes: it does not count where others have one end alone.
    """
    own = read_descriptors(pid, proc)
    wanted: dict[int, tuple[set[str], str]] = {}  # the pipes and the memory, by thread
    for tid, awaited in awaited_by_tid.items():
        pipes = {own[fd] for fd in awaited.descriptors or () if own.get(fd, "").startswith("pipe:")}
        memory = _find_shared_memory(pid, awaited.address, proc) if awaited.address else ""
        if pipes or memory:
            wanted[tid] = pipes, memory
    waiters: dict[int, list[int]] = {}
    for tid, awaited in awaited_by_tid.items():
        if awaited.child in children:
            waiters.setdefault(awaited.child, []).append(tid)
    if wanted:
        ends = {child: _read_ends(child, proc, wanted.values()) for child in children}
        for tid, (pipes, memory) in wanted.items():
            holders: set[int] = set()
            for pipe in pipes:
                modes = {c: e.pipes[pipe] for c, e in ends.items() if pipe in e.pipes}
                alone = {child for child, mode in modes.items() if len(mode) == 1}
                holders |= alone or modes.keys()
            holders |= {child for child, e in ends.items() if memory and memory in e.memory}
            for child in holders:
                waiters.setdefault(child, []).append(tid)
    return {child: tuple(tids) for child, tids in waiters.items()}


def _read_ends(pid: int, proc: str, wanted: Collection[tuple[set[str], str]]) -> _Ends:
    all_pipes = set().union(*(pipes for pipes, _ in wanted))
    pipes: dict[str, str] = {}
    for fd, link in read_descriptors(pid, proc).items():
        if link in all_pipes:
            mode = _read_access_mode(pid, fd, proc)
            if mode not in pipes.get(link, ""):
                pipes[link] = pipes.get(link, "") + mode
    needs_memory = any(memory for _, memory in wanted)
    memory = {path for _, _, path in _list_shared_memory(pid, proc)} if needs_memory else ()
    return _Ends(pipes=pipes, memory=memory)


def _read_access_mode(pid: int, descriptor: int, proc: str) -> str:
    try:
        with open(f"{proc}/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
            for line in file:
                if line.startswith("flags:"):
                    return _ACCESS_MODES[int(line.split()[1], 8) & _ACCESS_MASK]
    except (OSError, ValueError, IndexError):  # it was closed just now
        pass
    return ""


def _find_shared_memory(pid: int, address: int, proc: str) -> str:
    for first, end, path in _list_shared_memory(pid, proc):
        if first <= address < end:
            return path
    return ""


def _list_shared_memory(pid: int, proc: str) -> list[tuple[int, int, str]]:
    """The mappings of files in /dev/shm, where semaphores are: (first address, end, device and inode)."""
    mappings: list[tuple[int, int, str]] = []
    try:
        with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if "/dev/shm/" not in line:
                    continue
                span, _, _, device, inode = line.split()[:5]
                first, end = (int(part, 16) for part in span.split("-"))
                mappings.append((first, end, f"{device} {inode}"))
    except (OSError, ValueError):
        return []
    return mappings
