"""A process of another user between node agents and their server: it passes requests and replies on,
and after the first success on a connection it answers by itself. That needs root.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import http.server
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.waiting import wait_until

from .other_user import run_as_other_user

_PASSED_HEADERS = ("authorization", "content-type", "content-encoding", "priority")
_PROOF_HEADER = "hangwatch-proof"
_MAX_WAIT_S = 60.0  # for a chance to answer by itself
_REPLY_TIMEOUT_S = 40.0  # longer than the server lets a request for commands wait


@dataclass(slots=True)
class RelayRecord:
    """What passed a relay."""

    passed_on: int = 0  # the server's successful replies
    invented: int = 0  # replies of its own
    received: bytes = b""  # the bodies of all requests


@dataclass(slots=True, kw_only=True)
class Relay:
    """Answers requests to ``path`` with ``document`` once it has passed on a successful reply on the
    same connection. With ``repeats_proof``, its replies have the last proof that the server gave.
    """

    server_port: int
    path: str
    document: Any
    seconds: float  # from its first reply of that kind on
    repeats_proof: bool = False
    port: int = 0
    record: RelayRecord = field(default_factory=RelayRecord)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        def run() -> None:
            self.record = run_as_other_user(self._serve)

        with socket.create_server(("127.0.0.1", 0)) as unused:  # the other user listens there
            self.port = unused.getsockname()[1]
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        # A process that is started while the other one is forked would wait for its end: that one
        # has the pipe by which `Popen` learns of the start.
        wait_until(self._is_listening, _MAX_WAIT_S)

    def _is_listening(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> RelayRecord:
        """What passed, once its time is over."""
        assert self._thread is not None
        self._thread.join(_MAX_WAIT_S + self.seconds + 30)
        return self.record

    def _serve(self) -> RelayRecord:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), _make_handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ends_at = time.monotonic() + _MAX_WAIT_S
        while not self.record.invented and time.monotonic() < ends_at:
            time.sleep(0.1)
        time.sleep(self.seconds)
        return self.record


def _make_handler(relay: Relay) -> type[http.server.BaseHTTPRequestHandler]:
    record = relay.record

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.has_passed_on = False
            self.last_proof = ""
            self.server_end = http.client.HTTPConnection(
                "127.0.0.1", relay.server_port, timeout=_REPLY_TIMEOUT_S
            )

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            is_compressed = self.headers.get("content-encoding") == "gzip"
            record.received += gzip.decompress(body) if is_compressed else body
            if self.has_passed_on and self.path == relay.path:
                record.invented += 1
                proof = self.last_proof if relay.repeats_proof else ""
                return self._reply(200, json.dumps(relay.document).encode(), proof)
            headers = {name: value for name in _PASSED_HEADERS if (value := self.headers.get(name))}
            self.server_end.request(self.command, self.path, body, headers)
            response = self.server_end.getresponse()
            content = response.read()
            self.last_proof = response.getheader(_PROOF_HEADER, "")
            if response.status == 200 and self.path == relay.path:
                self.has_passed_on = True
                record.passed_on += 1
            return self._reply(response.status, content, self.last_proof)

        do_POST = do_GET

        def _reply(self, status: int, content: bytes, proof: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if proof:
                self.send_header(_PROOF_HEADER, proof)
            self.end_headers()
            self.wfile.write(content)

        def handle(self) -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                super().handle()

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler
