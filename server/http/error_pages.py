"""How errors are answered: a problem document for programs, a page for a person at a browser."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..core.problems import Problem, describe_validation_errors, make_problem_response
from .rendering import render_page

INTERNAL_ERROR_DETAIL = "hangwatch-server failed at this request; its stderr says more"


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of ``app`` such a document, or a page with the same words for a person at a
    browser.
    """

    @app.exception_handler(Problem)
    async def on_problem(request: Request, error: Problem) -> Response:
        return _make_error_response(
            request, error.status, error.detail, error.headers, **error.extra_members
        )

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        detail = {
            404: f"there is nothing at {request.url.path}; /docs lists what there is",
            405: f"{request.url.path} does not take {request.method}; /docs lists what it takes",
        }.get(error.status_code, str(error.detail))
        return _make_error_response(request, error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return _make_error_response(
            request,
            422,
            "the request is not what /docs describes; errors says where",
            errors=describe_validation_errors(error.errors()),
        )

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return _make_error_response(request, 500, INTERNAL_ERROR_DETAIL)


def _make_error_response(
    request: Request,
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **extra_members: Any,
) -> Response:
    if "text/html" not in request.headers.get("accept", "") or request.url.path.startswith("/api/"):
        return make_problem_response(status, detail, headers, **extra_members)
    return render_page(
        "error.html",
        status_code=status,
        title=http.HTTPStatus(status).phrase,
        detail=detail,
        more=extra_members.get("errors", []),
    )
