"""uvicorn's server and its HTTP connections, with timeouts and limits for incomplete requests."""

from __future__ import annotations

import asyncio
import functools
import http
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core import limits
from ..core.peers import PeerSocket
from ..core.problems import Problem
from .access import CONNECTION, PEER_UID
from .app_state import AppState

CHUNK_HEAD_BYTES = 16  # the size and the line ends of a chunk


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes a connection if a request is not complete in time, or is larger than allowed without
    its body; and soon after a response if no request was accepted yet. uvicorn itself limits only the
    time between two requests, and keeps any headers in memory. A request that arrives in one piece
    needs no timer here, unlike in a middleware.
    """

    _connection: PeerSocket | None = None  # None: another listener has accepted it
    _exceeded: limits.Limit | None = None
    _head_bytes: int = 0  # bytes since the last complete request, other than its body
    _timeout_s: float = 0.0  # the limit for the client's next data; 0: none is expected
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, state: AppState, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state = state

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = self._state.peers.find(transport)
        self._set_timeout(limits.HEAD_S)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        scope: Any = self.scope  # ASGI allows further keys
        scope[PEER_UID] = None if self._connection is None else self._connection.uid
        scope[CONNECTION] = self._connection

    def on_headers_complete(self) -> None:
        # Most of what has been received may be the body, if it came in the same piece.
        if self._head_bytes > limits.HEAD.maximum:
            head_bytes = len(self.url)
            for name, value in self.headers:
                head_bytes += len(name) + len(value)
            if head_bytes > limits.HEAD.maximum:
                self._stop_parsing(limits.HEAD)
        if len(self.pipeline) >= limits.PIPELINED.maximum:
            self._stop_parsing(limits.PIPELINED)
        super().on_headers_complete()

    def _stop_parsing(self, limit: limits.Limit) -> None:
        self._exceeded = limit
        raise ValueError(limit.text)  # uvicorn calls `send_400_response`

    def on_body(self, body: bytes) -> None:
        self._head_bytes = max(0, self._head_bytes - len(body) - CHUNK_HEAD_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > limits.HEAD.maximum and not self.transport.is_closing():
            self._refuse(limits.HEAD.make_problem())
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._set_timeout(limits.HEAD_S)
        else:
            self._set_timeout(limits.BODY_S if cycle.more_body else 0.0)

    def send_400_response(self, msg: str) -> None:
        if self._exceeded is not None:
            self._refuse(self._exceeded.make_problem())
        else:
            super().send_400_response(msg)

    def _refuse(self, problem: Problem) -> None:
        """Answers, unless an answer has begun, and closes the connection."""
        self._state.shared.counters.refusals_by_limit.update(problem.limits)
        cycle = self.cycle
        if cycle is None or not cycle.response_started:
            response = problem.make_response()
            response.headers["connection"] = "close"
            status = http.HTTPStatus(response.status_code)
            lines = [f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()]
            lines += [b"%s: %s\r\n" % header for header in response.raw_headers]
            self.transport.write(b"".join((*lines, b"\r\n", response.body)))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and not cycle.more_body:
            # uvicorn keeps a dozen objects of a request until the next one. With 12,500
            # connections, the garbage collector would scan all of them repeatedly.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # as before the first request
            if self._connection is not None and not self._connection.is_authenticated:
                self._set_timeout(limits.HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timeout(0.0)
        super().connection_lost(exc)
        # Otherwise this object would stay in memory: uvicorn keeps a timer for a connection that
        # the client reset, and the garbage collector rarely scans old objects.
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.cycle = self.flow = self._connection = None  # type: ignore[assignment]  # as before the connection

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(timeout_s, self._close_stalled) if timeout_s else None

    def _close_stalled(self) -> None:
        self._timeout_s = 0.0
        self._deadline = None
        cycle = self.cycle
        if cycle is None or not cycle.more_body:
            return self.transport.close()
        detail = f"the request's body did not arrive within {limits.BODY_S:g} s"
        return self._refuse(Problem(408, detail))


class HttpServer(uvicorn.Server):
    """Serves an application. A signal also ends the event streams and the requests that wait for
    commands.
    """

    def __init__(self, state: AppState, app: ASGIApp, **options: Any) -> None:
        """``options`` are further arguments of `uvicorn.Config`."""
        self._state = state
        make_protocol = functools.partial(LimitedHttpProtocol, state=state)
        super().__init__(uvicorn.Config(app, http=make_protocol, **options))  # type: ignore[arg-type] # it is only called

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._state.shared.events.close()
        self._state.shared.commands.close()
