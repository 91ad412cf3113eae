"""Who may read: with a token set, nothing but the health checks and the login page is served without it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from . import problems
from .live import Live
from .rendering import page, stylesheet

COOKIE = "hangwatch"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", "/login/style.css"})
FORM_MAX = 4096  # bytes


class Access:
    """ASGI middleware that lets in who presents the token: as bearer, as Basic password, or by the login's cookie."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._token is None or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if presented(headers, self._token):
            return await self._app(scope, receive, send)
        answer = _to_login(scope) if _is_browser(scope, headers) else _refusal()
        await answer(scope, receive, send)


def presented(headers: Headers, token: str) -> bool:
    """Whether a request carries the token."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and _same(value, token):
        return True
    if scheme.lower() == "basic":
        try:
            _, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        return _same(password, token)
    return _same(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), session(token))


def session(token: str) -> str:
    """The cookie's value: it proves the token without being it, and survives a restart of the server."""
    return hmac.new(token.encode(), b"hangwatch session", hashlib.sha256).hexdigest()


def router(live: Live) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/login")
    async def form(next: str = "/") -> Response:
        return page("login.html", next=_local(next), wrong=False, signed_out=True)

    @routes.get("/login/style.css")
    async def style() -> Response:
        return stylesheet()

    @routes.post("/login")
    async def login(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > FORM_MAX:
                raise problems.Problem(413, f"a login form holds at most {FORM_MAX} bytes")
        told = parse_qs(body.decode("utf-8", "replace"))
        target = _local(told.get("next", ["/"])[0])
        if live.token is not None and not _same(told.get("token", [""])[0].strip(), live.token):
            return page("login.html", answer=401, next=target, wrong=True, signed_out=True)
        answer = RedirectResponse(target, status_code=303)
        if live.token is not None:
            secure = request.url.scheme == "https"
            answer.set_cookie(COOKIE, session(live.token), max_age=30 * 86400, httponly=True, samesite="lax", secure=secure)
        return answer

    return routes


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _local(target: str) -> str:
    """A path of this server: anything else would make the login page a door to other sites."""
    plain = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if plain else "/"


def _is_browser(scope: Scope, headers: Headers) -> bool:
    return scope["method"] in ("GET", "HEAD") and "text/html" in headers.get("accept", "")


def _to_login(scope: Scope) -> Response:
    query = scope["query_string"].decode("latin-1")
    target = scope["path"] + (f"?{query}" if query else "")
    return RedirectResponse(f"/login?next={quote(target, safe='/')}", status_code=303)


def _refusal() -> Response:
    return problems.document(
        401,
        "this server asks for its token: send it as 'Authorization: Bearer TOKEN', or put it in the URL as http://:TOKEN@HOST:PORT; "
        "the server printed it at its start unless it was given with --token",
        {"WWW-Authenticate": 'Bearer realm="hangwatch"'},
    )
