"""Hooks of schemathesis, which signs its requests with the token in HANGWATCH_TOKEN as a node agent does."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import schemathesis
from requests import PreparedRequest
from requests.auth import AuthBase

from tests.harness.signing import RequestSigner


class SignedAuth(AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token
        self._signers: dict[str, RequestSigner] = {}  # the key is the server's address

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        parts = urlsplit(request.url or "")
        url = f"{parts.scheme}://{parts.netloc}"
        signer = self._signers.setdefault(url, RequestSigner(url, self._token))
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body
        if not isinstance(content, bytes):
            raise TypeError("schemathesis sends a body in parts")
        method = request.method or ""
        request.headers["Authorization"] = signer.make_header(method, parts.path, content)
        return request


schemathesis.auth.set_from_requests(  # type: ignore[attr-defined]  # its stubs declare a function
    SignedAuth(os.environ["HANGWATCH_TOKEN"])
)
