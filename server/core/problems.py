"""Errors as RFC 9457 problem documents: what is wrong, and the remedy."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi.responses import Response

MEDIA_TYPE = "application/problem+json"
PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {
            "type": "string",
            "description": "what is wrong and what to do about it, for people",
        },
    },
}


class Problem(Exception):
    """An answer other than success. ``detail`` is for people, with the remedy."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **extra_members: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.extra_members = extra_members

    @property
    def limits(self) -> tuple[str, ...]:
        """The name of the limit that the request exceeds, if that is the reason."""
        name = self.extra_members.get("limit")
        return () if name is None else (name,)

    def make_response(self) -> Response:
        """The answer, which ends the exception."""
        # The frames of its traceback hold the request's body, in cycles.
        self.__traceback__ = self.__context__ = None
        document = {
            "type": "about:blank",
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            **self.extra_members,
        }
        return Response(msgspec.json.encode(document), self.status, self.headers, MEDIA_TYPE)
