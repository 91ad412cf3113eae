"""uvicorn's server and its HTTP connections, with timeouts and limits for incomplete requests.

While the process for node agents' connections runs, a connection that begins with a heartbeat is
passed on to it. It returns connections with other requests, which are then served here.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hangwatch.protocol.local_peer import find_peer_uid

from ..core import limits
from ..core.limits import BODY_S, HEAD_S
from ..core.problems import Problem
from .access import PEER_UID
from .app_state import AppState
from .rendering import format_response

CHUNK_HEAD_BYTES = 16  # the size and the line ends of a chunk


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes a connection if a request is not complete in time, or is larger than allowed without
    its body. uvicorn itself limits only the time between two requests, and keeps any headers in
    memory. A request that arrives in one piece needs no timer here, unlike in a middleware.
    """

    _peer_uid: int | None = None
    _exceeded: limits.Limit | None = None
    _head_bytes: int = 0  # bytes since the last complete request, other than its body
    _timeout_s: float = 0.0  # the limit for the client's next data; 0: none is expected
    _deadline: asyncio.TimerHandle | None = None

    def __init__(
        self, *args: Any, state: AppState, returned_data: bytes = b"", **kwargs: Any
    ) -> None:
        """``returned_data`` is what the agent worker read before it returned the connection."""
        super().__init__(*args, **kwargs)
        self._state, self._returned_data = state, returned_data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._state.token is None:  # requests are accepted by the user who sends them
            self._peer_uid = find_peer_uid(transport.get_extra_info("socket"))
        self._set_timeout(HEAD_S)
        if self._returned_data:
            self.data_received(self._returned_data)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        scope: Any = self.scope  # ASGI allows further keys
        scope[PEER_UID] = self._peer_uid

    def on_headers_complete(self) -> None:
        # Most of what has been received may be the body, if it came in the same piece.
        if self._head_bytes > limits.HEAD.maximum:
            head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
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
        worker = self._state.agent_worker
        is_first = not self._head_bytes and not self._returned_data and self.cycle is None
        if is_first and worker.is_running and data.startswith(worker.request_lines):
            # A node agent begins a heartbeat. The state of TLS cannot be passed on.
            has_tls = self.transport.get_extra_info("sslcontext") is not None
            connected = self.transport.get_extra_info("socket")
            if not has_tls and worker.take_connection(connected, data, self._peer_uid):
                self.transport.abort()  # closes this process's descriptor only
                return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > limits.HEAD.maximum and not self.transport.is_closing():
            self._refuse(limits.HEAD.make_problem())
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._set_timeout(HEAD_S)
        else:
            self._set_timeout(BODY_S if cycle.more_body else 0.0)

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
            self.transport.write(format_response(response))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._returned_data = b""
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and not cycle.more_body:
            # uvicorn keeps a dozen objects of a request until the next one. With 12,500
            # connections, the garbage collector would scan all of them repeatedly.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # as before the first request

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timeout(0.0)
        super().connection_lost(exc)
        # Otherwise this object would stay in memory: uvicorn keeps a timer for a connection that
        # the client reset, and the garbage collector rarely scans old objects.
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.cycle = self.flow = None  # type: ignore[assignment]  # as before the connection

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
        if cycle is None or not cycle.more_body:
            return self.transport.close()
        return self._refuse(Problem(408, f"the request's body did not arrive within {BODY_S:g} s"))


class HttpServer(uvicorn.Server):
    """Serves an application, runs the agent worker, and serves the connections that this one
    returns. A signal also ends the event streams and the requests that wait for commands.
    """

    def __init__(self, state: AppState, app: ASGIApp, **options: Any) -> None:
        """``options`` are further arguments of `uvicorn.Config`."""
        self._state, self._tasks = state, set[asyncio.Task[object]]()
        self._make_protocol = functools.partial(LimitedHttpProtocol, state=state)
        super().__init__(uvicorn.Config(app, http=self._make_protocol, **options))  # type: ignore[arg-type] # it is only called

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        run_worker = functools.partial(self._state.agent_worker.run, self._serve_connection)
        self._state.tasks.start_task("node agents' connections", run_worker)

    def _serve_connection(self, connected: socket.socket, received: bytes) -> None:
        loop = asyncio.get_running_loop()
        create_protocol = functools.partial(
            self._make_protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            returned_data=received,
        )
        task = loop.create_task(loop.connect_accepted_socket(create_protocol, connected))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._state.shared.events.close()
        self._state.shared.commands.close()
