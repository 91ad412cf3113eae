"""The head of a heartbeat's request, as far as the process that serves node agents' connections needs
it. It imports the standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_ODD_HEADERS = (b"transfer-encoding", b"expect", b"connection", b"upgrade")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What the server knows about requests. Sizes are in bytes, times in seconds."""

    request_lines: tuple[str, ...]  # of heartbeats: "POST PATH HTTP/1.1"
    urgent_priority: str  # the Priority header of an urgent heartbeat
    max_head: int
    max_body: int
    max_buffered: int  # of all connections together
    head_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float  # between two requests

    def encode(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, text: str) -> WorkerOptions:
        fields = json.loads(text)
        return cls(**{**fields, "request_lines": tuple(fields["request_lines"])})


class OddRequestError(Exception):
    """The request is not an ordinary heartbeat: the server should answer it."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    body_bytes: int
    is_urgent: bool


def parse_head(head: bytes, options: WorkerOptions) -> RequestHead:
    """What the head of a heartbeat says; ``head`` is without the empty line. Raises
    OddRequestError.
    """
    request_line, *lines = head.split(b"\r\n")
    if request_line.decode("latin-1") not in options.request_lines:
        raise OddRequestError
    body_bytes, is_urgent = -1, False
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not colon or name.strip() != name or name in _ODD_HEADERS:
            raise OddRequestError
        if name == b"content-length":
            if body_bytes >= 0 or not value.isdigit() or int(value) > options.max_body:
                raise OddRequestError
            body_bytes = int(value)
        elif name == b"priority":
            is_urgent = value.decode("latin-1") == options.urgent_priority
    if body_bytes < 0:
        raise OddRequestError
    return RequestHead(body_bytes, is_urgent)
