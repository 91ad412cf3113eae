"""An HTTP server in a thread of the test: it records requests and answers as the test decides."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

ReceiverT = TypeVar("ReceiverT", bound="HttpReceiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """``path`` includes the query, names of headers are in lower case, the body is decompressed."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    client: tuple[str, int]  # address and port

    def parse_json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def make_json_reply(document: Any, status: int = 200, **headers: str) -> HttpReply:
    return HttpReply(
        status=status,
        headers={"Content-Type": "application/json", **headers},
        body=json.dumps(document).encode(),
    )


class HttpReceiver:
    """Listens on a port of its own while it is entered as a context. Subclasses override
    `make_reply`, which runs in one thread per connection.
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.requests: list[ReceivedRequest] = []
        self.delay_s = delay_s  # before each reply
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), _make_handler(self), bind_and_activate=False
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        return make_json_reply({})

    def __enter__(self: ReceiverT) -> ReceiverT:
        self._server.server_bind()
        self._server.server_activate()
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _make_handler(receiver: HttpReceiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._handle_request()

        def do_POST(self) -> None:
            self._handle_request()

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

        def _handle_request(self) -> None:
            request = self._read_request()
            receiver.requests.append(request)
            reply = receiver.make_reply(request)
            if receiver.delay_s:
                time.sleep(receiver.delay_s)
            with contextlib.suppress(OSError):  # the client has closed the connection
                self._send_reply(reply)

        def _read_request(self) -> ReceivedRequest:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", "0")))
            if headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            address, port = self.client_address[:2]
            return ReceivedRequest(
                method=self.command,
                path=self.path,
                headers=headers,
                body=body,
                client=(str(address), port),
            )

        def _send_reply(self, reply: HttpReply) -> None:
            self.send_response_only(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.status != 204:  # which has no body
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

    return Handler


class WebhookReceiver(HttpReceiver):
    """Receives alerts. ``statuses`` are those of its next replies, the last one of all later."""

    def __init__(self, *statuses: int) -> None:
        super().__init__()
        self.statuses = list(statuses or (204,))

    @property
    def url(self) -> str:
        return f"{super().url}/secret-path"

    @property
    def events(self) -> list[str]:
        return [request.parse_json()["event"] for request in self.requests]

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        has_next = len(self.statuses) > 1
        return HttpReply(status=self.statuses.pop(0) if has_next else self.statuses[0])
