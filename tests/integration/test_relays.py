"""Another process between node agents and their server, or one that has recorded what they sent: it
gives no orders, gets no stacks that the server did not request, and nothing that it sends again is
taken. With real servers, a real node agent and another user.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hangwatch.agent.node.reporting.uplink import HeartbeatPost, Uplink
from hangwatch.agent.transport import client
from hangwatch.agent.transport.client import ServerTarget
from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH
from hangwatch.protocol.request_signing import MAX_REQUEST_AGE_S, Credential, ServerTime
from tests.harness.relay import Relay
from tests.harness.server import Server, run_server
from tests.harness.signing import fetch_server_time, post_signed
from tests.simulation.waiting import wait_for_value

from .node_support import AgentTestbed, open_testbed

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
TOKEN = "more-than-sixteen-characters"
CREDENTIAL = Credential.from_token(TOKEN)
STALE = 425  # Too Early


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with run_server(tmp_path / "server", "--token", TOKEN) as running:
        add_token(running)
        yield running


@pytest.fixture
def agent_testbed(tmp_path: Path) -> Iterator[AgentTestbed]:
    with open_testbed(tmp_path) as made:
        yield made


def add_token(server: Server) -> None:
    """The server printed its URL without the token, since that was given."""
    server.url = f"http://:{TOKEN}@127.0.0.1:{server.port}"


def restart(server: Server) -> None:
    server.stop()
    server.start()
    add_token(server)


def find_plain_url(server: Server) -> str:
    """The URL without the token, which httpx would send."""
    return f"http://127.0.0.1:{server.port}"


def make_heartbeat(number: int = 1, *, job: str = "victim", full: bool = True) -> bytes:
    identity = heartbeat.ProcessIdentity(job=job, rank=0, world_size=2, pid=1, start_ticks=1)
    update = heartbeat.ProcessUpdate(key="1-1", identity=identity if full else None)
    beat = heartbeat.Heartbeat(
        host="here", agent="a", number=number, full=full, processes=(update,)
    )
    return json.dumps(codec.encode_message(beat)).encode()


@needs_root
@pytest.mark.parametrize("repeats_proof", [False, True], ids=["unsigned", "repeated proof"])
@pytest.mark.parametrize("path", [HEARTBEAT_PATH, COMMANDS_PATH])
def test_relay_of_one_exchange_gives_no_orders(
    server: Server, agent_testbed: AgentTestbed, path: str, repeats_proof: bool
) -> None:
    """SECURITY.md: "Each reply proves itself.", "is applied only if it is signed with the token for that
    very request", "So whoever passes some requests on to the server can give no orders afterwards.",
    "Stacks are sent only as the answer to a signed order", "who passes on what they send, sees
    heartbeats and stacks".
    """
    environ = agent_testbed.make_environ(HANGWATCH_TOKEN=TOKEN)
    rank = agent_testbed.start_rank(0, "sleep", env=environ)
    ticks = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[19]
    orders = [
        {"id": f"invented {kind}", "kind": kind, "key": f"{rank.pid}-{ticks}"}
        for kind in ("stacks", "abort")
    ]
    relay = Relay(
        server_port=server.port,
        path=path,
        document={"interval_s": 0.2, "commands": orders},
        seconds=4.0,
        repeats_proof=repeats_proof,
    )
    relay.start()
    environ["HANGWATCH_URL"] = f"http://127.0.0.1:{relay.port}"
    agent_testbed.start_agent(env=environ)
    wait_for_value(lambda: server.get_items("ranks", job="node-test"), "the rank is reported")
    while path == COMMANDS_PATH and relay.is_running:
        # This ends a wait for commands, whose reply is passed on, unless a heartbeat's reply has it.
        server.post("dumps", {"job": "node-test", "ranks": [0], "native": False})
        time.sleep(0.5)
    passed = relay.wait()
    assert (passed.passed_on >= 1, passed.invented >= 1) == (True, True)
    assert rank.poll() is None, "it was not ended"
    assert b"invented" not in passed.received, "nothing was sent that the relay has requested"
    if path == COMMANDS_PATH:
        assert b'"threads"' in passed.received, "what the server has requested was sent"


def make_sent(body: bytes, path: str, server_time: ServerTime) -> dict[str, str]:
    """The headers of a node agent's request."""
    return {"Authorization": CREDENTIAL.sign_request("POST", path, body, server_time).header}


