"""Which user is at the other end of a connection within this machine: the kernel knows, so that no
secret has to be created, found or kept. Linux only.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from typing import Any

from hangwatch.model.ownership import is_trusted_uid

_SOCK_DIAG_BY_FAMILY = 20
_NETLINK_SOCK_DIAG = 4
_ESTABLISHED = 1
_ACCEPT_POLL_S = 0.005
_ALL_STATES = 0xFFFFFFFF
_ANY_COOKIE = b"\xff" * 8
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST = struct.Struct("=BBBBI")  # struct inet_diag_req_v2 without the socket's addresses
# struct inet_diag_msg: family, state, timer, retransmits, addresses (48 bytes), expires, rqueue,
# wqueue, uid, inode. See include/uapi/linux/inet_diag.h.
_REPLY = struct.Struct("=BBBB48xIIIII")


def find_peer_uid(connection: Any, accept_timeout_s: float = 0.0) -> int | None:
    """The effective user id that created the other end of a connected TCP socket; None if it is on
    another machine or closed already, or if the kernel does not say.

    The other end of a connection that its server has not accepted has no owner yet: the function waits
    up to ``accept_timeout_s`` for one. A process that closes its end right after it has sent something is
    not identified. The kernel attributes both to root.
    """
    try:
        if not is_loopback_peer(connection):
            return None
        here, there = connection.getsockname(), connection.getpeername()
        give_up_at = time.monotonic() + accept_timeout_s
        while (owner := _request_owner(connection.family, there, here)) is not None:
            uid, has_owner = owner
            if has_owner:
                return uid
            if time.monotonic() >= give_up_at:
                return None
            time.sleep(_ACCEPT_POLL_S)
    except (OSError, ValueError, AttributeError, struct.error):
        pass
    return None


def is_loopback_peer(connection: Any) -> bool:
    """Whether the peer of a connected TCP socket has a loopback address. Raises OSError."""
    return ipaddress.ip_address(connection.getpeername()[0].partition("%")[0]).is_loopback


def is_trusted_peer(connection: Any, accept_timeout_s: float) -> bool:
    """Whether this user or root is at the other end of a connected TCP socket, on this machine."""
    return is_trusted_uid(find_peer_uid(connection, accept_timeout_s))


def _request_owner(
    family: int, local: tuple[Any, ...], remote: tuple[Any, ...]
) -> tuple[int, bool] | None:
    """The user of the established connection with these addresses, and whether a process has it."""
    addresses = b"".join(
        socket.inet_pton(family, address[0].partition("%")[0]).ljust(16, b"\0")
        for address in (local, remote)
    )
    ports = struct.pack("!HH", local[1], remote[1])
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request += ports + addresses + struct.pack("=I", 0) + _ANY_COOKIE
    size = _HEADER.size + len(request)
    header = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, 1, 1, 0)  # flags: NLM_F_REQUEST
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + request)
        reply = kernel.recv(4096)
    if _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # NLMSG_ERROR: there is no such socket, or not this kernel module
    _, state, _, _, _, _, _, uid, inode = _REPLY.unpack_from(reply, _HEADER.size)
    return (uid, inode != 0) if state == _ESTABLISHED else None
