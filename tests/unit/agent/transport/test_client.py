"""A server that sends endless or slow replies costs the node agent neither memory nor time."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from hangwatch.agent.node.reporting.uplink import HeartbeatOutcome, HeartbeatPost, Uplink
from hangwatch.agent.transport import client
from hangwatch.agent.transport.client import (
    DEADLINE_FACTOR,
    MAX_REPLY_BYTES,
    MAX_UNPROVEN_REPLY_BYTES,
    NewConnectionError,
    ServerTarget,
    SignedClient,
    TransportError,
)
from hangwatch.protocol.heartbeat import HEARTBEAT_PATH
from hangwatch.protocol.request_signing import (
    PROOF_HEADER,
    UNKNOWN_TIME,
    Credential,
    ServerTime,
    SignedRequest,
)
from tests.simulation.http_receiver import (
    HttpReceiver,
    HttpReply,
    ReceivedRequest,
    make_json_reply,
)

TIMEOUT_S = 0.5
CHUNK = b"x" * 65536


def pack_zeros() -> bytes:
    """64 MiB, in 64 KiB."""
    packer = zlib.compressobj(wbits=31)
    return b"".join([packer.compress(bytes(1 << 20)) for _ in range(64)]) + packer.flush()


ZEROS = pack_zeros()


@contextlib.contextmanager
def hostile_server(send_reply: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers each request by ``send_reply``."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    send_reply(connection)

    thread = threading.Thread(target=serve, daemon=True)
    with listening:
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        thread.join(10)


def send_endless_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
    while True:
        connection.sendall(CHUNK)


def send_endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        connection.sendall(CHUNK)


def send_compressed_zeros(connection: socket.socket) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(ZEROS)}\r\n\r\n"
    connection.sendall(head.encode() + ZEROS)


def trickle_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    trickle(connection)


def trickle_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    trickle(connection)


def trickle(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(TIMEOUT_S / 5)


@pytest.mark.parametrize(
    "send_reply",
    [
        send_endless_body,
        send_endless_headers,
        send_compressed_zeros,
        trickle_body,
        trickle_headers,
    ],
)
def test_hostile_reply_is_bounded(send_reply: Callable[[socket.socket], None]) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hostile_server(send_reply) as url:
        uplink = Uplink([ServerTarget(base_url=url)], lambda: None, timeout_s=TIMEOUT_S)
        started_at = time.monotonic()
        uplink.post_heartbeat({"host": "n"})
        outcome = wait_for_outcome(uplink)
        uplink.close()
    assert outcome.reply is None and outcome.problem
    assert time.monotonic() - started_at < 5 * DEADLINE_FACTOR * TIMEOUT_S
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after_kib - before_kib < 4 * MAX_REPLY_BYTES / 1024


def wait_for_outcome(uplink: Uplink) -> HeartbeatOutcome:
    """Waits as the node agent's loop does."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        outcome = uplink.take_outcome(0.05)
        if outcome is not None:
            return outcome
    raise AssertionError("no outcome within 30 s")


def test_uplink_works_after_a_hostile_reply() -> None:
    replies = [trickle_headers, send_valid_reply]
    with hostile_server(lambda connection: replies.pop(0)(connection)) as url:
        uplink = Uplink([ServerTarget(base_url=url)], lambda: None, timeout_s=TIMEOUT_S)
        uplink.post_heartbeat({"host": "n"})
        assert wait_for_outcome(uplink).reply is None
        uplink.post_heartbeat({"host": "n"})
        assert wait_for_outcome(uplink).reply is not None
        uplink.close()


def send_valid_reply(connection: socket.socket) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"interval_s":1.5}')


class SometimesSigningServer(HttpReceiver):
    """Signs its replies as long as `signs`."""

    signs = True
    status = 200
    document: Mapping[str, object] = {}

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        headers = {} if self.status == 200 else {"Content-Type": "application/problem+json"}
        reply = make_json_reply(self.document, self.status, **headers)
        signed = SignedRequest.from_header(request.headers["authorization"])
        if signed is None or not self.signs:
            return reply
        credential = Credential.from_token("secret")
        proof = credential.make_proof(signed, reply.status, reply.body, ServerTime("run", 7.0))
        return replace(reply, headers={**reply.headers, PROOF_HEADER: proof})


def test_stacks_are_sent_only_after_a_signed_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """SECURITY.md: "stacks if it has proven itself", "after the last reply on the same connection was
    signed".
    """
    monkeypatch.setattr(client, "is_trusted_peer", lambda *_: False)
    with SometimesSigningServer() as server:
        target = ServerTarget(base_url=server.url, token="secret")
        with contextlib.closing(SignedClient(target, TIMEOUT_S)) as signing:

            def send_stacks(stacks: bytes) -> None:
                signing.send_request("POST", HEARTBEAT_PATH, stacks, is_confidential=True)

            send_stacks(b"first")
            server.signs = False
            send_stacks(b"second")  # the server is known by its last reply
            assert not signing.is_server_known
            with pytest.raises(NewConnectionError):
                send_stacks(b"third")
    assert [request.body for request in server.requests] == [b"", b"first", b"second", b""]


def test_long_reply_is_accepted_from_a_proven_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "is_trusted_peer", lambda *_: False)
    with SometimesSigningServer() as server:
        server.document = {"text": "x" * MAX_UNPROVEN_REPLY_BYTES}
        target = ServerTarget(base_url=server.url, token="secret")
        with contextlib.closing(SignedClient(target, TIMEOUT_S)) as signing:
            assert signing.send_request("POST", HEARTBEAT_PATH, b"{}").status == 200
            server.signs = False
            with pytest.raises(TransportError, match="has not proven itself"):
                signing.send_request("POST", HEARTBEAT_PATH, b"{}")


def test_only_a_signed_refusal_names_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever passes requests on could otherwise have a process left out."""
    monkeypatch.setattr(client, "is_trusted_peer", lambda *_: False)
    error = {"at": "body", "message": "Expected `int` >= 0 - at `$.processes[1].identity.rank`"}
    with SometimesSigningServer() as server:
        server.status, server.document = 422, {"detail": "not a heartbeat", "errors": [error]}
        uplink = Uplink([ServerTarget(base_url=server.url, token="secret")], lambda: None)
        beat = HeartbeatPost({"processes": [{"key": "1-1"}, {"key": "2-1"}]})
        assert uplink.execute_order(beat).refused_key == "2-1"
        server.signs = False
        outcome = uplink.execute_order(beat)
        assert (outcome.refused_key, outcome.is_refused) == ("", True)
        uplink.close()


def test_only_a_signed_refusal_gives_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is signed again for the run in the refusal, once."""
    monkeypatch.setattr(client, "is_trusted_peer", lambda *_: False)
    for signs, runs in ((True, ["", "run"]), (False, [""])):
        with SometimesSigningServer() as server:
            server.signs, server.status = signs, 425
            target = ServerTarget(base_url=server.url, token="secret")
            with contextlib.closing(SignedClient(target, TIMEOUT_S)) as signing:
                assert signing.send_request("POST", HEARTBEAT_PATH, b"{}").status == 425
        times = [
            ServerTime.from_text(signed.time_text) or UNKNOWN_TIME
            for request in server.requests
            if (signed := SignedRequest.from_header(request.headers["authorization"]))
        ]
        assert [time.run for time in times] == runs
        assert not signs or 7.0 <= times[1].at_s < 7.0 + TIMEOUT_S
