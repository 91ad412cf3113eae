"""Clients that close their connection in the middle of a request."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.harness.server import running_server
from tests.simulation.waiting import wait_until


@pytest.mark.parametrize("path", ["/login", "/api/v1/commands", "/mcp"])
def test_half_a_request_leaves_no_traceback_in_the_log(path: str, tmp_path: Path) -> None:
    """Anybody could fill the server's disk with them."""
    with running_server(tmp_path, 4.0) as server:
        host, _, port = server.url.rpartition("/")[2].partition(":")
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"{head}Content-Length: 100\r\n\r\nhalf".encode())
        wait_until(lambda: "Traceback" in server.read_log(), 1.5)
        assert "Traceback" not in server.read_log()
        server.get("jobs")
