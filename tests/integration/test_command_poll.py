"""A node agent gets commands immediately, by a request that waits for them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hangwatch.agent.node.requests.commands import CommandPoll
from hangwatch.agent.transport.client import ServerTarget, SignedClient
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import COMMANDS_PATH
from hangwatch.protocol.request_signing import derive_job_token
from tests.harness.server import Server, run_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedJob

TOKEN = "a-token-of-the-test"
JOB = "run7"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with run_server(tmp_path, "--token", TOKEN) as started:
        started.url = f"http://:{TOKEN}@127.0.0.1:{started.port}"
        yield started


@pytest.fixture
def reporter(server: Server) -> Iterator[JobReporter]:
    """Has reported a job of two ranks once."""
    made = JobReporter.connect(server.url, SimulatedJob(ranks=2, name=JOB))
    with made.client:
        assert made.send_heartbeat()["poll_s"] > 10
        yield made


@contextlib.contextmanager
def polling(server: Server, agent: str, woken: threading.Event) -> Iterator[CommandPoll]:
    poll = CommandPoll(agent, woken.set)
    poll.permit(25.0, ServerTarget.from_url(server.url))
    try:
        time.sleep(0.3)
        yield poll
    finally:
        poll.close()


def take_commands(poll: CommandPoll, woken: threading.Event) -> list[Command]:
    assert woken.wait(10)
    woken.clear()
    return poll.take_commands()


def request_stacks(server: Server) -> None:
    server.post("dumps", {"job": JOB, "ranks": [0], "native": False})


def test_commands_arrive_without_a_heartbeat(server: Server, reporter: JobReporter) -> None:
    woken = threading.Event()
    with polling(server, reporter.agent_id(), woken) as poll:
        for _ in range(3):
            request_stacks(server)
            (command,) = take_commands(poll, woken)
            assert command.kind is CommandKind.STACKS
            time.sleep(0.3)
    assert "Traceback" not in server.read_log()


def test_commands_are_not_lost_with_the_connection(server: Server, reporter: JobReporter) -> None:
    """The commands are sent with the reply to the next heartbeat."""
    body = json.dumps({"agent": reporter.agent_id()}).encode()
    head = (
        f"POST {COMMANDS_PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.5)
    time.sleep(0.2)
    request_stacks(server)
    (command,) = reporter.send_heartbeat()["commands"]
    assert command["kind"] == "stacks"


def test_one_command_wakes_one_agent(server: Server, reporter: JobReporter) -> None:
    woken = threading.Event()
    with polling(server, "another-agent", woken):
        request_stacks(server)
        assert not woken.wait(1.0)
    assert reporter.send_heartbeat()["commands"]


def test_token_of_another_job_is_refused(server: Server, reporter: JobReporter) -> None:
    target = ServerTarget(
        base_url=f"http://127.0.0.1:{server.port}", token=derive_job_token(TOKEN, "another-job")
    )
    body = json.dumps({"agent": reporter.agent_id()}).encode()
    with contextlib.closing(SignedClient(target, 5.0)) as client:
        reply = client.send_request("POST", COMMANDS_PATH, body)
    assert (reply.status, reply.parse_json()["status"]) == (403, 403)


def test_mistakes_are_explained(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}{COMMANDS_PATH}"
    assert httpx.post(url, json={"agent": "a"}).status_code == 401
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.post(url, json={"x": 1}, headers=headers).status_code == 422


def test_server_stops_while_agents_wait(server: Server, reporter: JobReporter) -> None:
    with polling(server, reporter.agent_id(), threading.Event()):
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 12.0, "they would wait for 25 s"
    assert "Traceback" not in server.read_log()
