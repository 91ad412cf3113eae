"""The connections that each peer may have: with real sockets."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hangwatch.server.core import limits, peers
from hangwatch.server.core.peers import PeerConnections, PeerSocket, _identify_peer

FEW = 3


class Clients:
    """Connects as one user or another, which the kernel cannot be made to say here."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.refusals: Counter[str] = Counter()
        self.connections = PeerConnections(self.refusals)
        self.uid: int | None = 1000

    def connect(self) -> PeerSocket | None:
        """The server's end of a new connection of `uid`; None if it was refused."""
        self._stack.enter_context(socket.create_connection(self._listening.getsockname()))
        accepted, address = self._listening.accept()
        end = PeerSocket(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._stack.enter_context(end)
        return end if self.connections.admit(end, address) else None


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    few = replace(limits.UNAUTHENTICATED, maximum=FEW)
    monkeypatch.setattr(limits, "UNAUTHENTICATED", few)
    with contextlib.ExitStack() as stack:
        made = Clients(stack)
        monkeypatch.setattr(peers, "find_peer_uid", lambda _: made.uid)
        yield made


def test_peer_is_refused_alone(clients: Clients) -> None:
    """SECURITY.md: "another user of the server's machine, may have 256 connections on which no
    request was accepted yet".
    """
    first = [clients.connect() for _ in range(FEW)]
    assert all(first)
    assert clients.connect() is None
    assert clients.refusals == {limits.UNAUTHENTICATED.name: 1}
    clients.uid = 1001
    assert clients.connect(), "another user"
    clients.uid = None
    assert clients.connect(), "an address"
    clients.uid = 1000
    assert first[0] is not None and first[1] is not None
    first[0].close()
    assert clients.connect(), "one was closed"
    first[1].mark_authenticated()
    assert clients.connect(), "one is known"
    assert clients.connect() is None


def test_own_user_and_root_are_not_limited(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    for uid in (0, 4711):
        clients.uid = uid
        assert all(clients.connect() for _ in range(2 * FEW))


def test_idle_connection_makes_room_for_another(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY.md: "or close the oldest one if that has been idle for a second"."""
    first = [clients.connect() for _ in range(FEW)]
    monkeypatch.setattr(peers, "IDLE_AFTER_S", 0.0)
    assert clients.connect()
    oldest = first[0]
    assert oldest is not None and oldest.recv(1) == b"", "its end is read"
    assert clients.refusals == {limits.UNAUTHENTICATED.name: 1}


def test_known_connections_leave_files_for_others(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients.connections, "_max_open", FEW)
    for _ in range(FEW):
        end = clients.connect()
        assert end is not None
        end.mark_authenticated()
    assert clients.connect() is None
    assert clients.refusals == {limits.PEER_CONNECTIONS.name: 1}
    clients.uid = 1001
    assert clients.connect()


def test_addresses_of_one_host_are_one_peer() -> None:
    assert _identify_peer(None, ("10.0.0.1", 1)) == _identify_peer(
        None, ("::ffff:10.0.0.1", 2, 0, 0)
    )
    assert _identify_peer(None, ("10.0.0.1", 1)) != _identify_peer(None, ("10.0.0.2", 1))
    assert _identify_peer(None, ("fe80::1%eth0", 1, 0, 2)) == _identify_peer(
        None, ("fe80::2", 1, 0, 2)
    )
    assert _identify_peer(None, ("2001:db8:0:1::1", 1)) != _identify_peer(
        None, ("2001:db8:0:2::1", 1)
    )
    assert _identify_peer(0, ("10.0.0.1", 1)) == 0
