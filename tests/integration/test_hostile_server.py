"""A server that is not the job's, or that is hostile: whatever it replies, the node agent takes little
of the training host's CPU.
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH
from tests.harness.other_user import run_as_other_user
from tests.harness.processes import read_cpu_s

from .node_support import AgentTestbed, open_testbed

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
START_S, WATCHED_S = 2.0, 8.0
MAX_SHARE = 0.2  # of a core
FULL = "a heartbeat that reports everything"  # in lists of paths
COMMANDS = [{"id": str(number), "kind": "stacks", "key": f"{number}-1"} for number in range(60_000)]
REPLIES: dict[str, list[Any]] = {
    "resync": [{"interval_s": 0.0, "resync": True}],
    "resync_every_second_time": [{"interval_s": 0.0, "resync": True}, {"interval_s": 0.0}],
    "short_times": [{"interval_s": 0.0, "steady_s": 0.0, "changes_s": 0.0, "poll_s": -5}],
    "nan": [
        dict.fromkeys(("interval_s", "steady_s", "changes_s", "poll_s", "clock_s"), float("nan"))
    ],
    "many_commands": [{"interval_s": 0.0, "commands": COMMANDS}],
}


class HostileHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies: list[bytes]
    paths: list[str]

    def do_POST(self) -> None:
        if b'"full":true' in self.rfile.read(int(self.headers["content-length"])):
            self.paths.append(FULL)
        self.paths.append(self.path)
        body = b'{"commands": []}'
        if self.path == HEARTBEAT_PATH:
            body = self.bodies[len(self.paths) % len(self.bodies)]
        self.send_reply(body)

    def send_reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class DrippingHandler(HostileHandler):
    """Its reply consists of chunks of one byte, as many as the client takes."""

    def send_reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"1\r\n1\r\n" * 4096)


def serve(port: int, bodies: list[bytes], handler: type[HostileHandler]) -> list[str]:
    """The paths of the requests that came while the agent was watched."""
    paths: list[str] = []
    made = type("Handler", (handler,), {"paths": paths, "bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), made) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        time.sleep(START_S + WATCHED_S)
        server.shutdown()
        server.daemon_threads, server.block_on_close = True, False
        return paths


class HostileServer(threading.Thread):
    """``is_foreign``: it runs as another user, so that the node agent does not know it."""

    def __init__(
        self, bodies: list[bytes], handler: type[HostileHandler], *, is_foreign: bool
    ) -> None:
        super().__init__(daemon=True)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            self.port: int = unused.getsockname()[1]
        self.paths: list[str] = []
        self._bodies, self._handler, self.is_foreign = bodies, handler, is_foreign

    def run(self) -> None:
        def serve_here() -> list[str]:
            return serve(self.port, self._bodies, self._handler)

        self.paths = run_as_other_user(serve_here) if self.is_foreign else serve_here()


@pytest.fixture
def agent_testbed(tmp_path: Path) -> Iterator[AgentTestbed]:
    with open_testbed(tmp_path) as made:
        yield made


def watch_agent(testbed: AgentTestbed, server: HostileServer) -> float:
    """The share of a core that a node agent takes which reports to the server."""
    environ = testbed.make_environ(
        HANGWATCH_TOKEN="the-token-of-the-job" if server.is_foreign else "",
        HANGWATCH_URL=f"http://127.0.0.1:{server.port}",
    )
    testbed.start_rank(0, "sleep", env=environ)
    server.start()
    agent = testbed.start_agent(env=environ)
    time.sleep(START_S)
    before_s, began_at = read_cpu_s(agent.pid), time.monotonic()
    server.join(60)
    spent_s = read_cpu_s(agent.pid) - before_s
    assert agent.poll() is None
    return spent_s / (time.monotonic() - began_at)


@needs_root
@pytest.mark.parametrize("name", [*REPLIES, "dripping"])
def test_unproven_server_takes_little_cpu(agent_testbed: AgentTestbed, name: str) -> None:
    """SECURITY.md: "Whatever listens at `HANGWATCH_URL`, it costs the job little.", "Without a proof, it
    gets two heartbeats a second, no request for commands".
    """
    bodies = [json.dumps(reply).encode() for reply in REPLIES.get(name, [{}])]
    handler = DrippingHandler if name == "dripping" else HostileHandler
    server = HostileServer(bodies, handler, is_foreign=True)
    share = watch_agent(agent_testbed, server)
    beats = server.paths.count(HEARTBEAT_PATH)
    assert 0 < beats <= 2.5 * (START_S + WATCHED_S), beats
    assert COMMANDS_PATH not in server.paths
    assert share < MAX_SHARE, share


@pytest.mark.parametrize("name", REPLIES)
def test_hostile_server_of_the_own_user_gets_few_requests(
    agent_testbed: AgentTestbed, name: str
) -> None:
    """SECURITY.md: "A reply can make a node agent report five times and poll four times a second", "send
    everything again once a second".
    """
    bodies = [json.dumps(reply).encode() for reply in REPLIES[name]]
    server = HostileServer(bodies, HostileHandler, is_foreign=False)
    watch_agent(agent_testbed, server)
    seconds = START_S + WATCHED_S
    assert 0 < server.paths.count(HEARTBEAT_PATH) <= 5.5 * seconds
    assert server.paths.count(COMMANDS_PATH) <= 4.5 * seconds
    assert server.paths.count(FULL) <= 1.5 * seconds
