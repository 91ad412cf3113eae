"""A real job hangs; meanwhile its server is killed, then the link to it cut, then its node agent
killed.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.harness import job
from tests.harness.processes import find_agents, kill_processes
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).parents[1] / "zoo" / "leaves_for_own_code" / "program.py"


class TcpRelay:
    """A TCP relay to a port of this machine that can be cut: what is open breaks, what is new is
    turned away.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._up = True
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def cut_connections(self) -> None:
        self._up = False
        for end in self._open:
            with contextlib.suppress(OSError):  # it was closed by then
                end.shutdown(socket.SHUT_RDWR)

    def restore_connections(self) -> None:
        self._up = True

    def close(self) -> None:
        self._listening.close()
        self.cut_connections()

    def _accept_connections(self) -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to), 5) if self._up else None
                except OSError:
                    far = None
                if far is None:
                    near.close()
                    continue
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._relay_bytes, args=(source, sink), daemon=True
                    ).start()

    def _relay_bytes(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut, or an end that has gone
            while chunk := source.recv(65536):
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@contextlib.contextmanager
def start_relay(server: Server) -> Iterator[tuple[TcpRelay, str]]:
    link = TcpRelay(server.port)
    try:
        yield link, str(httpx.URL(server.url).copy_with(port=link.port)).rstrip("/")
    finally:
        link.close()


def test_incident_survives_server_kill(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "server", stall_after_s=3.0) as server,
        start_relay(server) as (link, url),
        job.running_job(PROGRAM, 2, tmp_path / "job", url, agent_exit_timeout_s=40.0) as running,
    ):

        def list_incidents() -> list[dict[str, Any]]:
            return server.get_items("incidents", job="job")

        def read_last_seen_s() -> float:
            ranks = server.get_items("ranks", job="job")
            return (
                max((float(rank["last_seen_s"]) for rank in ranks), default=1e9)
                if len(ranks) == 2
                else 1e9
            )

        assert wait_until(lambda: any(i["stacks"] for i in list_incidents()), 120.0)
        assert wait_until(lambda: "ALERT job job" in server.read_log(), 20.0)
        [opened] = list_incidents()
        assert (opened["kind"], opened["culprits"], opened["status"]) == (
            "missing_rank",
            [1],
            "open",
        )
        link.cut_connections()
        server.stop(signal.SIGKILL)
        server.start()
        assert [(i["id"], i["status"]) for i in server.get_items("incidents")] == [
            (opened["id"], "open")
        ]
        link.restore_connections()
        assert wait_until(lambda: read_last_seen_s() < 3.0, 60.0), "its agent does not report again"
        assert wait_until(lambda: "upload_samples" in str(list_incidents()[0]["stacks"][0]), 20.0)
        link.cut_connections()
        assert wait_until(lambda: read_last_seen_s() > 6.0, 30.0)
        link.restore_connections()
        assert wait_until(lambda: read_last_seen_s() < 3.0, 60.0)
        (first,) = find_agents(running.run_dir)
        kill_processes({first})
        assert wait_until(lambda: bool(find_agents(running.run_dir) - {first}), 20.0), (
            "no other took its place"
        )
        assert wait_until(lambda: read_last_seen_s() < 1.0, 20.0), "it does not report"
        assert [(i["id"], i["status"], i["kind"], i["culprits"]) for i in list_incidents()] == [
            (opened["id"], "open", "missing_rank", [1]),
        ]
        assert server.read_log().count("ALERT job") == 1
        assert running.process.poll() is None
