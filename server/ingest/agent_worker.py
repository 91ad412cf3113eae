"""The server's side of the process that serves node agents' connections, `connection_worker`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hangwatch.tracking.fleet import AgentRegistry

from ..core import limits
from ..core.events import wait_for_event
from ..core.limits import BODY_S, HEAD_S, KEEP_ALIVE_S
from ..core.supervision import MIN_RESTART_DELAY_S, choose_restart_delay
from .connection_worker import (
    MAX_PACKET_BYTES,
    FrameType,
    WorkerFrame,
    WorkerOptions,
    encode_frame,
    encode_packet,
    take_frames,
)
from .heartbeat_queue import HeartbeatQueue

log = logging.getLogger("hangwatch")

MIN_HOSTS = 64  # fewer cost little, and one process is simpler to look after
MAX_BUFFERED_BYTES = 256 << 20  # all requests together that are not complete
CHECK_INTERVAL_S = 1.0  # the interval of checks whether the process is needed, and responds
RESPONSE_TIMEOUT_S = 5.0
BUFFER_BYTES = 1 << 20  # the buffers of the sockets that lead to the process

# Serves a connection: (the socket, and what was read from it).
ServeConnection = Callable[[socket.socket, bytes], None]


@dataclass(slots=True, kw_only=True)
class AgentWorker(asyncio.Protocol):
    """Starts the process once there are `MIN_HOSTS` hosts, and again if it ends; until it runs, the
    server serves the agents itself. Everything runs on the event loop's thread.
    """

    request_lines: tuple[bytes, ...]  # the requests that it serves
    agents: AgentRegistry
    heartbeat_queue: HeartbeatQueue
    # Answers a request, and passes the complete response on.
    answer_request: Callable[[WorkerFrame, Callable[[bytes], None]], None]
    _process: subprocess.Popen[bytes] | None = None
    _packets: socket.socket | None = None
    _serve_connection: ServeConnection = field(init=False, repr=False)  # set by `run`
    _stream: asyncio.Transport | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _received: bytearray = field(default_factory=bytearray)
    _unsent: list[bytes] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # the connections' numbers
    # The time at which data last arrived from the process, plus the time since then during which
    # reading was paused. The process may have to send thousands of heartbeats before a mark.
    _received_at: float = 0.0
    _paused_at: float | None = None  # the time since which reading is paused
    _marks: deque[asyncio.Event] = field(default_factory=deque)  # marks that were not returned yet

    async def run(self, serve_connection: ServeConnection) -> None:
        """``serve_connection`` takes the connections that the process returns."""
        self._serve_connection = serve_connection
        self.heartbeat_queue.sources.append(self)
        delay_s = MIN_RESTART_DELAY_S
        try:
            while True:
                while self.agents.reporting_count < MIN_HOSTS:
                    await asyncio.sleep(CHECK_INTERVAL_S)
                started_at = time.monotonic()
                try:
                    await self._start()
                    problem = await self._wait_for_end()
                    log.warning(
                        "the process that serves node agents %s; another one starts", problem
                    )
                except OSError as error:
                    log.error("the process that serves node agents cannot be started: %s", error)
                self._clean_up()
                delay_s = choose_restart_delay(delay_s, started_at)
                await asyncio.sleep(delay_s)
        finally:
            self._clean_up()
            self.heartbeat_queue.sources.remove(self)

    async def _wait_for_end(self) -> str:
        """Waits until the process ends or does not respond. Returns which of the two it was."""
        self._received_at = time.monotonic()
        while not await wait_for_event(CHECK_INTERVAL_S, self._ended):
            has_arrived = await self.read_arrived(RESPONSE_TIMEOUT_S)
            if has_arrived or self._paused_at is not None or self._ended.is_set():
                continue
            if time.monotonic() - self._received_at >= RESPONSE_TIMEOUT_S:
                return "does not respond"
        return "has ended"

    @property
    def is_running(self) -> bool:
        return self._stream is not None

    async def _start(self) -> None:
        packets, their_packets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stream, their_stream = socket.socketpair()
        for end in (packets, their_packets, stream, their_stream):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        fds = their_packets.fileno(), their_stream.fileno()
        options = WorkerOptions(
            request_lines=[line.decode() for line in self.request_lines],
            max_head=limits.HEAD.maximum,
            max_body=limits.BODY.maximum,
            max_buffered=MAX_BUFFERED_BYTES,
            head_timeout_s=HEAD_S,
            body_timeout_s=BODY_S,
            keep_alive_s=KEEP_ALIVE_S,
        )
        command = [sys.executable, "-m", "hangwatch.server.ingest.connection_worker"]
        with their_packets, their_stream:
            self._process = subprocess.Popen(
                [*command, *map(str, fds), json.dumps(vars(options))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
            )
        packets.setblocking(False)
        self._packets = packets
        self._ended.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(packets, self._take_returned)
        await loop.create_unix_connection(lambda: self, sock=stream)

    def _clean_up(self) -> None:
        if self._packets is not None:
            asyncio.get_running_loop().remove_reader(self._packets)
            self._packets.close()
        if self._stream is not None:
            self._stream.abort()
        if self._process is not None:
            self._process.kill()  # the end of its sockets only ends a process that does not hang
            self._process.wait()
        self._packets = self._stream = self._process = None
        self._received.clear()
        self._unsent.clear()
        for mark in self._marks:
            mark.set()
        self._marks.clear()

    # Connections

    def take_connection(
        self, connected: socket.socket, received: bytes, peer_uid: int | None
    ) -> bool:
        """Passes a connection on, with what was read of it. False if that is not possible now."""
        if self._packets is None or self._stream is None:
            return False
        peer = -1 if peer_uid is None else peer_uid
        try:
            packet = encode_packet(next(self._numbers), peer, received)
            socket.send_fds(self._packets, [packet], [connected.fileno()])
        except OSError:  # the process has many connections to take, or has just ended
            return False
        return True

    def _take_returned(self) -> None:
        """Serves a connection with a request that is not a heartbeat."""
        assert self._packets is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self._packets, MAX_PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            asyncio.get_running_loop().remove_reader(self._packets)
        for fd in fds:
            [frame] = take_frames(bytearray(packet))
            self._serve_connection(socket.socket(fileno=fd), frame.body)

    # Requests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream = None
        self._ended.set()

    def data_received(self, data: bytes) -> None:
        self._received_at = time.monotonic()
        self._received += data
        for frame in take_frames(self._received):
            if frame.type == FrameType.MARK:
                self._marks.popleft().set()
            else:
                self.answer_request(frame, functools.partial(self._send_response, frame.number))

    def _send_response(self, number: int, response: bytes) -> None:
        self._send(encode_frame(FrameType.RESPONSE, number, body=response))

    def _send(self, frame: bytes) -> None:
        """Sends a frame at the end of this pass of the event loop, together with all others."""
        if self._stream is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        if self._stream is not None and self._unsent:
            self._stream.write(b"".join(self._unsent))
        self._unsent.clear()

    # Diagnosis

    async def read_arrived(self, within_s: float) -> bool:
        """Waits until the process has passed on all that arrived; False after ``within_s`` seconds."""
        if self._stream is None:
            return True
        mark = asyncio.Event()
        self._marks.append(mark)
        self._send(encode_frame(FrameType.MARK))
        return await wait_for_event(within_s, mark)

    def pause_reading(self) -> None:
        """Leaves further heartbeats to the process."""
        self._paused_at = time.monotonic()
        if self._stream is not None:
            self._stream.pause_reading()

    def resume_reading(self) -> None:
        if self._paused_at is not None:
            self._received_at += time.monotonic() - self._paused_at
            self._paused_at = None
        if self._stream is not None:
            self._stream.resume_reading()
