"""Node agents and the server prove to each other that they know the token, without sending it: another
process that listens at the server's address learns neither the token nor a stack, and cannot give
orders.

A request is signed over its body, a reply over its body and the request's nonce (HMAC-SHA256). A
job's token is derived from the server's, so that the server keeps no list of them, and one job cannot
report for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass

SCHEME = "Hangwatch"  # the scheme of the Authorization header
PROOF_HEADER = "Hangwatch-Proof"  # a header of the reply
_JOB_TOKEN_PREFIX = "hwjob."
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Credential:
    """What a node agent signs with. ``job`` is the only job it may report; None: any job."""

    key: bytes
    job: str | None = None

    @classmethod
    def from_token(cls, token: str) -> Credential:
        """The credential in a token, which is the server's or a job's."""
        if token.startswith(_JOB_TOKEN_PREFIX):
            name, dot, key = token.removeprefix(_JOB_TOKEN_PREFIX).partition(".")
            job = _decode_name(name)
            if dot and job is not None:
                return cls(key.encode(), job)
        return cls(token.encode())

    def sign_request(self, body: bytes) -> SignedRequest:
        """The signature of a request whose ``body`` is sent as it is here, after compression."""
        nonce = secrets.token_hex(_NONCE_BYTES)
        digest = hashlib.sha256(body).hexdigest()
        return SignedRequest(
            self.job, nonce, digest, self._make_mac("request", nonce, digest.encode())
        )

    def verify_request(self, request: SignedRequest) -> bool:
        """Whether the sender knows the key. The caller must check that the body has the digest."""
        mac = self._make_mac("request", request.nonce, request.digest.encode())
        return hmac.compare_digest(mac, request.mac)

    def make_proof(self, request: SignedRequest, body: bytes) -> str:
        """The value of `PROOF_HEADER` for the reply ``body`` to a request."""
        return self._make_mac("reply", request.nonce, body)

    def verify_proof(self, request: SignedRequest, body: bytes, proof: str) -> bool:
        """Whether the sender of a reply to ``request`` knows the key."""
        made = self.make_proof(request, body)
        return hmac.compare_digest(made.encode(), proof.encode())

    def _make_mac(self, purpose: str, nonce: str, content: bytes) -> str:
        message = f"hangwatch {purpose}\n{nonce}\n".encode() + content
        return hmac.digest(self.key, message, "sha256").hex()


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The signature of a request. ``digest`` is the SHA-256 of its body, in hexadecimal."""

    job: str | None
    nonce: str
    digest: str
    mac: str

    @property
    def header(self) -> str:
        """The value of the Authorization header."""
        name = "" if self.job is None else _encode_name(self.job)
        return f"{SCHEME} {name}:{self.nonce}:{self.digest}:{self.mac}"

    @classmethod
    def from_header(cls, value: str) -> SignedRequest | None:
        """The signature in an Authorization header; None if it has none."""
        scheme, _, rest = value.partition(" ")
        parts = rest.split(":")
        if scheme.lower() != SCHEME.lower() or len(parts) != 4 or not rest.isascii():
            return None
        name, nonce, digest, mac = parts
        job = _decode_name(name) if name else None
        if name and job is None:
            return None
        return cls(job, nonce, digest, mac)

    def has_body(self, body: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.digest)


def derive_job_token(token: str, job: str) -> str:
    """The token with which a job reports itself, and no other job, to the server with ``token``."""
    key = hmac.digest(token.encode(), b"hangwatch job\n" + job.encode(), "sha256").hex()
    return f"{_JOB_TOKEN_PREFIX}{_encode_name(job)}.{key}"


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
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
