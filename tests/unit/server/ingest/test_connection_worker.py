"""The process for node agents' connections, in a thread here: with real sockets."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hangwatch.server.ingest import connection_worker
from hangwatch.server.ingest.connection_worker import (
    MAX_PACKET_BYTES,
    ConnectionWorker,
    FrameType,
    OddRequestError,
    WorkerFrame,
    WorkerOptions,
    encode_frame,
    encode_packet,
    parse_head,
    take_frames,
)

LINE = "POST /api/v1/heartbeats HTTP/1.1"
OPTIONS = WorkerOptions(
    request_lines=[LINE],
    max_head=2000,
    max_body=200_000,
    max_buffered=1_000_000,
    head_timeout_s=10.0,
    body_timeout_s=10.0,
    keep_alive_s=10.0,
)
PATIENCE_S = 5.0


def make_request(body: bytes = b"{}", headers: str = "") -> bytes:
    return f"{LINE}\r\nHost: h\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Server:
    """The server's ends of the sockets, and a worker behind them."""

    def __init__(self, options: WorkerOptions) -> None:
        self.packets, packets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stream, stream = socket.socketpair()
        self._received = bytearray()
        self._frames: list[WorkerFrame] = []
        for end in (self.packets, self.stream):
            end.settimeout(PATIENCE_S)
        self._thread = threading.Thread(target=self._run, args=(packets, stream, options))
        self._thread.start()

    @staticmethod
    def _run(packets: socket.socket, stream: socket.socket, options: WorkerOptions) -> None:
        with (
            packets,
            stream,
            contextlib.closing(ConnectionWorker(packets, stream, options)) as worker,
            contextlib.suppress(ConnectionError),
        ):
            worker.run()

    def close(self) -> None:
        self.packets.close()
        self.stream.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it ends with the server"

    def connect_agent(self, number: int, sent: bytes = b"") -> socket.socket:
        """The agent's end of a connection; the server has read ``sent`` from it."""
        agent, accepted = socket.socketpair()
        agent.settimeout(PATIENCE_S)
        with accepted:
            packet = encode_packet(number, 1000, sent)
            socket.send_fds(self.packets, [packet], [accepted.fileno()])
        return agent

    def read_frame(self) -> WorkerFrame:
        while not self._frames:
            self._received += self.stream.recv(1 << 16)
            self._frames += take_frames(self._received)
        return self._frames.pop(0)

    def respond(self, number: int, response: bytes) -> None:
        self.stream.sendall(encode_frame(FrameType.RESPONSE, number, body=response))

    def take_returned(self) -> tuple[int, bytes, socket.socket]:
        packet, fds, _, _ = socket.recv_fds(self.packets, MAX_PACKET_BYTES, 1)
        [frame] = take_frames(bytearray(packet))
        return frame.number, frame.body, socket.socket(fileno=fds[0])


@contextlib.contextmanager
def running_worker(options: WorkerOptions = OPTIONS) -> Iterator[Server]:
    server = Server(options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with running_worker() as server:
        yield server


def test_heartbeats_and_responses_are_passed_on(server: Server) -> None:
    before = time.monotonic()
    with server.connect_agent(7, make_request(b"first")) as agent:
        for body in (b"first", b"second"):
            frame = server.read_frame()
            assert frame[:3] == (FrameType.REQUEST, 7, 1000)
            assert frame.body == body
            assert frame.head.decode() == f"{LINE}\r\nHost: h\r\nContent-Length: {len(body)}"
            assert before <= frame.arrived_at <= time.monotonic()
            server.respond(7, b"response to " + body)
            assert agent.recv(100) == b"response to " + body
            agent.sendall(make_request(b"second"))
    assert server.read_frame().body == b"second", "sent again before it was closed"


def test_request_in_pieces_is_put_together(server: Server) -> None:
    body = bytes(range(256)) * 700
    request = make_request(body)
    with server.connect_agent(1, request[:10]) as agent:
        for piece in (request[10:50], request[50:-1], request[-1:]):
            agent.sendall(piece)
            time.sleep(0.02)
        assert server.read_frame().body == body


def test_next_request_waits_for_the_response(server: Server) -> None:
    with server.connect_agent(1, make_request(b"1") + make_request(b"2")):
        assert server.read_frame().body == b"1"
        server.stream.sendall(encode_frame(FrameType.MARK))
        assert server.read_frame().type == FrameType.MARK, "the second one is not passed on"
        server.respond(1, b"OK")
        assert server.read_frame().body == b"2"


def test_large_response_is_sent_as_the_agent_reads_it(server: Server) -> None:
    response = bytes(range(256)) * 20_000
    with server.connect_agent(1, make_request()) as agent:
        server.read_frame()
        server.respond(1, response)
        received = b""
        while len(received) < len(response):
            received += agent.recv(1 << 20)
        assert received == response
        agent.sendall(make_request(b"next"))
        assert server.read_frame().body == b"next"


def test_mark_follows_all_requests_that_have_arrived(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(server.connect_agent(n, b"P")) for n in range(1, 50)]
        for agent in agents:
            agent.sendall(make_request()[1:])
        server.stream.sendall(encode_frame(FrameType.MARK))
        frames = [server.read_frame() for _ in range(50)]
        assert {frame.number for frame in frames[:49]} == set(range(1, 50))
        assert frames[49].type == FrameType.MARK


def test_requests_wait_while_the_server_does_not_read(server: Server) -> None:
    body = bytes(100_000)
    with contextlib.ExitStack() as stack:
        for number in range(1, 10):  # more than the stream takes
            agent = stack.enter_context(server.connect_agent(number))
            agent.sendall(make_request(body))
        time.sleep(0.5)
        frames = [server.read_frame() for _ in range(1, 10)]
    assert {frame.number for frame in frames} == set(range(1, 10))
    assert all(frame.body == body for frame in frames)


@pytest.mark.parametrize("file_count", [0, 1])
def test_connection_without_room_is_returned(
    file_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(connection_worker, "RESERVED_FILES", most - file_count)
    with running_worker() as server, contextlib.ExitStack() as stack:
        for number in range(1, file_count + 1):
            stack.enter_context(server.connect_agent(number, make_request()))
            assert server.read_frame().number == number
        stack.enter_context(server.connect_agent(99, make_request()))
        number, received, connected = server.take_returned()
        with connected:
            assert (number, received) == (99, make_request())


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /ranks HTTP/1.1\r\nHost: h\r\n\r\n",
        make_request(headers="Transfer-Encoding: chunked\r\n"),
        make_request(headers="Expect: 100-continue\r\n"),
        make_request(headers="Content-Length: 2\r\n"),
        make_request(headers=" folded\r\n"),
        make_request().replace(b"/heartbeats", b"/commands"),
        f"{LINE}\r\nContent-Length: {OPTIONS.max_body + 1}\r\n\r\n".encode(),
        f"{LINE}\r\nHost: h\r\n\r\n".encode(),
        f"{LINE}\r\nX: {'x' * OPTIONS.max_head}".encode(),
        make_request(headers=f"X: {'x' * OPTIONS.max_head}\r\n"),
    ],
)
def test_connection_with_another_request_is_returned(server: Server, request_: bytes) -> None:
    with server.connect_agent(3, make_request()) as agent:
        server.read_frame()
        server.respond(3, b"OK")
        assert agent.recv(10) == b"OK"
        agent.sendall(request_)
        number, received, connected = server.take_returned()
        with connected:
            assert number == 3
            assert received == request_
            connected.sendall(b"from the server")
            assert agent.recv(100) == b"from the server"


@pytest.mark.parametrize("sent", [b"P", make_request()[:-1], b""])
def test_connection_is_closed_after_its_time(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_worker, "SCAN_INTERVAL_S", 0.05)
    short = replace(OPTIONS, head_timeout_s=0.2, body_timeout_s=0.2, keep_alive_s=0.2)
    with running_worker(short) as server, server.connect_agent(1, make_request()) as agent:
        server.read_frame()
        time.sleep(0.4)
        server.respond(1, b"OK")  # however long the server takes
        assert agent.recv(10) == b"OK"
        with contextlib.suppress(OSError):  # the connection may be closed already
            agent.sendall(sent)
            assert agent.recv(10) == b""


def test_slow_request_has_no_more_time_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_worker, "SCAN_INTERVAL_S", 0.05)
    short = replace(OPTIONS, head_timeout_s=0.5)
    with running_worker(short) as server, server.connect_agent(1, b"P") as agent:
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                agent.sendall(b"O")
                time.sleep(0.02)
        assert time.monotonic() < deadline


def test_connection_that_exceeds_the_memory_limit_is_closed() -> None:
    small = replace(OPTIONS, max_buffered=100_000)
    with running_worker(small) as server, server.connect_agent(1) as agent:
        with contextlib.suppress(OSError):
            agent.sendall(make_request(bytes(150_000)))
        with contextlib.suppress(OSError):
            assert agent.recv(10) == b""
        with server.connect_agent(2, make_request(b"another")):
            assert server.read_frame().body == b"another"


def test_head_is_parsed_as_the_server_would() -> None:
    head = f"{LINE}\r\nHOST: h\r\ncontent-LENGTH:  17 \r\nPriority: u=1".encode()
    assert parse_head(head, OPTIONS) == 17
    for odd in (
        f"{LINE}\r\nContent-Length: -1",
        f"{LINE}\r\nContent-Length : 1",
        f"{LINE}\r\nno header\r\nContent-Length: 1",
        f"{LINE[:-1]}0\r\nContent-Length: 1",
        f"{LINE}\r\nContent-Length: 1\r\nConnection: close",
    ):
        with pytest.raises(OddRequestError):
            parse_head(odd.encode(), OPTIONS)
