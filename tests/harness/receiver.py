"""A real receiver of webhooks, on a port of its own."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class WebhookReceiver:
    """What it got: headers, in lower case, and bodies. ``statuses`` are its next answers, the last
    one for ever.
    """

    statuses: list[int] = field(default_factory=lambda: [204])
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    @property
    def events(self) -> list[str]:
        return [json.loads(body)["event"] for _, body in self.requests]


@contextlib.contextmanager
def receive_webhooks(receiver: WebhookReceiver) -> Iterator[WebhookReceiver]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests.append(
                ({name.lower(): value for name, value in self.headers.items()}, body)
            )
            self.send_response(
                receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
            )
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        receiver.url = f"http://127.0.0.1:{server.server_port}/secret-path"
        yield receiver
        server.shutdown()
