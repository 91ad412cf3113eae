"""uvicorn's connections, as this server wants them: given up where the rest of a request does not
come, and with few system calls.

Half of what a heartbeat of a large job costs is HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core import problems
from ..core.event_loop import PriorityEventLoop
from ..core.limits import HEARTBEATS
from ..core.priority_selector import PrioritySelector

BODY_WITHIN = 30.0  # seconds for a whole request body
HEADERS_WITHIN = 10.0  # seconds for a request's headers
JOINED_MAX = 1 << 16  # bytes


class Joined:
    """A transport that sends what is written in one pass of the event loop at once: uvicorn writes
    the head of an answer by itself.
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
        if (
            self._size > JOINED_MAX
            # what is long is not to pile up here, where nobody sees that the client does not keep
            # up
        ):
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
    """Gives up a connection on which the rest of a request does not come: uvicorn by itself does so
    only between two requests.

    A request that comes whole costs no timer here, as it would in a layer of the application. It
    also tells `fairness` who only reports.
    """

    # seconds within which the client should have sent what is being waited for; 0: it owes nothing
    _owed: float = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _fd: int = -1
    _selector: PrioritySelector | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        super().connection_made(Joined(transport, loop))  # type: ignore[arg-type]  # it has all of a transport that uvicorn uses
        if isinstance(loop, PriorityEventLoop):
            self._selector, self._fd = loop.selector, transport.get_extra_info("socket").fileno()
            self._selector.add_connection(self._fd)
        self._wait_for(HEADERS_WITHIN)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._selector is not None:
            if self.scope.get("path", "").endswith(HEARTBEATS):
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
            self._wait_for(HEADERS_WITHIN)
        else:
            self._wait_for(BODY_WITHIN if cycle.more_body else 0.0)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and not cycle.more_body:
            # uvicorn keeps what it made for a request until the next one: of 12,500 connections, a
            # dozen objects each, which the garbage collector looks at again and again.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # as before the first request

    def connection_lost(self, exc: Exception | None) -> None:
        if self._selector is not None:
            self._selector.remove_connection(self._fd)
        self._wait_for(0.0)
        super().connection_lost(exc)

    def _wait_for(self, owed: float) -> None:
        if owed == self._owed:
            return
        self._owed = owed
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(owed, self._give_up) if owed else None

    def _give_up(self) -> None:
        self._owed, self._deadline = 0.0, None
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            body = problems.encode_problem(
                408, f"the request's body did not come within {BODY_WITHIN:g} s"
            )
            head = (
                "HTTP/1.1 408 Request Timeout\r\ncontent-type:"
                f" {problems.MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            )
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
