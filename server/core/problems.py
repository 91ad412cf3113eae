"""Errors as RFC 9457 problem documents: what is wrong, and what to do about it."""

from __future__ import annotations

import http
import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

MEDIA_TYPE = "application/problem+json"


SCHEMA = {
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
    """An answer other than success. ``detail`` is for people, with the remedy; ``more`` are further
    members.
    """

    def __init__(
        self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.more = status, detail, headers, more


def body(status: int, detail: str, **more: Any) -> bytes:
    told = {
        "type": "about:blank",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        **more,
    }
    return json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def document(
    status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    return Response(
        body(status, detail, **more),
        status_code=status,
        headers=dict(headers or {}),
        media_type=MEDIA_TYPE,
    )


def invalid(errors: Any) -> list[dict[str, Any]]:
    """pydantic's errors without the input: that may be large, or secret."""
    return [{"at": ".".join(map(str, e["loc"])), "message": e["msg"]} for e in list(errors)[:20]]
