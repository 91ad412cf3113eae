"""uvicorn's HTTP connections, with timeouts for incomplete requests and fewer system calls.

HTTP is half of the cost of a heartbeat of a large job.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core import problems
from ..core.event_loop import PriorityEventLoop
from ..core.priority_selector import PrioritySelector

BODY_TIMEOUT_S = 30.0  # for a whole request body
HEADERS_TIMEOUT_S = 10.0  # for the headers of a request
MAX_BUFFERED_BYTES = 1 << 16
HEARTBEATS_PATH_END = "/heartbeats"


class BufferedTransport:
    """A transport that sends all data written in one iteration of the event loop together: uvicorn
    writes the head and the body of a response separately.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)
        self._size += len(data)
        if self._size > MAX_BUFFERED_BYTES:
            # Only the transport notices a slow client, so long responses must not wait here.
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._written:
            self._transport.write(b"".join(self._written))
            self._written.clear()
            self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TimeoutHttpProtocol(HttpToolsProtocol):
    """Closes a connection if the rest of a request does not arrive in time. uvicorn itself only does
    so between two requests.

    A request that arrives in one piece needs no timer here, unlike in a middleware. The protocol
    also informs the event loop's selector which connections only carry heartbeats.
    """

    _timeout_s: float = 0.0  # for the data that is expected from the client; 0: none is expected
    _deadline: asyncio.TimerHandle | None = None
    _fd: int = -1
    _selector: PrioritySelector | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        super().connection_made(BufferedTransport(transport, loop))  # type: ignore[arg-type]  # it has all methods that uvicorn uses
        if isinstance(loop, PriorityEventLoop):
            self._selector, self._fd = loop.selector, transport.get_extra_info("socket").fileno()
            self._selector.add_connection(self._fd)
        self._set_timeout(HEADERS_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._selector is not None:
            if self.scope.get("path", "").endswith(HEARTBEATS_PATH_END):
                self._selector.assign_to_reports(self._fd)
            else:
                self._selector.assign_to_queries(self._fd)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._selector is not None:
            self._selector.finish_report(self._fd)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._set_timeout(HEADERS_TIMEOUT_S)
        else:
            self._set_timeout(BODY_TIMEOUT_S if cycle.more_body else 0.0)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and not cycle.more_body:
            # uvicorn keeps a dozen objects of a request until the next one. With 12,500 connections,
            # the garbage collector would scan all of them repeatedly.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # as before the first request

    def connection_lost(self, exc: Exception | None) -> None:
        if self._selector is not None:
            self._selector.remove_connection(self._fd)
        self._set_timeout(0.0)
        super().connection_lost(exc)

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(timeout_s, self._close_stalled) if timeout_s else None

    def _close_stalled(self) -> None:
        self._timeout_s, self._deadline = 0.0, None
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            body = problems.encode_problem(
                408, f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s"
            )
            head = (
                "HTTP/1.1 408 Request Timeout\r\ncontent-type:"
                f" {problems.MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            )
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
