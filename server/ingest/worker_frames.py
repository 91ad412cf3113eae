"""The messages between the server and the process that serves the node agents' connections, and the
head of an HTTP request as far as that process reads it. Only the standard library is imported.

Frames go over a stream socket, in both directions: type (u8), connection (u64), the user at its other
end (i64, -1 if unknown), time of arrival (f64, the machine's monotonic clock), size of the head (u32),
size of the body (u32), the head and the body of a request or response. Connections are passed over a
socket of packets: the connection's number (u64), the user at its other end (i64), and what was read
from it so far; its file descriptor goes along.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FRAME_STRUCT = struct.Struct("<BQqdII")
PACKET_STRUCT = struct.Struct("<Qq")
MAX_PACKET_BYTES = 1 << 16  # less than the kernel's default for the packets of a socket

_ODD_HEADERS = (b"transfer-encoding", b"expect", b"connection", b"upgrade")


class FrameType(enum.IntEnum):
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
            head, body = bytes(received[head_at:body_at]), bytes(received[body_at:at])
            yield WorkerFrame(kind, number, uid, arrived_at, head, body)
    finally:
        del received[:at]


def encode_packet(number: int, peer_uid: int, received: bytes | bytearray) -> bytes:
    """The packet that goes along with a connection. Raises OSError if too much was received."""
    packet = PACKET_STRUCT.pack(number, peer_uid) + received
    if len(packet) > MAX_PACKET_BYTES:
        raise OSError("too much was read of the connection")
    return packet


def decode_packet(packet: bytes) -> tuple[int, int, bytes]:
    """The connection's number, the user at its other end, and what was read from it."""
    number, peer_uid = PACKET_STRUCT.unpack_from(packet)
    return number, peer_uid, packet[PACKET_STRUCT.size :]


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


def parse_head(head: bytes, options: WorkerOptions) -> int:
    """The size of the body of a heartbeat; ``head`` is without the empty line. Raises
    OddRequestError.
    """
    request_line, *lines = head.split(b"\r\n")
    if len(head) > options.max_head or request_line.decode("latin-1") not in options.request_lines:
        raise OddRequestError
    body_bytes = -1
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not colon or name.strip() != name or name in _ODD_HEADERS:
            raise OddRequestError
        if name == b"content-length":
            if body_bytes >= 0 or not value.isdigit() or int(value) > options.max_body:
                raise OddRequestError
            body_bytes = int(value)
    if body_bytes < 0:
        raise OddRequestError
    return body_bytes
