"""Error responses: a problem document for programs, a page for browsers."""

from __future__ import annotations

import http
from collections import Counter

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..core.problems import Problem, describe_validation_errors
from .rendering import render_page

INTERNAL_ERROR_DETAIL = "hangwatch-server failed on this request; see its stderr"


def install_error_handlers(app: FastAPI, refusals: Counter[str]) -> None:
    """Makes ``app`` answer every error with a problem document, or with a page with the same text in
    a browser. ``refusals`` counts the requests that exceed a limit, by its name.
    """

    @app.exception_handler(Problem)
    async def handle_problem(request: Request, error: Problem) -> Response:
        refusals.update(error.limits)
        return _make_error_response(request, error)

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        detail = {
            404: f"{request.url.path} does not exist; /docs lists the API",
            405: f"{request.url.path} does not accept {request.method}; /docs lists the methods",
        }.get(error.status_code, str(error.detail))
        return _make_error_response(
            request, Problem(error.status_code, detail, headers=error.headers)
        )

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_request(request: Request, error: RequestValidationError) -> Response:
        detail = "the request does not match its description in /docs; see errors"
        errors = describe_validation_errors(error.errors())
        return _make_error_response(request, Problem(422, detail, errors=errors))

    @app.exception_handler(Exception)
    async def handle_bug(request: Request, error: Exception) -> Response:
        return _make_error_response(request, Problem(500, INTERNAL_ERROR_DETAIL))


def _make_error_response(request: Request, problem: Problem) -> Response:
    if "text/html" not in request.headers.get("accept", "") or request.url.path.startswith("/api/"):
        return problem.make_response()
    return render_page(
        "error.html",
        status_code=problem.status,
        title=http.HTTPStatus(problem.status).phrase,
        detail=problem.detail,
        more=problem.extra_members.get("errors", []),
    )
