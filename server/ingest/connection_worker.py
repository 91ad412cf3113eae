"""The process that serves the connections of node agents: it reads their heartbeats, passes them on
to the server, and writes the responses.

So the reading of thousands of heartbeats delays no other request. This process imports the standard
library only, and knows of HTTP just enough for heartbeats: a connection with any other request is
returned to the server. `agent_worker` starts the process, which ends when the server ends.

Frames go over a stream socket, in both directions: type (u8), connection (u64), the user at its other
end (i64, -1 if unknown), time of arrival (f64, the machine's monotonic clock), size of the head (u32),
size of the body (u32), the head and the body of a request or response. Connections are passed over a
socket of packets: a frame whose body was read from the connection, together with its file descriptor.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FRAME_STRUCT = struct.Struct("<BQqdII")
MAX_PACKET_BYTES = 1 << 16  # less than the kernel's default for the packets of a socket

_ODD_HEADERS = frozenset(("transfer-encoding", "expect", "connection", "upgrade"))
READ_BYTES = 1 << 16
RESERVED_FILES = 128  # files that are no connections: the server has the same limit
EVENTS_PER_POLL = 256
SCAN_INTERVAL_S = 1.0  # the interval of searches for connections whose time is up
# The pause between two polls. What arrives meanwhile is handled together: at 500 heartbeats a second,
# each takes 60 us in all after the long pause and 95 us after the short one.
PAUSE_S, LONG_PAUSE_S = 0.005, 0.02
MANY_CONNECTIONS = 2048  # the long pause does not matter to so many hosts, which report rarely


class FrameType(enum.IntEnum):
    CONNECTION = 0  # a connection, and what was read from it so far
    REQUEST = 1  # an agent's heartbeat
    RESPONSE = 2  # the complete response to the agent
    MARK = 3  # a mark is returned after all requests that had arrived


class WorkerFrame(NamedTuple):
    type: int
    number: int  # the connection's
    peer_uid: int
    arrived_at: float
    head: bytes
    body: bytes


def encode_frame(
    type: FrameType,
    number: int = 0,
    peer_uid: int = -1,
    arrived_at: float = 0.0,
    *,
    head: bytes = b"",
    body: bytes = b"",
) -> bytes:
    sizes = len(head), len(body)
    return FRAME_STRUCT.pack(type, number, peer_uid, arrived_at, *sizes) + head + body


def take_frames(received: bytearray) -> Iterator[WorkerFrame]:
    """The complete frames at the beginning of what was received, which are removed from it."""
    at = 0
    try:
        while len(received) - at >= FRAME_STRUCT.size:
            kind, number, uid, arrived_at, *sizes = FRAME_STRUCT.unpack_from(received, at)
            head_at = at + FRAME_STRUCT.size
            body_at = head_at + sizes[0]
            if len(received) < body_at + sizes[1]:
                break
            at = body_at + sizes[1]
            head = bytes(received[head_at:body_at])
            body = bytes(received[body_at:at])
            yield WorkerFrame(kind, number, uid, arrived_at, head, body)
    finally:
        del received[:at]


def encode_packet(number: int, peer_uid: int, received: bytes) -> bytes:
    """The packet that goes along with a connection. Raises OSError if too much was received."""
    packet = encode_frame(FrameType.CONNECTION, number, peer_uid, body=received)
    if len(packet) > MAX_PACKET_BYTES:
        raise OSError("too much was read of the connection")
    return packet


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The requests that the process serves, and their limits. Sizes are in bytes."""

    request_lines: Sequence[str]  # the heartbeats': "POST PATH HTTP/1.1"
    max_head: int
    max_body: int
    max_buffered: int  # all connections together
    head_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float  # the longest time between two requests


class OddRequestError(Exception):
    """The request is not an ordinary heartbeat: the server should answer it."""


