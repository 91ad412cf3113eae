"""Hostile clients, servers and files: ``python -m tests.benchmarks.hostile [--minutes 10]``.

Each attack makes random input of one class, over real sockets and against real processes: heads of
requests, heartbeats with a valid sender, replies to a node agent, pickles and bundles for ``hangwatch
analyze``. The server must answer a health check throughout, and no process may grow beyond its limit.
The exit code is 1 if one does, or ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.harness.processes import clean_environment, read_resident_mb
from tests.harness.server import Server, run_server

NODE_TARGET = Path(__file__).parents[1] / "integration" / "node_target.py"
ANALYZE_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 10.0
# Above what each uses at first. docs/limits.md has the limits that these follow from.
MAX_SERVER_GROWTH_MB, MAX_AGENT_GROWTH_MB, MAX_ANALYZE_MB = 1500.0, 64.0, 2500.0
SAMPLE_INTERVAL_S = 1.0


class HostileError(Exception):
    """A process grew beyond its limit, ended, or stopped answering."""


@dataclass(slots=True)
class Target:
    """A process under attack, and the memory that it used at first and at most."""

    name: str
    pid: int
    max_growth_mb: float
    first_mb: float = 0.0
    most_mb: float = 0.0

    def sample(self) -> None:
        """Raises HostileError if it ended or grew too much."""
        try:
            resident_mb = read_resident_mb(self.pid)
        except (OSError, IndexError):
            raise HostileError(f"the {self.name} ended") from None
        self.first_mb = self.first_mb or resident_mb
        self.most_mb = max(self.most_mb, resident_mb)
        if resident_mb - self.first_mb > self.max_growth_mb:
            raise HostileError(
                f"the {self.name} grew from {self.first_mb:.0f} to {resident_mb:.0f} MB"
            )


@dataclass(slots=True)
class Attack:
    name: str
    run_once: Callable[[random.Random], None]
    count: int = 0
    thread: threading.Thread | None = None
    error: str = ""

    def start(self, seed: int, ends_at: float) -> None:
        rng = random.Random(f"{seed} {self.name}")

        def run() -> None:
            while time.monotonic() < ends_at and not self.error:
                try:
                    self.run_once(rng)
                except (OSError, httpx.HTTPError):
                    pass  # refused, or the connection was closed: as it should be
                except HostileError as error:
                    self.error = str(error)
                self.count += 1

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


def make_head_attack(url: str) -> Callable[[random.Random], None]:
    """Long and endless headers, URLs and trailers, and many simultaneous requests."""
    parts = urlsplit(url)

    def attack(rng: random.Random) -> None:
        with socket.create_connection(
            (parts.hostname or "", parts.port or 0), timeout=5
        ) as connection:
            for piece in _make_head_pieces(rng):
                connection.sendall(piece)

    return attack


def _make_head_pieces(rng: random.Random) -> Iterator[bytes]:
    size = rng.choice([100, 10_000, 1_000_000])
    count = rng.choice([1, 100, 5_000])
    kind = rng.randrange(5)
    if kind == 0:
        yield b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
        for number in range(count):
            yield b"x%d: %s\r\n" % (number, b"y" * min(size, 100_000))
    elif kind == 1:
        yield b"GET /healthz?"
        for _ in range(count):
            yield b"q" * size
    elif kind == 2:
        yield b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        for _ in range(count):
            yield b"trailer: " + b"t" * min(size, 50_000) + b"\r\n"
    elif kind == 3:
        yield b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * count
    else:
        yield b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        for _ in range(count):
            yield b"1;" + b"e" * min(size, 10_000) + b"\r\nx\r\n"


def make_heartbeat_attack(url: str) -> Callable[[random.Random], None]:
    """Well-formed heartbeats of an authorized sender that cost as much as possible."""
    client = httpx.Client(timeout=30.0)

    def attack(rng: random.Random) -> None:
        body = json.dumps(make_heartbeat(rng)).encode()
        client.post(
            f"{url}/api/v1/heartbeats",
            content=gzip.compress(body, 1),
            headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
        )

    return attack


def make_heartbeat(rng: random.Random) -> dict[str, Any]:
    """Many groups, long texts and lists, many jobs, or many attempts of one."""
    kind = rng.randrange(6)
    text = "x" * rng.choice([10, 1000, 100_000, 5_000_000])
    groups = rng.choice([1, 20, 200]) if kind == 0 else 1
    processes = rng.choice([8, 500]) if kind == 1 else 1
    job = f"job {rng.randrange(3000)}"
    update: dict[str, Any] = {"lifecycle": 2, "state": "S"}
    if kind == 2:
        update["raised"] = {"type": "ValueError", "message": text}
    if kind == 3:
        update["faults"] = [text[:1000]] * rng.choice([10, 200_000])
    streams = [
        [  # see `StreamUpdate`
            number, 5, None, 0.0, "", 0,
            [[n, n] for n in range(rng.choice([1, 200_000]) if kind == 4 else 1)],
            None, [],
            {
                "kind": "collective",
                "name": f"{number} {text[:100]}",
                "desc": text[: 1 << rng.randrange(20)],
                "ranks": f"0-{rng.randrange(1, 1 << 21)}",
            },
        ]
        for number in range(groups)
    ]  # fmt: skip
    return {
        "host": f"host {rng.randrange(50)}",
        "agent": f"agent {rng.randrange(100)}",
        "number": time.monotonic_ns(),
        "processes": [
            {
                "key": f"{number}-{rng.randrange(1000)}",
                "identity": {
                    "job": job if kind != 1 else f"{job}.{number}",
                    "rank": rng.randrange(100),
                    "world_size": rng.choice([1, 100, 1 << 20]),
                    "pid": number + 1,
                    "start_ticks": 1,
                    "restart": rng.randrange(300) if kind == 5 else 0,
                },
                "streams": streams,
                **update,
            }
            for number in range(processes)
        ],
    }


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


def make_file_attack(folder: Path) -> Callable[[random.Random], None]:
    """Pickles and bundles that are small, and take long or much memory if nothing stops them."""

    def attack(rng: random.Random) -> None:
        path = folder / "dump_rank_0"
        bundle = folder / "bundle.zip"
        is_bundle = rng.random() < 0.4
        if is_bundle:
            bundle.write_bytes(make_bundle(rng))
        else:
            path.write_bytes(make_pickle(rng))
        run_analyze(bundle if is_bundle else path)

    return attack


def run_analyze(path: Path) -> None:
    """Raises HostileError if the command takes too long, too much memory, or ends in a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hangwatch.agent.cli", "analyze", str(path)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    ends_at, most_mb = time.monotonic() + ANALYZE_TIMEOUT_S, 0.0
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            most_mb = max(most_mb, read_resident_mb(process.pid))
        if time.monotonic() > ends_at or most_mb > MAX_ANALYZE_MB:
            process.kill()
            kept = path.with_suffix(".kept")
            path.rename(kept)
            raise HostileError(f"analyze took {most_mb:.0f} MB, or too long: {kept}")
        time.sleep(0.05)
    assert process.stderr is not None
    message = process.stderr.read().decode(errors="replace")
    if "Traceback" in message:
        raise HostileError(f"analyze ended in a traceback:\n{message[-2000:]}")


