"""Another user of the machine opens more connections than the server may have files: it is refused,
and nobody else. With a real server and real sockets.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hangwatch.server.core import limits
from hangwatch.server.core.limits import HEAD_S
from tests.harness.other_user import run_as_other_user
from tests.harness.server import Server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import make_hung_job

TOKEN = "more-than-sixteen-characters"
STALL_AFTER_S = 2.0
MAX_FILES, CONNECTIONS = 1000, 2500
HELD_FOR_S = 20.0


def hold_connections(port: int, count: int, seconds: float) -> int:
    """Keeps connections open without a request, and opens others for those that the server closes, a
    tenth of them in a tenth of a second. Returns how many were opened.
    """
    opened = 0
    held: dict[int, socket.socket] = {}
    poll = select.poll()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        for _ in range(min(count // 10, count - len(held))):
            connection = socket.socket()
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect(("127.0.0.1", port))
            held[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
            opened += 1
        time.sleep(0.1)
        for descriptor, _ in poll.poll(0):
            poll.unregister(descriptor)
            held.pop(descriptor).close()
    return opened


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("flags", [(), ("--token", TOKEN)], ids=["without token", "token"])
def test_connections_of_another_user_delay_no_verdict(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """SECURITY.md: "A peer takes no connections from others.", "delays the new connections of others, by a
    few seconds as measured".
    """
    server = Server(tmp_path, ("--stall-after", f"{STALL_AFTER_S:g}", *flags), max_files=MAX_FILES)
    try:
        server.start()
        url = f"http://:{TOKEN if flags else ''}@127.0.0.1:{server.port}"
        flood = threading.Thread(
            target=lambda: run_as_other_user(
                lambda: hold_connections(server.port, CONNECTIONS, HELD_FOR_S)
            )
        )
        flood.start()
        time.sleep(3.0)  # it has more connections by now than the server may have files
        began_at = time.monotonic()
        # A connection for each request: those that are open already have no trouble.
        no_reuse = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=url, trust_env=False, timeout=60, limits=no_reuse) as client:
            reporter = JobReporter(client, make_hung_job(hung_for_s=0.0))
            reporter.send_until(reporter.list_incidents, "the incident")
            reported_after_s = time.monotonic() - began_at
            assert flood.is_alive()
            metrics = client.get("/metrics").text
        flood.join()
        assert reported_after_s < STALL_AFTER_S + 5.0
        assert f'refusals_total{{limit="{limits.UNAUTHENTICATED.name}"}} 0' not in metrics
        assert "Too many open files" not in server.read_log()
    finally:
        server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path, ("--token", TOKEN))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_connection_without_an_accepted_request_is_closed_soon(server: Server) -> None:
    """A browser's or a node agent's is kept."""
    request = b"GET %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n"
    with_token = b"authorization: Bearer %s\r\n" % TOKEN.encode()
    requests = [
        request % (b"/healthz", b""),
        request % (b"/api/v1/jobs", b""),
        request % (b"/api/v1/jobs", with_token),
    ]
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in requests
        ]
        for connection, content in zip(connections, requests, strict=True):
            connection.sendall(content)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 ")
        time.sleep(HEAD_S + 2.0)
        assert [is_closed(connection) for connection in connections] == [True, True, False]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it; reads what it has sent before."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    return True