def split_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The request line, and the headers by name in lower case. Raises OddRequestError."""
    request_line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name.strip() != name or name in headers:
            raise OddRequestError
        headers[name] = value.strip()
    return request_line, headers


def parse_head(head: bytes, options: WorkerOptions) -> int:
    """The size of a heartbeat's body. Raises OddRequestError."""
    request_line, headers = split_head(head)
    if len(head) > options.max_head or request_line not in options.request_lines:
        raise OddRequestError
    size = headers.get("content-length", "")
    if not size.isdecimal() or int(size) > options.max_body or not _ODD_HEADERS.isdisjoint(headers):
        raise OddRequestError
    return int(size)


@dataclass(slots=True)
class _Connection:
    """One agent's connection. The server gets one of its requests at a time."""

    number: int
    peer_uid: int  # passed on with each request
    socket: socket.socket
    received: bytearray
    head_bytes: int = 0  # the head of the current request; 0 as long as it is not complete
    body_bytes: int = 0
    is_answered: bool = True
    is_writing: bool = False  # the socket took only a part of the response
    unsent: bytes = b""
    timeout_s: float = 0.0  # the time that the agent has to send something; 0: nothing is expected
    deadline: float = math.inf


class ConnectionWorker:
    """``packets`` passes connections, ``stream`` frames; both lead to the server."""

    def __init__(
        self, packets: socket.socket, stream: socket.socket, options: WorkerOptions
    ) -> None:
        self._packets, self._stream, self._options = packets, stream, options
        self._by_fd: dict[int, _Connection] = {}
        self._by_number: dict[int, _Connection] = {}
        self._from_server = bytearray()
        self._to_server: list[bytes] = []  # frames of this pass
        self._buffered_bytes = 0
        self._max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES
        self._epoll = select.epoll()
        packets.setblocking(False)
        for channel in (packets, stream):
            self._epoll.register(channel, select.EPOLLIN)

    def run(self) -> None:
        """Raises ConnectionError when the server has ended."""
        next_scan = 0.0
        while True:
            ready = self._epoll.poll(SCAN_INTERVAL_S, EVENTS_PER_POLL)
            for fd, events in ready:
                if fd == self._packets.fileno():
                    self._take_connections()
                elif fd == self._stream.fileno():
                    self._read_stream()
                else:
                    self._handle_events(fd, events)
            # Waits while the server does not read; agents' requests wait in their sockets then.
            self._stream.sendall(b"".join(self._to_server))
            self._to_server.clear()
            if (now := time.monotonic()) >= next_scan:
                next_scan = now + SCAN_INTERVAL_S
                for connection in [c for c in self._by_fd.values() if c.deadline < now]:
                    self._close_connection(connection)
            if len(ready) < EVENTS_PER_POLL:
                time.sleep(PAUSE_S if len(self._by_number) < MANY_CONNECTIONS else LONG_PAUSE_S)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._by_fd.values():
            connection.socket.close()
        self._epoll.close()

    def _take_connections(self) -> None:
        """Adds the connections that the server passed."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, fds, _, _ = socket.recv_fds(self._packets, MAX_PACKET_BYTES, 1)
                if not packet:
                    raise ConnectionError
                if not fds:
                    continue  # the connection is lost, as this process may not open another file
                [frame] = take_frames(bytearray(packet))
                connected = socket.socket(fileno=fds[0])
                connected.setblocking(False)
                received = bytearray(frame.body)
                connection = _Connection(frame.number, frame.peer_uid, connected, received)
                self._buffered_bytes += len(received)
                self._by_fd[fds[0]] = self._by_number[frame.number] = connection
                self._epoll.register(fds[0], select.EPOLLIN)
                if len(self._by_fd) > self._max_connections:
                    self._return_connection(connection)
                else:
                    self._take_request(connection)

    def _read_stream(self) -> None:
        """Handles the frames of the server."""
        received = self._stream.recv(READ_BYTES)
        if not received:
            raise ConnectionError
        self._from_server += received
        for frame in take_frames(self._from_server):
            if frame.type == FrameType.MARK:
                # The mark follows everything that agents have sent by now.
                for fd, events in self._epoll.poll(0, len(self._by_fd) + 2):
                    self._handle_events(fd, events)
                self._to_server.append(encode_frame(FrameType.MARK))
            elif (connection := self._by_number.get(frame.number)) is not None:
                connection.unsent = frame.body
                self._send_unsent(connection)

    def _handle_events(self, fd: int, events: int) -> None:
        connection = self._by_fd.get(fd)
        if connection is None:
            return
        if events & select.EPOLLOUT:
            self._send_unsent(connection)
        if not events & ~select.EPOLLOUT or fd not in self._by_fd:
            return
        try:
            received = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        connection.received += received
        self._buffered_bytes += len(received)
        if not received or self._buffered_bytes > self._options.max_buffered:
            self._close_connection(connection)
        else:
            self._take_request(connection)

    def _take_request(self, connection: _Connection) -> None:
        """Passes on the next request, if it is complete and the previous one has been answered."""
        received, options = connection.received, self._options
        if not connection.is_answered or not received:
            return
        if not connection.head_bytes:
            head_bytes = received.find(b"\r\n\r\n") + 4
            if head_bytes < 4 and len(received) <= options.max_head:
                return self._set_timeout(connection, options.head_timeout_s)
            try:
                connection.body_bytes = parse_head(bytes(received[: head_bytes - 4]), options)
            except OddRequestError:
                return self._return_connection(connection)
            connection.head_bytes = head_bytes
        size = connection.head_bytes + connection.body_bytes
        if len(received) < size:
            return self._set_timeout(connection, options.body_timeout_s)
        frame = encode_frame(
            FrameType.REQUEST,
            connection.number,
            connection.peer_uid,
            time.monotonic(),
            head=bytes(received[: connection.head_bytes - 4]),
            body=bytes(received[connection.head_bytes : size]),
        )
        self._to_server.append(frame)
        del received[:size]
        self._buffered_bytes -= size
        connection.head_bytes, connection.is_answered = 0, False
        return self._set_timeout(connection, 0.0)

    def _send_unsent(self, connection: _Connection) -> None:
        """Sends what the connection takes of the response; another request may follow it."""
        try:
            connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return self._close_connection(connection)
        if connection.is_writing != bool(connection.unsent):
            connection.is_writing = not connection.is_writing
            events = select.EPOLLIN | (select.EPOLLOUT if connection.is_writing else 0)
            self._epoll.modify(connection.socket, events)
        if connection.unsent:
            return self._set_timeout(connection, self._options.body_timeout_s)
        connection.is_answered = True
        self._set_timeout(connection, self._options.keep_alive_s)
        return self._take_request(connection)

    def _return_connection(self, connection: _Connection) -> None:
        """Returns the connection to the server, with what was read of the request."""
        with contextlib.suppress(OSError):  # the agent of a connection that is lost connects again
            received = bytes(connection.received)
            packet = encode_packet(connection.number, connection.peer_uid, received)
            socket.send_fds(self._packets, [packet], [connection.socket.fileno()])
        self._close_connection(connection)

    def _close_connection(self, connection: _Connection) -> None:
        self._buffered_bytes -= len(connection.received)
        del self._by_fd[connection.socket.fileno()], self._by_number[connection.number]
        # Closing the socket would not unregister it: the server has a returned connection open.
        self._epoll.unregister(connection.socket)
        connection.socket.close()

    def _set_timeout(self, connection: _Connection, timeout_s: float) -> None:
        """Begins to wait for the agent, unless it waits already; 0: nothing is expected of it."""
        if timeout_s != connection.timeout_s:
            connection.timeout_s = timeout_s
            connection.deadline = time.monotonic() + timeout_s if timeout_s else math.inf


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the server ends this process
    packets_fd, stream_fd = map(int, sys.argv[1:3])
    options = WorkerOptions(**json.loads(sys.argv[3]))
    with socket.socket(fileno=packets_fd) as packets, socket.socket(fileno=stream_fd) as stream:
        worker = ConnectionWorker(packets, stream, options)
        with contextlib.closing(worker), contextlib.suppress(ConnectionError):
            worker.run()


if __name__ == "__main__":
    main()