def make_pickle(rng: random.Random) -> bytes:
    """Shared nested containers, as values and as keys of dictionaries; or random opcodes."""
    kind = rng.randrange(4)
    depth = rng.randrange(2, 120)
    if kind == 0:
        body = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(depth))
        return b"\x80\x02}(" + body + b"K\x01u."
    if kind == 1:
        body = b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(depth))
        return b"\x80\x02" + body + b"."
    if kind == 2:
        return b"\x80\x02" + b"]" * (1 << rng.randrange(10, 24)) + b"."
    opcodes = b"]}()aesutl0123N\x85\x86\x87\x88\x89\x94K\x05h\x01q\x02."
    return b"\x80\x04" + bytes(rng.choice(opcodes) for _ in range(rng.randrange(4000))) + b"."


def make_bundle(rng: random.Random) -> bytes:
    """A zip whose documents are far larger than the file."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for name in ("incident.json", "ranks.json"):
            piece = rng.choice([b"[],", b"{},", b"0,", b'"",', b"["])
            content = b"[" + piece * (rng.choice([10, 100_000, 60_000_000]) // len(piece)) + b"0]"
            written.writestr(name, content)
    return archive.getvalue()


@dataclass(slots=True)
class Report:
    targets: list[Target]
    attacks: list[Attack]
    problems: list[str] = field(default_factory=list)

    def print_table(self) -> None:
        print("| attack | times |\n|---|---|")
        for attack in self.attacks:
            print(f"| {attack.name} | {attack.count:,} |")
        print("\n| process | at first | at most | limit |\n|---|---|---|---|")
        for target in self.targets:
            limit_mb = target.first_mb + target.max_growth_mb
            print(
                f"| {target.name} | {target.first_mb:.0f} MB | {target.most_mb:.0f} MB |"
                f" {limit_mb:.0f} MB |"
            )
        for problem in self.problems:
            print(f"\nPROBLEM: {problem}")


def run_attacks(folder: Path, minutes: float, seed: int) -> Report:
    ends_at = time.monotonic() + 60.0 * minutes
    hostile = HostileServer(seed)
    with run_server(folder / "server") as server, running_agent(folder, hostile.url) as agent:
        targets = [
            Target("server", server.pid, MAX_SERVER_GROWTH_MB),
            Target("node agent", agent.pid, MAX_AGENT_GROWTH_MB),
        ]
        attacks = [
            *(Attack(f"heads {n}", make_head_attack(server.url)) for n in range(2)),
            Attack("heartbeats", make_heartbeat_attack(server.url)),
            Attack("replies", hostile.answer_once),
            Attack("files", make_file_attack(folder)),
        ]
        report = Report(targets, attacks)
        for attack in attacks:
            attack.start(seed, ends_at)
        try:
            _watch_targets(server, report, ends_at)
        except HostileError as error:
            report.problems.append(str(error))
        report.problems += [f"{attack.name}: {attack.error}" for attack in attacks if attack.error]
    return report


def _watch_targets(server: Server, report: Report, ends_at: float) -> None:
    shown_at = 0.0
    while time.monotonic() < ends_at and not any(attack.error for attack in report.attacks):
        for target in report.targets:
            target.sample()
        started_at = time.monotonic()
        try:
            httpx.get(f"{server.url}/healthz", timeout=HEALTH_TIMEOUT_S).raise_for_status()
        except httpx.HTTPError as error:
            raise HostileError(f"the server does not answer: {error!r}") from None
        if started_at - shown_at >= 30.0:
            shown_at = started_at
            sizes = ", ".join(f"{t.name} {t.most_mb:.0f} MB" for t in report.targets)
            print(f"{ends_at - started_at:4.0f} s left: {sizes}", file=sys.stderr, flush=True)
        time.sleep(SAMPLE_INTERVAL_S)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.hostile",
        description="Hostile clients, servers and files, and the memory that they cost.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--seed", type=int, default=None, help="of the random input (drawn)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hangwatch-hostile-") as folder:
        report = run_attacks(Path(folder), arguments.minutes, seed)
    report.print_table()
    return 1 if report.problems else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
