"""The messages between the server and the process that serves the node agents' connections.

Frames go over a stream socket, in both directions: type (u8), connection or mark (u32), size of the
head (u32), size of the body (u32), time of arrival (f64, the machine's monotonic clock), the head and
the body of a request or response. Connections are passed over a socket of packets: the connection's
number (u32), and what was read from it so far; its file descriptor goes along.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

FRAME_STRUCT = struct.Struct("<BIIId")
NUMBER_STRUCT = struct.Struct("<I")
BATCH_BYTES = 1 << 16  # that are sent at a time
MAX_PACKET_BYTES = 1 << 16  # less than the kernel's default for the packets of a socket


class FrameType(enum.IntEnum):
    REQUEST = 1  # of an agent: a heartbeat
    URGENT_REQUEST = 2
    RESPONSE = 3  # complete, as it is sent to the agent
    CLOSED = 4  # the agent closed its connection
    MARK = 5  # returned after all requests that had arrived


class Frame(NamedTuple):
    type: int
    number: int  # of the connection or mark
    arrived_at: float
    head: bytes
    body: bytes


def encode_frame(
    type: FrameType, number: int, head: bytes = b"", body: bytes = b"", arrived_at: float = 0.0
) -> bytes:
    return FRAME_STRUCT.pack(type, number, len(head), len(body), arrived_at) + head + body


def take_frames(received: bytearray) -> Iterator[Frame]:
    """The complete frames at the beginning of what was received, which are removed from it."""
    at = 0
    try:
        while len(received) - at >= FRAME_STRUCT.size:
            kind, number, head_size, body_size, arrived_at = FRAME_STRUCT.unpack_from(received, at)
            body_at = at + FRAME_STRUCT.size + head_size
            if len(received) < body_at + body_size:
                break
            head = bytes(received[at + FRAME_STRUCT.size : body_at])
            body = bytes(received[body_at : body_at + body_size])
            at = body_at + body_size
            yield Frame(kind, number, arrived_at, head, body)
    finally:
        del received[:at]


class FrameSender:
    """Sends frames over a socket that does not block, urgent ones before all others."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self.is_full = False  # the other end has to read first
        self._urgent: deque[bytes] = deque()
        self._others: deque[bytes] = deque()
        self._batch = memoryview(b"")  # what is being sent

    def add_frame(self, frame: bytes, is_urgent: bool = False) -> None:
        (self._urgent if is_urgent else self._others).append(frame)

    def send_frames(self) -> None:
        """Sends as many as the socket takes. If the other end is closed, drops all."""
        self.is_full = False
        try:
            while self._batch or self._urgent or self._others:
                if not self._batch:
                    self._batch = memoryview(self._take_batch())
                self._batch = self._batch[self._stream.send(self._batch) :]
        except BlockingIOError:
            self.is_full = True
        except OSError:
            self._batch = memoryview(b"")
            self._urgent.clear()
            self._others.clear()

    def _take_batch(self) -> bytes:
        batch, size = [], 0
        for frames in (self._urgent, self._others):
            while frames and size < BATCH_BYTES:
                batch.append(frames.popleft())
                size += len(batch[-1])
        return b"".join(batch)