def test_recorded_request_is_refused_later(server: Server) -> None:
    """To the same server, to another path, after a while, and to a server that was restarted.
    SECURITY.md: "A recorded request is worth nothing.", "It is signed for its path, the server's run and a
    time on the server's clock, and accepted once, within 30 seconds.", "A server that was restarted
    refuses those of node agents as well".
    """
    url, body = find_plain_url(server), make_heartbeat()
    now = fetch_server_time(url, CREDENTIAL)
    recorded = make_sent(body, HEARTBEAT_PATH, now)

    def send_again(path: str = HEARTBEAT_PATH) -> int:
        return httpx.post(f"{url}{path}", content=body, headers=recorded).status_code

    assert send_again() == 200
    assert send_again() == STALE, "it was sent before"
    assert send_again(COMMANDS_PATH) == 401, "it is signed for another path"
    for age_s, status in (
        (MAX_REQUEST_AGE_S - 5, 200),
        (MAX_REQUEST_AGE_S + 5, STALE),
        (-5, STALE),
    ):
        former = ServerTime(now.run, now.at_s - age_s)
        recorded = make_sent(body, HEARTBEAT_PATH, former)
        assert send_again() == status, f"signed {age_s} s ago"
    recorded = make_sent(body, HEARTBEAT_PATH, now)  # recorded without being passed on
    restart(server)
    assert send_again() == STALE, "it is signed for the former run"
    assert server.get_items("jobs") == [], "no job and so no alert comes from it"


def test_refusal_of_a_stale_request_is_signed(server: Server) -> None:
    """So that a node agent follows no other one's. SECURITY.md: "and the server signs its replies"."""
    url, body = find_plain_url(server), make_heartbeat()
    former = ServerTime("former", 1.0)
    signed = CREDENTIAL.sign_request("POST", HEARTBEAT_PATH, body, former)
    refusal = httpx.post(
        f"{url}{HEARTBEAT_PATH}", content=body, headers={"Authorization": signed.header}
    )
    proof = refusal.headers["Hangwatch-Proof"]
    proven = CREDENTIAL.verify_proof(signed, STALE, refusal.content, proof)
    assert proven is not None and proven.run == fetch_server_time(url, CREDENTIAL).run
    assert CREDENTIAL.verify_proof(signed, 200, refusal.content, proof) is None
    assert Credential(b"guessed").verify_proof(signed, STALE, refusal.content, proof) is None
    assert post_signed(url, HEARTBEAT_PATH, body, Credential(b"guessed")).status_code == 401


@pytest.mark.parametrize("is_trusted", [True, False], ids=["own user", "by its proof"])
def test_restarted_server_gets_the_next_heartbeat(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    """The node agent sends the same heartbeat again immediately, and then all that it knows.

    SECURITY.md: "they sign the same request for the new run immediately, and nothing is lost".
    """
    monkeypatch.setattr(client, "is_trusted_peer", lambda *_: is_trusted)
    uplink = Uplink([ServerTarget(base_url=find_plain_url(server), token=TOKEN)], lambda: None)

    def report(number: int, *, full: bool) -> bool:
        """Whether the server requests a full heartbeat."""
        beat = json.loads(make_heartbeat(number, full=full))
        if number == 3:
            beat["samples"] = []  # confidential: the server must prove itself first
        outcome = uplink.execute_order(HeartbeatPost(beat))
        assert outcome.reply is not None, outcome.problem
        return outcome.reply.resync

    try:
        assert not report(1, full=True)
        assert not report(2, full=False)
        restart(server)
        assert report(3, full=False)
        assert not report(4, full=True)
        assert [job["job"] for job in server.get_items("jobs")] == ["victim"]
    finally:
        uplink.close()


def test_node_agent_survives_a_restart_of_its_server(
    server: Server, agent_testbed: AgentTestbed
) -> None:
    environ = agent_testbed.make_environ(HANGWATCH_TOKEN=TOKEN)
    agent_testbed.start_rank(0, "call", "sleep", env=environ)
    environ["HANGWATCH_URL"] = find_plain_url(server)
    agent_testbed.start_agent(env=environ)

    def find_rank() -> list[dict[str, object]]:
        return server.get_items("ranks", job="node-test")

    before = wait_for_value(find_rank, "the rank is reported")
    restart(server)
    restarted_at = time.monotonic()
    after = wait_for_value(find_rank, "the rank is reported again")
    assert time.monotonic() - restarted_at < 12.0, "no longer than the backoff without a server"
    assert [rank["pid"] for rank in after] == [rank["pid"] for rank in before]
