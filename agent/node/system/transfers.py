"""What data a process moves, thread by thread: what it reads and writes, and what its connections carry.

The kernel counts for each thread what it reads and writes (proc_pid_io(5)), but not what it receives and
sends by recv and send. Measured with downloads of 5 MB on Linux 6.18: `urllib` and `requests` over TLS
move these counters by 5.0 and 5.2 MB, since OpenSSL reads and writes; without TLS by nothing. For TCP,
the kernel counts the bytes of each connection (sock_diag(7), `struct tcp_info` in linux/tcp.h).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hangwatch.model.ranks import RECORDER_THREAD_NAME, ThreadStack
from hangwatch.stacks.activities import classify_activity

from . import processes
from .awaited import Awaited

_MAX_ACCOUNTS = 1024
_MAX_TREE_PROCESSES = 64

# linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, socket
_ATTRIBUTE = struct.Struct("=HH")
_PORTS = struct.Struct(">HH")
_MESSAGE_BYTES = 72  # struct inet_diag_msg, with the inode at its end
_BYTES = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_BYTES_OFFSET = 120
_ESTABLISHED, _CLOSE_WAIT, _LISTEN = 1, 8, 10  # states
_NETLINK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection over TCP: the bytes that it has carried in both directions."""

    bytes: int
    is_accepted: bool  # the local end listens: peers made the connection


def read_connections() -> dict[int, Connection]:
    """The TCP connections of the network namespace, by inode; empty if the kernel does not tell."""
    try:
        found = [*_dump_sockets(socket.AF_INET), *_dump_sockets(socket.AF_INET6)]
    except OSError:
        return {}
    listening = {port for state, port, _, _ in found if state == _LISTEN}
    connections = {}
    for state, port, inode, size in found:
        if state != _LISTEN and inode:
            connections[inode] = Connection(bytes=size, is_accepted=port in listening)
    return connections


def _dump_sockets(family: int) -> Iterable[tuple[int, int, int, int]]:
    """(state, local port, inode, bytes carried) of each TCP socket. Raises OSError."""
    states = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT | 1 << _LISTEN
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), states)
    header = _HEADER.pack(
        _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_NETLINK_TIMEOUT_S)
        netlink.send(header + request)
        while True:
            data = netlink.recv(1 << 16)
            offset = 0
            while offset + _HEADER.size <= len(data):
                length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
                if kind == _NLMSG_DONE or length < _HEADER.size:
                    return
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel does not list sockets")
                yield _parse_socket(data[offset + _HEADER.size : offset + length])
                offset += (length + 3) & ~3


def _parse_socket(message: bytes) -> tuple[int, int, int, int]:
    local_port, _ = _PORTS.unpack_from(message, 4)
    (inode,) = struct.unpack_from("=I", message, _MESSAGE_BYTES - 4)
    size = 0
    offset = _MESSAGE_BYTES
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        start = offset + _ATTRIBUTE.size + _BYTES_OFFSET
        if kind == _INET_DIAG_INFO and start + _BYTES.size <= offset + length:
            size = sum(_BYTES.unpack_from(message, start))
        offset += max(_ATTRIBUTE.size, (length + 3) & ~3)
    return message[1], local_port, inode, size


class TransferMeter:
    """Counts the bytes that threads and child processes move. A connection counts from the first
    measurement of its process on, for the thread that waits for it then.
    """

    def __init__(self, proc: str = processes.PROC_ROOT) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        self._sizes: dict[int, Mapping[int, int]] = {}  # the last size of connections, by pid
        self._carried: dict[tuple[int, int], int] = {}  # by pid and thread

    def measure_threads(
        self, threads: Iterable[ThreadStack], pid: int, awaited_by_tid: Mapping[int, Awaited]
    ) -> processes.ThreadStacks:
        """The stacks with the bytes that each thread has moved.

        A connection counts for the thread that waits for it. The connections that no thread of Python waits
        for belong to native threads, or are between two system calls: they count for the threads of which it
        is not known for what they wait. Connections that peers made to a server in the process, such as a
        store or an exporter of metrics, only count for a thread that waits for them.
        """
        inodes = self._read_sockets(pid)
        connections = read_connections() if inodes else {}
        with self._lock:
            grown = self._record_growth(pid, connections, inodes.values())
            claimed_by_tid = {}
            for tid, target in awaited_by_tid.items():
                claimed = {inodes[fd] for fd in target.descriptors or () if fd in inodes}
                claimed_by_tid[tid] = claimed & connections.keys()
            made = {inode for inode in grown if not connections[inode].is_accepted}
            unclaimed = made.difference(*claimed_by_tid.values())
            measured = []
            for thread in threads:
                tid = pid if thread.main else thread.tid or 0
                if not tid or thread.pid is not None or thread.thread == RECORDER_THREAD_NAME:
                    measured.append(thread)
                    continue
                own = claimed_by_tid.get(tid)
                if not own:
                    # The thread may be waiting for a connection that its system call does not show.
                    waits = classify_activity(thread).waits
                    own = unclaimed if not waits or waits.may_transfer else set()
                carried = self._carried.get((pid, tid), 0)
                carried += sum(grown.get(inode, 0) for inode in own)
                self._carried[pid, tid] = carried
                moved = carried + processes.read_io_bytes(pid, tid, self._proc)
                measured.append(replace(thread, moved_bytes=moved))
        return tuple(measured)

    def measure_tree(self, pid: int, parent: int) -> int:
        """The bytes that a child process and its descendants have moved. Connections that a child inherited
        are its parent's; all others carried their bytes for it.
        """
        inherited = self._read_sockets(parent).values()
        connections = read_connections()
        total, pending = 0, [pid]
        for _ in range(_MAX_TREE_PROCESSES):
            if not pending:
                break
            current = pending.pop()
            inodes = set(self._read_sockets(current).values()).difference(inherited)
            with self._lock:
                self._sizes.setdefault(current, {})
                carried = self._carried.get((current, 0), 0)
                for inode, size in self._record_growth(current, connections, inodes).items():
                    if not connections[inode].is_accepted:
                        carried += size
                self._carried[current, 0] = carried
            total += carried + processes.read_io_bytes(current, 0, self._proc)
            pending += processes.list_children(current, self._proc)
        return total

    def _read_sockets(self, pid: int) -> dict[int, int]:
        """The inodes of the sockets of a process, by descriptor."""
        links = processes.read_descriptors(pid, self._proc)
        return {fd: int(link[8:-1]) for fd, link in links.items() if link.startswith("socket:[")}

    def _record_growth(
        self, pid: int, connections: Mapping[int, Connection], inodes: Collection[int]
    ) -> dict[int, int]:
        """By how much connections of a process have grown since its last measurement, by inode; none at
        the first one.
        """
        sizes = {inode: connections[inode].bytes for inode in inodes if inode in connections}
        before = self._sizes.pop(pid, None)
        self._sizes[pid] = sizes
        while len(self._sizes) > _MAX_ACCOUNTS:
            dropped = next(iter(self._sizes))
            del self._sizes[dropped]
            self._carried = {key: n for key, n in self._carried.items() if key[0] != dropped}
        if before is None:
            return {}
        return {inode: max(0, size - before.get(inode, 0)) for inode, size in sizes.items()}
