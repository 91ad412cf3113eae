"""The process that serves node agents' connections, with real sockets and a server that starts it as
soon as there are enough hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hangwatch.agent.transport.client import ServerTarget, SignedClient
from hangwatch.model.kinds import VerdictKind
from hangwatch.protocol.codec import decode_reply, encode_message
from hangwatch.server.ingest.agent_worker import MIN_HOSTS
from hangwatch.server.ingest.connection_worker import RESERVED_FILES
from tests.harness.server import Server, run_server, running_server
from tests.simulation.parallel_job import JobRun, JobShape, SimulatedFault
from tests.simulation.simulated_host import SimulatedHost
from tests.simulation.waiting import wait_until

SHAPE = JobShape(pipeline=5, data=MIN_HOSTS // 5 + 3)
HEARTBEAT = b"POST /api/v1/heartbeats"
PATIENCE_S = 20.0
TAKE_OVER_S = 10.0


class SimulatedHosts:
    """The node agents of a job; each has a connection of its own, and opens it again if it is
    closed.
    """

    def __init__(self, port: int) -> None:
        self.run = JobRun(shape=SHAPE, number=0, started_at=time.monotonic() - 100.0)
        self.reconnected = 0
        self._hosts = [SimulatedHost(number, lambda: self.run) for number in range(SHAPE.hosts)]
        self.connections: list[socket.socket | None] = [None] * SHAPE.hosts
        self._port = port
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._report)

    def __enter__(self) -> SimulatedHosts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for connection in self.connections:
            if connection is not None:
                connection.close()

    def _report(self) -> None:
        while not self._stopped.wait(0.2):
            for host in range(SHAPE.hosts):
                self.post_heartbeat(host)

    def post_heartbeat(self, host: int) -> None:
        heartbeat = self._hosts[host].compose_heartbeat(time.monotonic())
        body = json.dumps(encode_message(heartbeat)).encode()
        try:
            status, reply = send_request(self._connect(host), HEARTBEAT, body)
        except OSError:
            self._close(host)
            self.reconnected += 1
            return
        if status == 200:
            self._hosts[host].apply_reply(
                heartbeat, decode_reply(json.loads(reply)), time.monotonic()
            )

    def _connect(self, host: int) -> socket.socket:
        connection = self.connections[host]
        if connection is None:
            connection = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
            self.connections[host] = connection
        return connection

    def _close(self, host: int) -> None:
        if (connection := self.connections[host]) is not None:
            connection.close()
            self.connections[host] = None


def send_request(connection: socket.socket, start: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """The status and the body of the response. Raises OSError if the connection ends first."""
    head = b"%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (start, len(body))
    connection.sendall(head + body)
    return read_response(connection)


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of one response. Raises OSError if the connection ends first."""
    received = b""
    while True:
        head, separator, body = received.partition(b"\r\n\r\n")
        if separator:
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(body) >= length:
                return int(head.split(b" ")[1]), body
        if not (data := connection.recv(1 << 16)):
            raise ConnectionResetError
        received += data


