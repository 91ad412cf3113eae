"""Signs requests as node agents do, for tests that send them by themselves."""

from __future__ import annotations

import httpx

from hangwatch.protocol.heartbeat import PROOF_PATH
from hangwatch.protocol.request_signing import (
    PROOF_HEADER,
    UNKNOWN_TIME,
    Credential,
    ServerTime,
)


def fetch_server_time(url: str, credential: Credential) -> ServerTime:
    """The run and the time of a server; `UNKNOWN_TIME` if it does not know the credential's key."""
    signed = credential.sign_request("GET", PROOF_PATH, b"", UNKNOWN_TIME)
    reply = httpx.get(f"{url}{PROOF_PATH}", headers={"Authorization": signed.header})
    proof = reply.headers.get(PROOF_HEADER, "")
    proven = credential.verify_proof(signed, reply.status_code, reply.content, proof)
    return proven or UNKNOWN_TIME


def post_signed(url: str, path: str, body: bytes, credential: Credential) -> httpx.Response:
    """The reply to a signed request, which no other one has had."""
    signed = credential.sign_request("POST", path, body, fetch_server_time(url, credential))
    return httpx.post(f"{url}{path}", content=body, headers={"Authorization": signed.header})
