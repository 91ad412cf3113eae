"""An HTTP client for a server that may be anything, since somebody else's process may listen at the
address in HANGWATCH_URL, and the addresses of the servers.

A reply is read up to a size and within a time, whatever is sent. With a token, requests are signed,
and each reply proves that its sender knows the token as well: what one reply proves, says nothing of
the next one, since somebody may pass on some exchanges and invent others. HANGWATCH_URL may list
several servers, which share a database and so the jobs.

The client uses the standard library: that takes a quarter of the time of httpx, and 10 MB less
memory on each training host.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from hangwatch.protocol.heartbeat import PROOF_PATH
from hangwatch.protocol.local_peer import is_loopback_peer, is_trusted_peer
from hangwatch.protocol.request_signing import PROOF_HEADER, STALE_STATUS, UNKNOWN_TIME, Credential

KEEP_ALIVE_S = 60.0
MAX_REPLY_BYTES = 4 << 20  # a reply to a heartbeat holds commands for the ranks of one host
MAX_UNPROVEN_REPLY_BYTES = 64 << 10  # the limit of one whose commands are ignored
MAX_CPU_S = 0.5  # the CPU time of an exchange: a reply may come in millions of chunks
DEADLINE_FACTOR = 2.0  # the limit of a whole exchange, relative to that of a pause within it
_DEFAULT_PORTS = {"http": 80, "https": 443}


class TransportError(Exception):
    """There is no complete reply. The cause is the error below HTTP, if there was one."""


class NewConnectionError(TransportError):
    """A confidential request was not sent: the last reply on this connection proves nothing, or there
    was none.
    """


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def parse_json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)


class SignedClient:
    """Sends one request at a time, and closes the connection if its reply exceeds a limit. Requests
    are signed if there is a token, unless they have an Authorization header already.

    The environment's proxies are ignored: a cluster's proxy leads out of the cluster. The
    connection is kept open between heartbeats, which are far apart in a large job, but closed
    before the server would close it. Certificates are those of the system and of SSL_CERT_FILE;
    they are only loaded for https, since that takes memory.
    """

    def __init__(self, target: ServerTarget, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The credential signs requests, so that the token itself is not sent.
        self._credential = Credential.from_token(target.token) if target.token else None
        parts = urlsplit(target.base_url)
        self._path_prefix = parts.path
        # The server's time by its last proven reply, and when that came on this host's clock.
        self._server_time, self._server_time_at = UNKNOWN_TIME, 0.0
        # The last reply on this connection came from a process of this user or of root on this
        # machine, or proves that its sender knows the token. Earlier replies prove nothing of it.
        self.is_server_known = False
        self._is_trusted_peer = False  # such a process is at the other end
        self._deadline = math.inf  # the current request's; -inf if it was ended
        self._cpu_clock, self._cpu_limit_s = 0, math.inf  # the sending thread's
        self._idle_since = math.inf
        self._socket: socket.socket | None = None  # the current request's
        is_encrypted = parts.scheme == "https"
        connect = http.client.HTTPSConnection if is_encrypted else http.client.HTTPConnection
        self._connection = connect(target.host, target.port, timeout=timeout_s)

    def close(self) -> None:
        self._connection.close()

    def send_request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        read_timeout_s: float | None = None,
        is_confidential: bool = False,
    ) -> Reply:
        """The complete reply. ``path`` comes behind the server's address. ``read_timeout_s`` limits
        a pause of the server; the whole exchange takes at most `DEADLINE_FACTOR` times as long, if
        `enforce_deadline` is called meanwhile. Before a confidential request is sent, the last reply
        on the same connection must have proven itself. Raises TransportError.
        """
        timeout_s = read_timeout_s or self._timeout_s
        request = (method, path, body, headers or {}, timeout_s, is_confidential)
        try:
            reply = self._exchange(*request)
        except NewConnectionError:
            self._exchange("GET", PROOF_PATH, b"", {}, self._timeout_s, is_confidential=False)
            reply = self._exchange(*request)
        if reply.status == STALE_STATUS and self.is_server_known:
            # The server was restarted, or has not been contacted yet: nothing was applied, and its
            # reply gave the time for which the request must be signed.
            reply = self._exchange(*request)
        return reply

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        is_confidential: bool,
    ) -> Reply:
        """Raises TransportError, NewConnectionError if a confidential request was not sent."""
        signed = None
        if self._credential is not None and "Authorization" not in headers:
            passed_s = time.monotonic() - self._server_time_at
            server_time = replace(self._server_time, at_s=self._server_time.at_s + passed_s)
            signed = self._credential.sign_request(method, path, body, server_time)
            headers = {**headers, "Authorization": signed.header}
        if sys.platform == "linux":
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
            self._cpu_limit_s = time.thread_time() + MAX_CPU_S
        self._deadline = time.monotonic() + DEADLINE_FACTOR * timeout_s
        is_complete = False
        try:
            self._socket = self._open_connection(is_confidential)
            self._socket.settimeout(timeout_s)
            self._connection.request(
                method, self._path_prefix + path, body=body or None, headers=headers
            )
            response = self._connection.getresponse()
            coding = response.headers.get("content-encoding", "identity")
            if coding != "identity":
                raise TransportError(f"a reply encoded as {coding[:20]!r}, which was not requested")
            received = response.read(MAX_REPLY_BYTES + 1)
            if len(received) > MAX_REPLY_BYTES:
                raise TransportError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
            if response.length or self._deadline == -math.inf:
                raise http.client.IncompleteRead(received, response.length)
            is_complete = True
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            if self._deadline == -math.inf:
                raise TransportError("the reply was not complete in time") from None
            raise TransportError(str(error) or type(error).__name__) from error
        finally:
            self._deadline, self._socket = math.inf, None
            self._idle_since = time.monotonic()
            if not is_complete:
                self._connection.close()
        self.is_server_known = self._is_trusted_peer
        if self._credential is not None and signed is not None:
            proof = response.headers.get(PROOF_HEADER, "")
            proven_time = self._credential.verify_proof(signed, response.status, received, proof)
            if proven_time is not None:
                self.is_server_known = True
                self._server_time, self._server_time_at = proven_time, time.monotonic()
        if not self.is_server_known and len(received) > MAX_UNPROVEN_REPLY_BYTES:
            raise TransportError("a large reply of a server that has not proven itself")
        return Reply(response.status, response.headers, received)

    def enforce_deadline(self) -> None:
        """Ends a request that takes too long, or too much CPU time; called from another thread. A socket's
        timeout limits each pause of the server only: a reply of one byte a second may last for ever.
        """
        if self._deadline == math.inf:
            return
        is_expensive = time.clock_gettime(self._cpu_clock) > self._cpu_limit_s
        if is_expensive or time.monotonic() >= self._deadline:
            self.abort()

    def abort(self) -> None:
        """Ends the current request, if there is one; called from another thread."""
        self._deadline = -math.inf
        if (current := self._socket) is not None:
            with contextlib.suppress(OSError):
                current.shutdown(socket.SHUT_RDWR)

    def _open_connection(self, is_confidential: bool) -> socket.socket:
        """The open connection's socket; a new one's if the server has closed it or soon would."""
        opened: socket.socket | None = self._connection.sock
        if opened is not None and time.monotonic() - self._idle_since <= KEEP_ALIVE_S:
            poll = select.poll()
            poll.register(opened, select.POLLIN)
            if not poll.poll(0):  # the server has not closed it
                if is_confidential and not self.is_server_known:
                    raise NewConnectionError("the server's last reply did not prove itself")
                return opened
        self._connection.close()
        self._connection.connect()
        opened = self._connection.sock
        assert opened is not None
        self._is_trusted_peer = self.is_server_known = is_trusted_peer(opened, self._timeout_s)
        if not self.is_server_known and is_loopback_peer(opened) and self._credential is None:
            raise TransportError(
                "a process of another user listens there, and nothing is sent to it: start"
                " hangwatch-server as the user of the job, or give it a token with --token"
            )
        if is_confidential and not self.is_server_known:
            raise NewConnectionError("the server has not proven itself on this connection")
        return opened


class TargetError(ValueError):
    """HANGWATCH_URL is not the URL of a server. The message has an example; ``problem`` has none, and
    does not name the variable.
    """

    def __init__(self, url: str, problem: str) -> None:
        # A token is not shown, since messages end in logs.
        scheme, slashes, rest = url.rpartition("//")
        shown_url = scheme + slashes + rest.rpartition("@")[2]
        self.problem = f"{shown_url!r} {problem}"
        super().__init__(f"HANGWATCH_URL={self.problem}: an example is http://:TOKEN@master:8642")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """``base_url`` has no credentials and no trailing slash, and keeps a path prefix."""

    base_url: str
    token: str = field(default="", repr=False)

    @classmethod
    def from_url(cls, url: str, token: str = "") -> ServerTarget:
        """A token in the URL (``http://:TOKEN@host``) precedes ``token``. Raises TargetError."""
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise TargetError(url, f"is not a URL ({error})") from None
        host = parts.hostname or ""
        # http.client refuses such names as well, but much later.
        is_name = bool(host) and host.isprintable() and " " not in host
        if parts.scheme not in _DEFAULT_PORTS or not is_name or port == 0:
            raise TargetError(url, "is not the address of an http or https server")
        address = parts.netloc.rpartition("@")[2]
        base_url = f"{parts.scheme}://{address}{parts.path}".rstrip("/")
        url_token = unquote(parts.password or parts.username or "")
        return cls(base_url=base_url, token=url_token or token)

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.base_url)
        return parts.port or _DEFAULT_PORTS[parts.scheme]

    def __str__(self) -> str:
        return self.base_url


def parse_targets(urls: str, token: str = "") -> tuple[ServerTarget, ...]:
    """The servers of a list that is separated by commas. Raises TargetError."""
    listed = [url for url in urls.split(",") if url.strip()] or [urls]
    targets = [ServerTarget.from_url(url, token) for url in listed]
    return tuple(dict.fromkeys(targets))


def order_targets(targets: Sequence[ServerTarget], job: str) -> tuple[ServerTarget, ...]:
    """The servers in the order in which the node agents of a job try them, by rendezvous hashing:
    the same order on all hosts, and another one for another job.

    https://en.wikipedia.org/wiki/Rendezvous_hashing
    """
    weights = {
        target: hashlib.blake2b(f"{target.base_url} {job}".encode(), digest_size=8).digest()
        for target in targets
    }
    return tuple(sorted(targets, key=weights.__getitem__, reverse=True))
