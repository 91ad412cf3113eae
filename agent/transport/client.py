"""An HTTP client for a server that may be anything: somebody else's process may listen at the
address in HANGWATCH_URL. A reply is read up to a size and within a time, whatever is sent.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import time
from typing import Any

import httpx

from hangwatch.protocol.local_peer import is_loopback_peer, is_trusted_peer

from .target import ServerTarget

KEEP_ALIVE_S = 60.0
MAX_REPLY_BYTES = 4 << 20  # a reply to a heartbeat holds commands for the ranks of one host
DEADLINE_FACTOR = 2.0  # of the whole exchange, relative to the longest pause within it


class UntrustedServerError(httpx.TransportError):
    """Another user of this machine listens at the server's address, and nothing was sent to it."""


class NewConnectionError(httpx.TransportError):
    """The request was not sent: it is confidential, and the server has not proven itself on this
    connection.
    """


class ReplyLimitError(httpx.TransportError):
    """The reply is larger than allowed, could be once it is decoded, or was not complete in time."""


class BoundedClient:
    """Sends one request at a time, and closes the connection if its reply exceeds a limit.

    It ignores the environment's proxies: a cluster's proxy leads out of the cluster. Its connection
    is kept open between heartbeats, which are far apart in a large job, but closed before the server
    would close it. Certificates are those of the system and of SSL_CERT_FILE; they are only loaded
    for https, since that takes memory.
    """

    def __init__(self, target: ServerTarget, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._target = target
        # Whether who listens at the other end of the connection is known: this user's or root's
        # process on this machine, or whoever proved that it knows the token.
        self.is_server_known = False
        self._is_confidential = False  # the current request
        self._socket: socket.socket | None = None
        self._deadline = math.inf  # of the current request; -inf: it was ended
        self._client = httpx.Client(
            headers={"Accept-Encoding": "identity"},
            timeout=timeout_s,
            trust_env=False,
            verify=ssl.create_default_context() if target.base_url.startswith("https:") else False,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE_S),
        )

    def close(self) -> None:
        self._client.close()

    def send_request(
        self,
        method: str,
        url: str,
        *,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        read_timeout_s: float | None = None,
        is_confidential: bool = False,
    ) -> httpx.Response:
        """The complete response. ``read_timeout_s`` limits a pause of the server; the whole exchange
        takes at most `DEADLINE_FACTOR` times as long, if `enforce_deadline` is called meanwhile.
        Raises httpx.HTTPError; NewConnectionError instead of sending a confidential request to a
        server that is not known.
        """
        if is_confidential and not self.is_server_known:
            raise NewConnectionError("the server is not known")
        self._is_confidential = is_confidential
        timeout = httpx.Timeout(self._timeout_s, read=read_timeout_s or self._timeout_s)
        request = self._client.build_request(
            method, url, content=content, headers=headers, timeout=timeout
        )
        request.extensions["trace"] = self._follow_connection
        self._deadline = time.monotonic() + DEADLINE_FACTOR * (timeout.read or self._timeout_s)
        try:
            response = self._client.send(request, stream=True)
            with contextlib.closing(response):
                body = self._read_body(response)
        except httpx.TransportError:
            if self._deadline == -math.inf:
                raise ReplyLimitError("the reply was not complete in time") from None
            raise
        finally:
            self._deadline = math.inf
        # As `Response.read` does it, which has no limit.
        return httpx.Response(
            response.status_code, headers=response.headers, content=body, request=request
        )

    def enforce_deadline(self) -> None:
        """Ends a request that takes too long; called from another thread.

        httpx limits each pause of the server only, so that a reply of one byte a second may last for
        ever.
        """
        if time.monotonic() < self._deadline:
            return
        self._deadline = -math.inf
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read_body(self, response: httpx.Response) -> bytes:
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise ReplyLimitError(f"a reply encoded as {coding[:20]!r}, which was not requested")
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise ReplyLimitError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
        return bytes(body)

    def _follow_connection(self, event: str, info: dict[str, Any]) -> None:
        """Called by httpcore; https://www.encode.io/httpcore/extensions/#trace."""
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        connection = info["return_value"].get_extra_info("socket")
        self._socket = connection
        if event.endswith("start_tls.complete"):
            return
        self.is_server_known = is_trusted_peer(connection, self._timeout_s)
        if self.is_server_known:
            return
        if is_loopback_peer(connection) and not self._target.token:
            info["return_value"].close()
            raise UntrustedServerError(
                "a process of another user listens there, and nothing is sent to it: start"
                " hangwatch-server as the user of the job, or give it a token with --token"
            )
        if self._is_confidential:
            info["return_value"].close()
            raise NewConnectionError("the server has not proven itself on this connection")
