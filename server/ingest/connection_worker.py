"""The process that serves the connections of node agents: it reads their heartbeats, passes them on
to the server, and writes the responses.

So the server's own event loop has few connections, however many hosts there are, and reading
thousands of heartbeats delays nobody's query. This process imports the standard library only, and
knows of HTTP just enough for heartbeats: a connection with any other request is returned to the
server.

The server starts it (`server.http.agent_worker`), and its end is this process's end.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import sys
import time

from hangwatch.server.ingest.request_heads import (
    OddRequestError,
    RequestHead,
    WorkerOptions,
    parse_head,
)
from hangwatch.server.ingest.worker_frames import (
    MAX_PACKET_BYTES,
    NUMBER_STRUCT,
    Frame,
    FrameSender,
    FrameType,
    encode_frame,
    take_frames,
)

READ_BYTES = 1 << 16
EVENTS_PER_POLL = 256
SCAN_INTERVAL_S = 1.0  # for connections whose time is up
# Between two polls. What arrives meanwhile is handled together: at 500 heartbeats a second, each takes
# 60 us in all after the long pause and 95 us after the short one.
PAUSE_S, LONG_PAUSE_S = 0.005, 0.02
MANY_CONNECTIONS = 2048  # from here on hosts report so rarely that the long pause does not matter
_URGENT_TYPES = {False: FrameType.REQUEST, True: FrameType.URGENT_REQUEST}


class _Connection:
    """One agent's connection. The server gets one request of it at a time."""

    __slots__ = (
        "deadline",
        "head",
        "head_bytes",
        "is_answered",
        "is_writing",
        "number",
        "received",
        "socket",
        "timeout_s",
        "unsent",
    )

    def __init__(self, number: int, connected: socket.socket) -> None:
        self.number, self.socket = number, connected
        self.received = bytearray()
        self.head: RequestHead | None = None  # of the request that is not complete yet
        self.head_bytes = 0
        self.is_answered = True
        self.is_writing = False  # its socket took only a part of the response
        self.unsent = b""
        self.timeout_s = 0.0  # for what is expected of the agent; 0: nothing is
        self.deadline = math.inf