def find_worker(server: Server) -> int | None:
    """The pid of the process that serves node agents, if it runs."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            if b"connection_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def count_connections(pid: int) -> int:
    """The connections to other machines that a process has open."""
    count = 0
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += os.readlink(file).startswith("socket:")
    return count - 2  # its two sockets to the server


def wait_for_worker(server: Server, other_than: int | None = None) -> int:
    """Waits until the process has the connections of all hosts; returns its pid."""

    def has_connections() -> bool:
        pid = find_worker(server)
        return pid not in (None, other_than) and count_connections(pid) >= SHAPE.hosts

    assert wait_until(has_connections, PATIENCE_S, 0.1), server.read_log()
    pid = find_worker(server)
    assert pid is not None
    return pid


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server(tmp_path, stall_after_s=3.0) as server:
        yield server


def list_incidents(server: Server) -> list[tuple[str, list[int], str]]:
    return [(i["kind"], i["culprits"], i["status"]) for i in server.get_items("incidents")]


def test_killed_worker_is_replaced_and_its_incident_is_reported_once(server: Server) -> None:
    with SimulatedHosts(server.port) as hosts:
        worker = wait_for_worker(server)
        fault = SimulatedFault(
            kind=VerdictKind.MISSING_RANK, rank=77, starts_at=time.monotonic() + 0.5
        )
        hosts.run.faults.append(fault)
        time.sleep(1.5)
        os.kill(worker, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for_worker(server, other_than=worker)
        assert time.monotonic() - killed_at < TAKE_OVER_S
        assert hosts.reconnected >= 0.9 * SHAPE.hosts
        expected = [(VerdictKind.MISSING_RANK.value, [77], "open")]
        assert wait_until(lambda: list_incidents(server) == expected, PATIENCE_S, 0.2), (
            list_incidents(server)
        )
        os.kill(find_worker(server) or 0, signal.SIGKILL)  # while the incident is open
        time.sleep(TAKE_OVER_S / 2)
        assert list_incidents(server) == expected
    assert "has ended; another one starts" in server.read_log()


def test_worker_that_does_not_respond_is_replaced(server: Server) -> None:
    with SimulatedHosts(server.port):
        worker = wait_for_worker(server)
        os.kill(worker, signal.SIGSTOP)
        wait_for_worker(server, other_than=worker)
        assert not Path(f"/proc/{worker}").exists()
        assert list_incidents(server) == []
    assert "does not respond" in server.read_log()


def test_server_serves_the_hosts_beyond_the_limit_of_open_files(tmp_path: Path) -> None:
    served = MIN_HOSTS - 4
    server = Server(tmp_path, max_files=RESERVED_FILES + served)
    try:
        server.start()
        with SimulatedHosts(server.port) as hosts:

            def are_all_served() -> bool:
                (job,) = server.get_items("jobs") or [{}]
                return job.get("reported_ranks") == SHAPE.ranks and job["state"] == "running"

            assert wait_until(are_all_served, PATIENCE_S, 0.1), server.read_log()

            def is_worker_full() -> bool:
                return count_connections(find_worker(server) or 0) == served

            assert wait_until(is_worker_full, PATIENCE_S, 0.1), server.read_log()
            worker = find_worker(server)
            time.sleep(2.0)
            assert find_worker(server) == worker
            assert is_worker_full()
            assert hosts.reconnected < SHAPE.hosts
            assert are_all_served()
    finally:
        server.stop()
    assert "another one starts" not in server.read_log()


def test_connection_may_be_used_for_anything(server: Server) -> None:
    with (
        SimulatedHosts(server.port),
        socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection,
    ):
        worker = wait_for_worker(server)
        before = count_connections(worker)
        beat = msgspec.json.encode({"host": "other", "agent": "other", "number": 1})
        for _ in range(3):
            status, body = send_request(connection, HEARTBEAT, beat)
            assert status == 200 and b"interval_s" in body
            assert wait_until(lambda: count_connections(worker) > before, PATIENCE_S, 0.05)
            status, body = send_request(connection, HEARTBEAT, b"no heartbeat")
            assert status == 422 and b"not a heartbeat" in body
            status, body = send_request(connection, b"GET /api/v1/jobs")
            assert status == 200 and b'"fleet"' in body
            assert wait_until(lambda: count_connections(worker) <= before, PATIENCE_S, 0.05)


def test_worker_ends_with_the_server(server: Server) -> None:
    with SimulatedHosts(server.port):
        worker = wait_for_worker(server)
        server.stop(signal.SIGKILL)
        assert wait_until(lambda: not Path(f"/proc/{worker}").exists(), PATIENCE_S, 0.1)


def test_signed_heartbeats_are_proven_and_unsigned_ones_refused(tmp_path: Path) -> None:
    with run_server(tmp_path, "--token", "a-token-of-some-length") as server:
        target = ServerTarget.from_url(server.url, "a-token-of-some-length")
        clients = [SignedClient(target, PATIENCE_S) for _ in range(MIN_HOSTS + 2)]
        with contextlib.ExitStack() as stack:
            for client in clients:
                stack.callback(client.close)
            for number in range(1, 30):
                for host, client in enumerate(clients):
                    beat = {"host": f"n{host}", "agent": f"a{host}", "number": number}
                    reply = client.send_request(
                        "POST", "/api/v1/heartbeats", msgspec.json.encode(beat)
                    )
                    assert reply.status == 200, reply.body
                    assert client.is_server_known
                worker = find_worker(server)
                if worker is not None and count_connections(worker) >= len(clients):
                    break
                time.sleep(0.2)
            assert worker is not None and count_connections(worker) >= len(clients)
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(
                    b"POST /api/v1/heartbeats HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
                )
                status, body = read_response(stranger)
                assert status == 401 and b"token" in body
            assert server.stop(signal.SIGTERM) == 0
