"""What the tests of the node agent share: a server that writes down what it is told, targets, and
an agent.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.simulation.waiting import wait_for_value

TESTS_DIR = Path(__file__).parent


class HeartbeatReceiver:
    """A real HTTP server in a thread. `beats` are the heartbeats it took, each with the time it
    came.
    """

    def __init__(self) -> None:
        self.heartbeats: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.commands: list[dict[str, Any]] = []
        self.status = 200
        self.retry_after = 0
        self.interval_s = 0.1
        self.changes_within_s: float | None = None
        self.details_s: float | None = None
        self.urgent_flags: list[bool] = []  # of each heartbeat, by its header
        self.resync = False
        self._lock = threading.Lock()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                beat = json.loads(
                    gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw
                )
                receiver.urgent_flags.append(self.headers.get("Priority") == "u=1")
                status, reply = receiver.handle_heartbeat(
                    beat, self.path, self.headers.get("Authorization")
                )
                body = json.dumps(reply).encode()
                self.send_response(status)
                if receiver.retry_after and status != 200:
                    self.send_header("Retry-After", str(receiver.retry_after))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def handle_heartbeat(
        self, beat: dict[str, Any], path: str, token: str | None
    ) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.tokens.append(token)
            if path != "/prefix/api/v1/heartbeats":
                return 404, {}
            if self.status != 200:
                return self.status, {}
            self.heartbeats.append(beat)
            commands, self.commands = self.commands, []
            resync, self.resync = self.resync, False
            told = {
                "interval_s": self.interval_s,
                "news_s": self.changes_within_s,
                "details_s": self.details_s,
            }
            return 200, {**told, "resync": resync, "commands": commands}

    @property
    def url(self) -> str:
        return f"http://:secret@127.0.0.1:{self.port}/prefix/"

    def list_updates(self, rank: int | None = None) -> list[dict[str, Any]]:
        """All updates so far, of one rank if given; each carries the identity told last for its
        key.
        """
        known: dict[str, dict[str, Any]] = {}
        found = []
        for beat in list(self.heartbeats):
            for update in beat.get("processes", ()):
                if "identity" in update:
                    known[update["key"]] = update["identity"]
                found.append({**update, "identity": known[update["key"]]})
        return [update for update in found if rank is None or update["identity"]["rank"] == rank]

    def find_exit_update(self, rank: int) -> dict[str, Any] | None:
        return next((update for update in self.list_updates(rank) if "ended" in update), None)

    def list_samples(self) -> list[dict[str, Any]]:
        return [sample for beat in list(self.heartbeats) for sample in beat.get("samples", ())]

    def send_command(self, key: str, **command: Any) -> None:
        with self._lock:
            self.commands.append(
                {"id": f"c{time.monotonic_ns()}", "ask": "stacks", "key": key, **command}
            )

    def request_stacks(self, key: str, **command: Any) -> dict[str, Any]:
        """Asks for stacks and waits for them."""
        before = len(self.list_samples())
        self.send_command(key, **command)
        wait_for_value(lambda: len(self.list_samples()) > before, "stacks that were asked for")
        return self.list_samples()[-1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class AgentTestbed:
    """A run dir, a receiver, and every process a test starts, which all end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.folder.mkdir(mode=0o700)
        self.receiver = HeartbeatReceiver()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command_prefix: list[str] = []

    def make_environ(self, **more: str) -> dict[str, str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HANGWATCH", "TORCHELASTIC")) and k != "RANK"
        }
        return (
            kept
            | {
                "HANGWATCH_URL": self.receiver.url,
                "HANGWATCH_RUN_DIR": str(self.folder),
                "PYTHONSAFEPATH": "1",
            }
            | more
        )

    def start_process(
        self, command: list[str], *, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self.command_prefix, *command],
            env=env or self.make_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def start_rank(
        self, rank: int, *commands: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A rank; it has its ring when this returns."""
        process = self.start_process(
            [
                sys.executable,
                str(TESTS_DIR / "node_target.py"),
                str(self.folder),
                str(rank),
                *commands,
            ],
            env=env,
        )
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        return process

    def start_agent(self, *more: str) -> subprocess.Popen[bytes]:
        return self.start_process(
            [
                sys.executable,
                "-m",
                "hangwatch.agent.node.main",
                "--run-dir",
                str(self.folder),
                "--foreground",
                "--linger",
                "0.5",
                *more,
            ]
        )

    def wait_until_reported(self, rank: int) -> dict[str, Any]:
        """The first update of a rank, once it is there."""
        found: dict[str, Any] = wait_for_value(
            lambda: self.receiver.list_updates(rank), f"rank {rank} is reported"
        )[0]
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
            process.wait(10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self.receiver.close()


@contextlib.contextmanager
def open_testbed(folder: Path) -> Iterator[AgentTestbed]:
    made = AgentTestbed(folder)
    try:
        yield made
    finally:
        made.close()
