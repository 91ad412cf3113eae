"""Signs requests as node agents do, for tests that send them by themselves."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace

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


class RequestSigner:
    """Signs one request after the other for the server at ``url``."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._credential = Credential.from_token(token)
        self._server_time, self._fetched_at = UNKNOWN_TIME, 0.0

    def make_header(self, method: str, path: str, body: bytes) -> str:
        """The value of the Authorization header."""
        if self._server_time is UNKNOWN_TIME:
            self._server_time = fetch_server_time(self._url, self._credential)
            self._fetched_at = time.monotonic()
        passed_s = time.monotonic() - self._fetched_at
        now = replace(self._server_time, at_s=self._server_time.at_s + passed_s)
        return self._credential.sign_request(method, path, body, now).header


class SigningAuth(httpx.Auth):
    """Signs each request of a client of httpx."""

    requires_request_body = True

    def __init__(self, url: str, token: str) -> None:
        self._signer = RequestSigner(url, token)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        path = request.url.path
        header = self._signer.make_header(request.method, path, request.content)
        request.headers["Authorization"] = header
        yield request
