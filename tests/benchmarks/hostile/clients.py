"""Hostile requests to the server: without a token, with that of a job, and from another user."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from hangwatch.agent.node.system.processes import read_stat
from hangwatch.agent.transport.client import ServerTarget, SignedClient
from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH
from tests.harness.other_user import run_as_other_user

JOB = "evil"
IDLE_CONNECTION_COUNT, IDLE_S = 2000, 10.0
EXTREMES: tuple[Any, ...] = (
    2**60,
    2**63,
    -1,
    1.7e308,
    1e-300,
    -0.0,
    "",
    "x" * 100_000,
    None,
    [],
    {},
)


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


class JobAttacker:
    """Somebody with the token of a job, `JOB`."""

    def __init__(self, url: str, token: str) -> None:
        self._client = SignedClient(ServerTarget(base_url=url, token=token), 30.0)

    def _send(self, path: str, document: Any) -> None:
        body = gzip.compress(json.dumps(document).encode(), 1)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        self._client.send_request("POST", path, body, headers)

    def send_costly(self, rng: random.Random) -> None:
        """Well-formed heartbeats that cost as much as possible."""
        self._send(HEARTBEAT_PATH, make_heartbeat(rng))

    def send_extremes(self, rng: random.Random) -> None:
        """Small heartbeats in which some values are the most or the least that JSON can hold."""
        document = make_heartbeat(rng, is_small=True)
        for _ in range(rng.randrange(1, 4)):
            replace_value(document, rng)
        self._send(HEARTBEAT_PATH, document)

    def send_samples(self, rng: random.Random) -> None:
        """Stacks that nobody has requested, of 29 MB each."""
        frame = {"function": "f" * 500, "file": "g" * 500, "line": 1}
        threads = [{"thread": f"{n}", "frames": [frame] * 280} for n in range(100)]
        document = make_heartbeat(rng, is_small=True)
        key = document["processes"][0]["key"]
        sample = {"key": key, "request": "", "source": "py-spy", "threads": threads}
        self._send(HEARTBEAT_PATH, {**document, "samples": [sample]})

    def flood_agents(self, rng: random.Random) -> None:
        """A node agent and an attempt that are new each time."""
        document = make_heartbeat(rng, is_small=True)
        number = rng.randrange(1 << 40)
        document["agent"] = document["host"] = f"{number}"
        document["processes"][0]["identity"]["job"] = f"{JOB}/{number}"
        self._send(HEARTBEAT_PATH, document)

    def flood_waits(self, rng: random.Random) -> None:
        """Waits for commands, none of which is read to its end."""
        body = json.dumps({"agent": f"{rng.randrange(1 << 40)}"}).encode()
        self._client.send_request(
            "POST", COMMANDS_PATH, body, {"Content-Type": "application/json"}, read_timeout_s=0.05
        )

    def claim_ranks(self, rng: random.Random) -> None:
        """Reports about the processes of others, by their ids, with and without identities."""
        document = make_heartbeat(rng, is_small=True)
        document["host"] = socket.gethostname()
        document["number"] = rng.choice([1, 2**53])
        processes = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                key = f"{pid}-{read_stat(int(pid)).start_ticks}"
                processes.append({**document["processes"][0], "key": key, "ended": {"signal": 9}})
                if rng.random() < 0.5:
                    del processes[-1]["identity"]
        self._send(HEARTBEAT_PATH, {**document, "processes": processes})


def replace_value(document: Any, rng: random.Random) -> None:
    """Replaces one value at any depth of a JSON document by an extreme one."""
    while True:
        places = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not places:
            return
        place = rng.choice(places)
        value = document[place]
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.2:
            document[place] = rng.choice(EXTREMES)
            return
        document = value


def hold_connections(url: str) -> Callable[[random.Random], None]:
    """Idle connections of another user of this machine, which needs root."""
    parts = urlsplit(url)

    def hold() -> None:
        connections = []
        try:
            for _ in range(IDLE_CONNECTION_COUNT):
                address = (parts.hostname or "", parts.port or 0)
                connections.append(socket.create_connection(address, timeout=1.0))
        except OSError:
            pass
        time.sleep(IDLE_S)

    def attack(_: random.Random) -> None:
        run_as_other_user(hold)

    return attack


def make_heartbeat(rng: random.Random, *, is_small: bool = False) -> dict[str, Any]:
    """Many groups, long texts and lists, many jobs, or many attempts of one; or none of these."""
    kind = -1 if is_small else rng.randrange(6)
    text = "x" if is_small else "x" * rng.choice([10, 1000, 100_000, 5_000_000])
    groups = rng.choice([1, 20, 200]) if kind == 0 else 1
    processes = rng.choice([8, 500]) if kind == 1 else 1
    job = f"{JOB}/{rng.randrange(3000)}"
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