class ConnectionWorker:
    """``packets`` passes connections, ``stream`` frames; both lead to the server."""

    def __init__(
        self, packets: socket.socket, stream: socket.socket, options: WorkerOptions
    ) -> None:
        self._packets, self._stream, self._options = packets, stream, options
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._by_number: dict[int, _Connection] = {}
        self._from_server = bytearray()
        self._sender = FrameSender(stream)
        self._buffered_bytes = 0
        self._epoll = select.epoll()
        for channel in (packets, stream):
            channel.setblocking(False)
            self._epoll.register(channel, select.EPOLLIN)

    def run(self) -> None:
        """Returns when the server has ended."""
        next_scan = 0.0
        while True:
            ready = self._epoll.poll(SCAN_INTERVAL_S, EVENTS_PER_POLL)
            for fd, events in ready:
                if fd == self._packets.fileno():
                    if not self._take_connections():
                        return
                elif fd == self._stream.fileno():
                    if events & ~select.EPOLLOUT and not self._read_stream():
                        return
                else:
                    self._handle_events(fd, events)
            self._send_frames()
            if (now := time.monotonic()) >= next_scan:
                next_scan = now + SCAN_INTERVAL_S
                self._close_overdue(now)
            if len(ready) < EVENTS_PER_POLL:
                time.sleep(PAUSE_S if len(self._by_number) < MANY_CONNECTIONS else LONG_PAUSE_S)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections.values():
            connection.socket.close()
        self._epoll.close()

    def _take_connections(self) -> bool:
        """Adds the connections that the server passed. False if the server has ended."""
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._packets, MAX_PACKET_BYTES + 64, 1)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            (number,) = NUMBER_STRUCT.unpack_from(packet)
            if not fds:  # this process has no room for another file, and the connection is lost
                self._sender.add_frame(encode_frame(FrameType.CLOSED, number))
                continue
            connection = _Connection(number, socket.socket(fileno=fds[0]))
            connection.socket.setblocking(False)
            self._connections[fds[0]] = self._by_number[connection.number] = connection
            self._epoll.register(fds[0], select.EPOLLIN)
            self._add_received(connection, packet[NUMBER_STRUCT.size :])

    def _read_stream(self) -> bool:
        """Handles the frames of the server. False if it has ended."""
        try:
            received = self._stream.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._from_server += received
        for frame in take_frames(self._from_server):
            if frame.type == FrameType.MARK:
                self._read_all_ready()
                self._sender.add_frame(encode_frame(FrameType.MARK, frame.number))
            else:
                self._send_response(frame)
        return bool(received)

    def _read_all_ready(self) -> None:
        """Reads what agents have sent by now."""
        for fd, events in self._epoll.poll(0, len(self._connections) + 2):
            if fd in self._connections:
                self._handle_events(fd, events)

    def _handle_events(self, fd: int, events: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            return
        if events & select.EPOLLOUT:
            self._send_rest(connection)
        if events & ~select.EPOLLOUT and fd in self._connections:
            self._read_connection(connection)

    def _read_connection(self, connection: _Connection) -> None:
        try:
            received = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if received:
            self._add_received(connection, received)
        else:
            self._close_connection(connection)

    def _add_received(self, connection: _Connection, received: bytes) -> None:
        connection.received += received
        self._buffered_bytes += len(received)
        if self._buffered_bytes > self._options.max_buffered:
            self._close_connection(connection)
        else:
            self._take_request(connection)

    def _take_request(self, connection: _Connection) -> None:
        """Passes on the request, if it is complete and the one before has been answered."""
        received, options = connection.received, self._options
        if not connection.is_answered or not received:
            return
        try:
            if connection.head is None:
                connection.head_bytes = received.find(b"\r\n\r\n") + 4
                if connection.head_bytes < 4:
                    if len(received) > options.max_head:
                        raise OddRequestError
                    return self._set_timeout(connection, options.head_timeout_s)
                if connection.head_bytes > options.max_head:
                    raise OddRequestError
                connection.head = parse_head(bytes(received[: connection.head_bytes - 4]), options)
        except OddRequestError:
            return self._return_connection(connection)
        size = connection.head_bytes + connection.head.body_bytes
        if len(received) < size:
            return self._set_timeout(connection, options.body_timeout_s)
        frame = encode_frame(
            _URGENT_TYPES[connection.head.is_urgent],
            connection.number,
            bytes(received[: connection.head_bytes - 4]),
            bytes(received[connection.head_bytes : size]),
            time.monotonic(),
        )
        self._sender.add_frame(frame, connection.head.is_urgent)
        del received[:size]
        self._buffered_bytes -= size
        connection.head, connection.is_answered = None, False
        return self._set_timeout(connection, 0.0)

    def _send_response(self, frame: Frame) -> None:
        connection = self._by_number.get(frame.number)
        if connection is not None:
            connection.unsent = frame.body
            self._send_rest(connection)

    def _send_rest(self, connection: _Connection) -> None:
        """Sends what the connection takes of the response. After all of it, another request may
        follow.
        """
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
        packet = NUMBER_STRUCT.pack(connection.number) + connection.received
        if len(packet) <= MAX_PACKET_BYTES:
            with contextlib.suppress(OSError):  # the server is busy: the agent connects again
                socket.send_fds(self._packets, [packet], [connection.socket.fileno()])
        self._close_connection(connection)

    def _close_connection(self, connection: _Connection) -> None:
        self._buffered_bytes -= len(connection.received)
        connection.received.clear()
        del self._connections[connection.socket.fileno()], self._by_number[connection.number]
        # Closing does not: where the connection was returned, the server still has it open.
        self._epoll.unregister(connection.socket)
        connection.socket.close()
        self._sender.add_frame(encode_frame(FrameType.CLOSED, connection.number))

    def _set_timeout(self, connection: _Connection, timeout_s: float) -> None:
        """Begins to wait for the agent; 0: it has nothing to send. A part of what is expected does not
        prolong the time.
        """
        if timeout_s != connection.timeout_s:
            connection.timeout_s = timeout_s
            connection.deadline = time.monotonic() + timeout_s if timeout_s else math.inf

    def _send_frames(self) -> None:
        was_full = self._sender.is_full
        self._sender.send_frames()
        if self._sender.is_full != was_full:
            events = select.EPOLLIN | (0 if was_full else select.EPOLLOUT)
            self._epoll.modify(self._stream, events)

    def _close_overdue(self, now: float) -> None:
        overdue = [c for c in self._connections.values() if c.deadline < now]
        for connection in overdue:
            self._close_connection(connection)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the server ends this process
    packets_fd, stream_fd, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with socket.socket(fileno=packets_fd) as packets, socket.socket(fileno=stream_fd) as stream:
        worker = ConnectionWorker(packets, stream, WorkerOptions.decode(options))
        with contextlib.closing(worker):
            worker.run()


if __name__ == "__main__":
    main()
