"""Hooks of schemathesis, which signs its requests with the token in HANGWATCH_TOKEN as a node agent does."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import schemathesis
from requests import PreparedRequest
from requests.auth import AuthBase

from hangwatch.protocol.request_signing import Credential
from tests.harness.signing import fetch_server_time

_CREDENTIAL = Credential.from_token(os.environ["HANGWATCH_TOKEN"])


class SignedAuth(AuthBase):
    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        parts = urlsplit(request.url or "")
        body = request.body or b""
        if isinstance(body, str):
            body = body.encode()
        server_time = fetch_server_time(f"{parts.scheme}://{parts.netloc}", _CREDENTIAL)
        signed = _CREDENTIAL.sign_request(request.method or "", parts.path, body, server_time)
        request.headers["Authorization"] = signed.header
        return request


schemathesis.auth.set_from_requests(SignedAuth())
