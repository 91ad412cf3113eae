"""Errors as RFC 9457 problem documents: what is wrong, and what to do about it."""

from __future__ import annotations

import http
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..web.rendering import page

MEDIA_TYPE = "application/problem+json"
OURS = "hangwatch-server failed at this request; its stderr says more"
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


def install(app: FastAPI) -> None:
    """Makes every error of ``app`` such a document, or a page with the same words for a person at a
    browser.
    """

    @app.exception_handler(Problem)
    async def on_problem(request: Request, error: Problem) -> Response:
        return _answer(request, error.status, error.detail, error.headers, **error.more)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        detail = {
            404: f"there is nothing at {request.url.path}; /docs lists what there is",
            405: f"{request.url.path} does not take {request.method}; /docs lists what it takes",
        }.get(error.status_code, str(error.detail))
        return _answer(request, error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return _answer(
            request,
            422,
            "the request is not what /docs describes; errors says where",
            errors=invalid(error.errors()),
        )

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return _answer(request, 500, OURS)


def _answer(
    request: Request,
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    if "text/html" not in request.headers.get("accept", "") or request.url.path.startswith("/api/"):
        return document(status, detail, headers, **more)
    return page(
        "error.html",
        answer=status,
        title=http.HTTPStatus(status).phrase,
        detail=detail,
        more=more.get("errors", []),
    )
