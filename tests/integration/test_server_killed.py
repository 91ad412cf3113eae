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
from tests.harness.processes import agents, eventually, kill
from tests.harness.server import Server, serving

PROGRAM = Path(__file__).parents[1] / "zoo" / "leaves_for_own_code" / "program.py"


class Link:
    """A TCP relay to a port of this machine that can be cut: what is open breaks, what is new is
    turned away.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._up = True
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._up = False
        for end in self._open:
            with contextlib.suppress(OSError):  # it was closed by then
                end.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        self._up = True

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
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
                    threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut, or an end that has gone
            while chunk := source.recv(65536):
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@contextlib.contextmanager
def linked(server: Server) -> Iterator[tuple[Link, str]]:
    link = Link(server.port)
    try:
        yield link, str(httpx.URL(server.url).copy_with(port=link.port)).rstrip("/")
    finally:
        link.close()


def test_the_same_incident_goes_on(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "server", stall_after=3.0) as server,
        linked(server) as (link, url),
        job.running(PROGRAM, 2, tmp_path / "job", url, patience_s=40.0) as running,
    ):

        def found() -> list[dict[str, Any]]:
            return server.items("incidents", job="job")

        def seen_s() -> float:
            ranks = server.items("ranks", job="job")
            return (
                max((float(rank["last_seen_s"]) for rank in ranks), default=1e9)
                if len(ranks) == 2
                else 1e9
            )

        assert eventually(lambda: any(i["stacks"] for i in found()), 120.0)
        assert eventually(lambda: "ALERT job job" in server.log(), 20.0)
        [opened] = found()
        assert (opened["kind"], opened["culprits"], opened["status"]) == (
            "missing_rank",
            [1],
            "open",
        )
        link.cut()
        server.stop(signal.SIGKILL)
        server.start()
        assert [(i["id"], i["status"]) for i in server.items("incidents")] == [
            (opened["id"], "open")
        ]
        link.restore()
        assert eventually(lambda: seen_s() < 3.0, 60.0), "its agent is not heard again"
        assert eventually(lambda: "upload_samples" in str(found()[0]["stacks"][0]), 20.0)
        link.cut()
        assert eventually(lambda: seen_s() > 6.0, 30.0)
        link.restore()
        assert eventually(lambda: seen_s() < 3.0, 60.0)
        (first,) = agents(running.run_dir)
        kill({first})
        assert eventually(lambda: bool(agents(running.run_dir) - {first}), 20.0), (
            "no other took its place"
        )
        assert eventually(lambda: seen_s() < 1.0, 20.0), "it is not heard"
        assert [(i["id"], i["status"], i["kind"], i["culprits"]) for i in found()] == [
            (opened["id"], "open", "missing_rank", [1]),
        ]
        assert server.log().count("ALERT job") == 1
        assert running.process.poll() is None
