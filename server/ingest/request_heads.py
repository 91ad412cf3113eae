"""The head of a heartbeat's request, as far as the process that serves node agents' connections needs
it. It imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ODD_HEADERS = (b"transfer-encoding", b"expect", b"connection", b"upgrade")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What the server knows about requests. Sizes are in bytes, times in seconds."""

    request_lines: Sequence[str]  # of heartbeats: "POST PATH HTTP/1.1"
    max_head: int
    max_body: int
    max_buffered: int  # of all connections together
    head_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float  # between two requests


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
