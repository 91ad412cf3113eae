"""Node agents and the server prove to each other that they know the token, without sending it: another
process that listens at the server's address learns neither the token nor a stack, and cannot give
orders.

A request is signed over its method, path and body, and over the run and the time of the server for
which it is meant, so that a recorded one is refused later, on another path and by a server that was
restarted. A reply is signed over its status and body and the request's nonce, and names the server's
run and time (HMAC-SHA256). The time is on the server's own clock: the clocks of hosts need not agree.
A node agent that does not know the run, or a former one, is refused with `STALE_STATUS`, and signs
the same request again by the run and the time in that refusal, which is signed like any reply.

A job's token is derived from the server's, so that the server keeps no list of them, and one job
cannot report for another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import secrets
from dataclasses import dataclass

SCHEME = "Hangwatch"  # the scheme of the Authorization header
PROOF_HEADER = "Hangwatch-Proof"  # a header of the reply
STALE_STATUS = 425  # RFC 8470: the request might be replayed
# A request is accepted from this long before the time for which it was signed until this long after:
# node agents give a request up in that time, and clocks drift apart by less between two replies.
MAX_REQUEST_LEAD_S, MAX_REQUEST_AGE_S = 1.0, 30.0
JOB_TOKEN_PREFIX = "hwjob."
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class ServerTime:
    """A moment of one run of a server. ``at_s`` is on the server's monotonic clock."""

    run: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.run}-{self.at_s:.3f}"

    @classmethod
    def from_text(cls, text: str) -> ServerTime | None:
        """The moment that `str` wrote; None if the text is not one."""
        run, _, at_text = text.partition("-")
        try:
            at_s = float(at_text)
        except ValueError:
            return None
        return cls(run, at_s) if math.isfinite(at_s) else None

    def accepts(self, signed_for: ServerTime | None) -> bool:
        """Whether a request that was signed for another moment is accepted at this one."""
        if signed_for is None or signed_for.run != self.run:
            return False
        return -MAX_REQUEST_LEAD_S <= self.at_s - signed_for.at_s <= MAX_REQUEST_AGE_S


UNKNOWN_TIME = ServerTime("", 0.0)  # no server accepts requests for it


@dataclass(frozen=True, slots=True)
class Credential:
    """What a node agent signs with. ``job`` is the only job it may report; None: any job."""

    key: bytes
    job: str | None = None

    @classmethod
    def from_token(cls, token: str) -> Credential:
        """The credential in a token, which is the server's or a job's."""
        if token.startswith(JOB_TOKEN_PREFIX):
            name, dot, key = token.removeprefix(JOB_TOKEN_PREFIX).partition(".")
            job = _decode_name(name)
            if dot and job is not None:
                return cls(key.encode(), job)
        return cls(token.encode())

    def sign_request(self, method: str, path: str, body: bytes, time: ServerTime) -> SignedRequest:
        """The signature of a request whose ``body`` is sent as it is here, after compression. ``path``
        is without the prefix of a proxy.
        """
        nonce = secrets.token_hex(_NONCE_BYTES)
        digest = hashlib.sha256(body).hexdigest()
        mac = self._make_request_mac(method, path, str(time), nonce, digest)
        return SignedRequest(self.job, str(time), nonce, digest, mac)

    def verify_request(self, request: SignedRequest, method: str, path: str) -> bool:
        """Whether the sender knows the key. The caller must check that the body has the digest, and
        that the request is meant for this time.
        """
        mac = self._make_request_mac(method, path, request.time_text, request.nonce, request.digest)
        return hmac.compare_digest(mac, request.mac)

    def make_proof(self, request: SignedRequest, status: int, body: bytes, time: ServerTime) -> str:
        """The value of `PROOF_HEADER` for the reply to a request."""
        return f"{time}:{self._make_reply_mac(request, status, body, str(time))}"

    def verify_proof(
        self, request: SignedRequest, status: int, body: bytes, proof: str
    ) -> ServerTime | None:
        """The server's time if the sender of a reply to ``request`` knows the key, else None."""
        time_text, _, mac = proof.partition(":")
        expected = self._make_reply_mac(request, status, body, time_text)
        if not hmac.compare_digest(expected.encode(), mac.encode()):
            return None
        return ServerTime.from_text(time_text)

    def _make_request_mac(self, *parts: str) -> str:
        return self._make_mac("\n".join(("hangwatch request", *parts)).encode())

    def _make_reply_mac(self, request: SignedRequest, status: int, body: bytes, time: str) -> str:
        return self._make_mac(
            f"hangwatch reply\n{request.nonce}\n{time}\n{status}\n".encode() + body
        )

    def _make_mac(self, message: bytes) -> str:
        return hmac.digest(self.key, message, "sha256").hex()


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The signature of a request. ``digest`` is the SHA-256 of its body, in hexadecimal."""

    job: str | None
    time_text: str  # the `ServerTime` for which it is meant
    nonce: str
    digest: str
    mac: str

    @property
    def header(self) -> str:
        """The value of the Authorization header."""
        name = "" if self.job is None else _encode_name(self.job)
        return f"{SCHEME} {name}:{self.time_text}:{self.nonce}:{self.digest}:{self.mac}"

    @classmethod
    def from_header(cls, value: str) -> SignedRequest | None:
        """The signature in an Authorization header; None if it has none."""
        scheme, _, rest = value.partition(" ")
        parts = rest.split(":")
        if scheme.lower() != SCHEME.lower() or len(parts) != 5 or not rest.isascii():
            return None
        name, *signature = parts
        job = _decode_name(name) if name else None
        if name and job is None:
            return None
        return cls(job, *signature)

    def has_body(self, body: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.digest)


def derive_job_token(token: str, job: str) -> str:
    """The token with which a job reports itself, and no other job, to the server with ``token``."""
    key = hmac.digest(token.encode(), b"hangwatch job\n" + job.encode(), "sha256").hex()
    return f"{JOB_TOKEN_PREFIX}{_encode_name(job)}.{key}"


def may_report_job(allowed: str | None, job: str) -> bool:
    """Whether a credential for ``allowed`` covers ``job``: the job itself, and the jobs that its ranks
    start, which are named JOB/ADDRESS:PORT.
    """
    return allowed is None or job == allowed or job.startswith(f"{allowed}/")


def _encode_name(job: str) -> str:
    return base64.urlsafe_b64encode(job.encode()).decode().rstrip("=")


def _decode_name(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return None
