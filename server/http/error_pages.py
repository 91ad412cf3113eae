"""How errors are answered: a problem document for programs, a page for a person at a browser."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..core.problems import Problem, document, invalid
from .rendering import page

OURS = "hangwatch-server failed at this request; its stderr says more"


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
