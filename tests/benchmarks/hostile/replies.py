"""A hostile server at the address that a node agent was given."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.harness.processes import clean_environment

NODE_TARGET = Path(__file__).parents[2] / "integration" / "node_target.py"


class HostileServer:
    """Answers a node agent with endless, slow, huge and malformed replies."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed} replies")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.count = 0

    def answer_once(self, rng: random.Random) -> None:
        self._listening.settimeout(5.0)
        connection, _ = self._listening.accept()
        with connection:
            connection.settimeout(20.0)
            connection.recv(1 << 16)
            for piece in self._make_pieces(rng):
                connection.sendall(piece)

    def _make_pieces(self, rng: random.Random) -> Iterator[bytes]:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        kind = rng.randrange(6)
        if kind == 0:
            yield head + b"\r\n"
            yield from (b"[" * 65536 for _ in range(2000))
        elif kind == 1:
            yield head
            yield from (b"x: " + b"y" * 1000 + b"\r\n" for _ in range(10_000))
        elif kind == 2:
            body = b"[" * (3 << 20)
            yield head + b"content-length: %d\r\n\r\n" % len(body) + body
        elif kind == 3:
            body = gzip.compress(bytes(64 << 20), 1)
            yield head + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        elif kind == 4:
            yield head + b"content-length: 1000\r\n\r\n"
            for _ in range(30):
                yield b"x"
                time.sleep(0.5)
        else:
            commands = [
                {"id": str(n), "kind": "stacks", "key": "k" * rng.randrange(1000)}
                for n in range(rng.choice([1, 10_000]))
            ]
            body = json.dumps({"interval_s": 0.05, "commands": commands}).encode()
            yield head + b"content-length: %d\r\n\r\n" % len(body) + body


@contextlib.contextmanager
def running_agent(folder: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node agent with one rank, which reports to ``url``."""
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700)
    env = clean_environment(HANGWATCH_URL=url, HANGWATCH_RUN_DIR=str(run_dir), PYTHONSAFEPATH="1")
    rank = subprocess.Popen(
        [sys.executable, str(NODE_TARGET), str(run_dir), "0", "sleep"],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert rank.stdout is not None
    rank.stdout.readline()
    command = [sys.executable, "-m", "hangwatch.agent.node.main", "--run-dir", str(run_dir)]
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen([*command, "--foreground"], env=env, stderr=log)
    try:
        yield agent
    finally:
        for process in (agent, rank):
            process.kill()
            process.wait()
