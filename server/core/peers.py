"""Whose connections the server has: a peer that opens thousands takes none from the others.

A peer is a user of this machine, as the kernel says, or else an address; of IPv6, a network of 64
bits, since a host may use all addresses of one. This user and root are not limited. Nor are requests
on a connection that has shown, by one that was accepted, that it is a node agent's or a person's,
unless these connections are so many that others would lack open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.ownership import is_trusted_uid
from hangwatch.protocol.local_peer import find_peer_uid

from . import limits

# An unauthenticated connection without a request for so long is closed if the peer opens another one.
IDLE_AFTER_S = 1.0


@dataclass(slots=True)
class _Peer:
    key: int | bytes
    open_count: int = 0
    # The unauthenticated connections and when they were made, the oldest first
    unauthenticated: dict[PeerSocket, float] = field(default_factory=dict)


class PeerSocket(socket.socket):
    """The server's end of a connection. ``uid`` is the user at the other end, if that is on this
    machine.
    """

    __slots__ = ("is_authenticated", "peer", "peers", "uid")  # there may be 12,500 of them

    def __init__(self, family: int, kind: int, protocol: int, descriptor: int) -> None:
        super().__init__(family, kind, protocol, descriptor)
        self.uid: int | None = None
        self.is_authenticated = False  # a request on it was accepted
        self.peer: _Peer | None = None  # None: not limited
        self.peers: PeerConnections | None = None  # which has it until it is closed

    def close(self) -> None:
        if self.peers is not None:
            self.peers.forget(self)
        super().close()

    def mark_authenticated(self) -> None:
        self.is_authenticated = True
        if self.peer is not None:
            self.peer.unauthenticated.pop(self, None)


class PeerConnections:
    """The connections of each peer. ``refusals`` counts by the limit's name those that are closed."""

    def __init__(self, refusals: Counter[str]) -> None:
        self._refusals = refusals
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = min(limits.PEER_CONNECTIONS.maximum, files // 2)
        self._connections: dict[int, PeerSocket] = {}  # by file descriptor
        self._peers: dict[int | bytes, _Peer] = {}

    def admit(self, connection: PeerSocket, address: Any) -> bool:
        """Adds a new connection from an address; returns False if it must be closed."""
        connection.uid = find_peer_uid(connection)
        if not is_trusted_uid(connection.uid):
            key = _identify_peer(connection.uid, address)
            peer = self._peers.get(key) or _Peer(key)
            now = time.monotonic()
            limit = self._find_exceeded(peer, now)
            if limit is not None:
                self._refusals[limit.name] += 1
                return False
            peer.open_count += 1
            peer.unauthenticated[connection] = now
            self._peers[key] = connection.peer = peer
        connection.peers = self
        self._connections[connection.fileno()] = connection
        return True

    def _find_exceeded(self, peer: _Peer, now: float) -> limits.Limit | None:
        """The limit that one more connection of the peer would exceed. Makes room if its oldest one is
        idle: otherwise somebody could keep all others with the same address out.
        """
        if peer.open_count >= self._max_open:
            return limits.PEER_CONNECTIONS
        if len(peer.unauthenticated) < limits.UNAUTHENTICATED.maximum:
            return None
        oldest, made_at = next(iter(peer.unauthenticated.items()))
        if now - made_at < IDLE_AFTER_S:
            return limits.UNAUTHENTICATED
        del peer.unauthenticated[oldest]
        self._refusals[limits.UNAUTHENTICATED.name] += 1
        with contextlib.suppress(OSError):  # the other end is gone
            oldest.shutdown(socket.SHUT_RDWR)  # asyncio reads the end, and closes it
        return None

    def find(self, transport: asyncio.BaseTransport) -> PeerSocket | None:
        """The connection that a transport of asyncio uses; None if it was not admitted here."""
        end = transport.get_extra_info("socket")
        return None if end is None else self._connections.get(end.fileno())

    def forget(self, connection: PeerSocket) -> None:
        """Removes a connection that is about to be closed."""
        del self._connections[connection.fileno()]
        peer = connection.peer
        connection.peer = None
        connection.peers = None
        if peer is not None:
            peer.unauthenticated.pop(connection, None)
            peer.open_count -= 1
            if not peer.open_count:
                del self._peers[peer.key]


def _identify_peer(uid: int | None, address: Any) -> int | bytes:
    """A user's id, or the part of an address that stands for a host."""
    if uid is not None:
        return uid
    parsed = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)  # as a socket for both versions shows IPv4
    return (mapped or parsed).packed[:8]
