"""Who may use the server: only the health checks and the login page are served to everybody.

If a token is set, everything else needs it; the login limits how many wrong ones may be tried.
Without a token, the server listens on this machine only, answers only to the user who started it
and to root, and accepts only this machine's host names. No page of another site may act here.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import ipaddress
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangwatch.model.ownership import is_trusted_uid
from hangwatch.protocol import request_signing
from hangwatch.protocol.request_signing import MAX_REQUEST_AGE_S, MAX_REQUEST_LEAD_S, PROOF_HEADER

from ..core import limits
from ..core.clock import Clock
from ..core.peers import PeerSocket
from ..core.problems import Problem
from .app_state import AppState
from .rendering import SECURITY_HEADERS, STYLESHEET_PATH

COOKIE_NAME = "hangwatch"
# A connection's scope has the user at its other end under this key, if that is on this machine.
PEER_UID = "hangwatch.peer_uid"
CONNECTION = "hangwatch.connection"  # and under this one the connection's `PeerSocket`
AGENT_GRANT = "hangwatch.agent_grant"  # a request's scope has its `AgentGrant` under this key
PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/login", "/login/style.css"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Wrong tokens that one address may try within the time.
MAX_FAILURES, FAILURE_WINDOW_S = 10, 300.0
_MAX_KEPT_ADDRESSES = 10_000
_PROOF_NAME = PROOF_HEADER.lower().encode()

_CROSS_SITE = Problem(
    403,
    "a page of another site may not send this request: use this server's pages, or send the token as"
    " bearer",
)
_OTHER_USER = Problem(
    403,
    "without a token this server answers only to the user who started it, and to root: start it"
    " with --token, and give the token to others",
)
_STALE = Problem(
    request_signing.STALE_STATUS,
    "this request was signed for another run of this server, or for another time, or was sent before:"
    " sign it for the run and the time in this response",
)
_NO_TOKEN = Problem(
    401,
    "this server requires its token: send it as 'Authorization: Bearer TOKEN', or put it in the"
    " URL as http://:TOKEN@HOST:PORT; the server printed it at startup unless it was given with"
    " --token",
    headers={"WWW-Authenticate": 'Bearer realm="hangwatch"'},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGrant:
    """What a node agent may send. ``signed`` and ``credential`` are None without a signature, and
    ``uid`` is None on a server with a token.
    """

    signed: request_signing.SignedRequest | None = None
    credential: request_signing.Credential | None = None
    uid: int | None = None

    @property
    def job(self) -> str | None:
        """The only job that it may report; None: any job."""
        return None if self.signed is None else self.signed.job

    @property
    def tenant(self) -> str:
        """To whom the reports belong: see `hangwatch.tracking.tenants`."""
        if self.uid is not None:
            return f"uid {self.uid}"
        return self.job or ""


class AccessRefusedError(Exception):
    """The sender may not send this request. The argument is the response, with the reason."""


class Authenticator:
    """Accepts requests with the token, as bearer, as Basic password or as the login's cookie, and
    those that node agents sign with it, each once. Without a token, accepts those of this user and of
    root.
    """

    def __init__(
        self, token: str | None, own_name: str, public_url: str | None, clock: Clock | None = None
    ) -> None:
        self._token = token
        self._own_name = own_name
        self._public_url = public_url
        self._public_host = urlsplit(public_url or "").netloc
        self._clock = clock or Clock()
        self._run = secrets.token_hex(8)
        self._accepted_macs = RecentMacs()

    def check_request(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """The response that rejects a request; None if the request is allowed."""
        token = self._token
        host = headers.get("host")
        by_header = by_cookie = False
        if token is not None:
            by_header = has_token(headers, token)
            if not by_header:
                cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE_NAME, "")
                by_cookie = _constant_time_equal(cookie, derive_session_value(token))
        elif not (is_local_name(host, self._own_name) or (host and host == self._public_host)):
            return Problem(
                421,
                "without a token this server accepts only host names of its own machine, not"
                f" {host!r}: open it as localhost, or start it with --token",
            ).make_response()
        if is_cross_site(scope["method"], headers, self._public_url, by_cookie=by_cookie):
            return _CROSS_SITE.make_response()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if by_header or by_cookie:
            _mark_authenticated(scope)
            return None
        if path in PUBLIC_PATHS:
            return None
        if token is None:
            if not is_trusted_uid(scope.get(PEER_UID)):
                return _OTHER_USER.make_response()
            _mark_authenticated(scope)
            return None
        if scope["method"] in ("GET", "HEAD") and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            target = quote(path + (f"?{query}" if query else ""), safe="/")
            return RedirectResponse(f"/login?next={target}", status_code=303)
        return _NO_TOKEN.make_response()

    def check_agent(self, scope: Scope, headers: Mapping[str, str], path: str) -> AgentGrant:
        """What the sender of a request to ``path`` may send; `prove_reply` needs it as well. Raises
        AccessRefusedError.
        """
        signed = request_signing.SignedRequest.from_header(headers.get("authorization", ""))
        if signed is None or self._token is None:
            refusal = self.check_request(scope, headers)
            if refusal is not None:
                raise AccessRefusedError(refusal)
            return AgentGrant(uid=scope.get(PEER_UID) if self._token is None else None)
        credential = self._make_credential(self._token, signed.job)
        if not credential.verify_request(signed, scope["method"], path):
            raise AccessRefusedError(_NO_TOKEN.make_response())
        grant = AgentGrant(signed=signed, credential=credential)
        scope[AGENT_GRANT] = grant  # even a refusal must prove that it comes from this server
        now = self._get_time()
        signed_for = request_signing.ServerTime.from_text(signed.time_text)
        if not now.accepts(signed_for) or not self._accepted_macs.add(signed.mac, now.at_s):
            raise AccessRefusedError(_STALE.make_response())
        _mark_authenticated(scope)
        return grant

    def prove_reply(self, scope: Scope, response: Response) -> None:
        """Adds the proof that the response to a signed request comes from a server with the token."""
        grant: AgentGrant | None = scope.get(AGENT_GRANT)
        if grant is not None and grant.signed is not None and grant.credential is not None:
            proof = grant.credential.make_proof(
                grant.signed, response.status_code, bytes(response.body), self._get_time()
            )
            response.raw_headers.append((_PROOF_NAME, proof.encode()))

    def _get_time(self) -> request_signing.ServerTime:
        return request_signing.ServerTime(self._run, self._clock.monotonic())

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def _make_credential(token: str, job: str | None) -> request_signing.Credential:
        job_token = token if job is None else request_signing.derive_job_token(token, job)
        return request_signing.Credential.from_token(job_token)


def _mark_authenticated(scope: Scope) -> None:
    connection: PeerSocket | None = scope.get(CONNECTION)
    if connection is not None:
        connection.mark_authenticated()


@dataclass(slots=True)
class RecentMacs:
    """The signatures that were accepted within the time in which they would be accepted again."""

    _current: set[str] = field(default_factory=set)
    _former: set[str] = field(default_factory=set)
    _began_at: float = 0.0

    def add(self, mac: str, now: float) -> bool:
        """Adds a signature. Returns False if it was added before."""
        if now - self._began_at > MAX_REQUEST_LEAD_S + MAX_REQUEST_AGE_S:
            self._former = self._current
            self._current = set()
            self._began_at = now
        if mac in self._current or mac in self._former:
            return False
        self._current.add(mac)
        return True


def has_token(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request carries the token itself."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    given = value.strip()
    if scheme.lower() == "basic":
        try:
            _, _, given = base64.b64decode(given, validate=True).decode().partition(":")
        except ValueError:  # neither base64 nor UTF-8
            return False
    return scheme.lower() in ("bearer", "basic") and _constant_time_equal(given, token)


def _constant_time_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def derive_session_value(token: str) -> str:
    """The cookie's value. It does not reveal the token, and is the same after a restart."""
    return hmac.new(token.encode(), b"hangwatch session", hashlib.sha256).hexdigest()


def is_cross_site(
    method: str, headers: Mapping[str, str], public_url: str | None, *, by_cookie: bool
) -> bool:
    """Whether a request that changes something comes from a page of another site. Browsers report
    it by themselves; other clients report nothing, and have no cookie that a page could use:
    https://words.filippo.io/csrf/. ``public_url`` is the address behind a proxy.
    """
    if method in SAFE_METHODS:
        return False
    if (fetch_site := headers.get("sec-fetch-site")) is not None:
        return fetch_site not in ("same-origin", "none")
    if (origin := headers.get("origin")) is not None:
        own_hosts = {headers.get("host"), urlsplit(public_url or "").netloc or None}
        return origin.partition("://")[2] not in own_hosts
    return by_cookie


@functools.lru_cache(maxsize=256)
def is_local_name(host: str | None, own_name: str) -> bool:
    """Whether a Host header names this machine; other names may be an attempt at DNS rebinding."""
    try:
        name = urlsplit(f"//{host or ''}").hostname or ""
        if name == own_name or name == "localhost" or name.endswith(".localhost"):
            return True
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class RequestGate:
    """Rejects requests that the authenticator does not accept or that are larger than `limits.BODY`,
    serves everything under ``prefix``, also if the proxy has taken it off, and adds headers.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, prefix: str) -> None:
        self._app = app
        self._authenticator = authenticator
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        prefix = self._prefix
        path = scope["path"]
        if prefix:
            if path == prefix or not path.startswith(prefix + "/"):
                path = prefix + (path.removeprefix(prefix) or "/")
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": prefix}
        body_size = 0

        async def receive_limited() -> Message:
            nonlocal body_size
            message = await receive()
            body_size += len(message.get("body", b""))
            limits.BODY.check(body_size)
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                target = headers.get("location", "")
                if target.startswith("/") and not target.startswith(prefix + "/"):
                    headers["location"] = prefix + target
            await send(message)

        refusal = self._authenticator.check_request(scope, Headers(scope=scope))
        await (refusal or self._app)(scope, receive_limited, send_with_headers)


def build_router(state: AppState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    failures = LoginFailures()

    @routes.get("/login")
    async def show_login_form(next: str = "/") -> Response:
        return state.pages.render_page(
            "login.html", next=_sanitize_redirect(next), wrong=False, signed_out=True
        )

    @routes.get("/login/style.css")
    async def serve_stylesheet() -> Response:
        return Response(STYLESHEET_PATH.read_bytes(), media_type="text/css")

    @routes.post("/login")
    async def submit_login(request: Request) -> Response:
        body = await read_body(request.receive, limits.LOGIN_FORM)
        address = request.client.host if request.client else ""
        form = dict(parse_qsl(body.decode("utf-8", "replace")))
        given = form.get("token", "").strip()
        target = _sanitize_redirect(form.get("next", "/"))
        if state.token is not None and not _constant_time_equal(given, state.token):
            # The right token is accepted all the same: behind a proxy, all people have one address.
            if (wait := failures.wait_s(address, state.now())) > 0:
                detail = f"too many wrong tokens from this address: try again in {wait:.0f} s"
                raise Problem(429, detail, headers={"Retry-After": f"{wait:.0f}"})
            failures.add_failure(address, state.now())
            return state.pages.render_page(
                "login.html", status_code=401, next=target, wrong=True, signed_out=True
            )
        response = RedirectResponse(target, status_code=303)
        if state.token is not None:
            response.set_cookie(
                COOKIE_NAME,
                derive_session_value(state.token),
                max_age=30 * 86400,
                path=request.scope.get("root_path") or "/",
                httponly=True,
                samesite="lax",
                secure=request.url.scheme == "https" or state.base_url.startswith("https:"),
            )
        return response

    return routes


async def read_body(receive: Receive, limit: limits.Limit, remedy: str = "") -> bytes:
    """Raises Problem if the body is larger than the limit, and ClientDisconnect if it ends early."""
    parts: list[bytes] = []
    size = 0
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        limit.check(size, remedy=remedy)
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _sanitize_redirect(target: str) -> str:
    """``target`` if it is a path of this server, else ``/``: no login redirects to other sites."""
    plain = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if plain else "/"


@dataclass(slots=True)
class LoginFailures:
    """The times of the last wrong tokens, by address."""

    _failed_at: dict[str, deque[float]] = field(default_factory=dict)

    def wait_s(self, address: str, now: float) -> float:
        """Seconds until another attempt is accepted."""
        times = self._failed_at.get(address, deque())
        if len(times) < MAX_FAILURES:
            return 0.0
        return max(0.0, times[0] + FAILURE_WINDOW_S - now)

    def add_failure(self, address: str, now: float) -> None:
        self._failed_at.setdefault(address, deque(maxlen=MAX_FAILURES)).append(now)
        while len(self._failed_at) > _MAX_KEPT_ADDRESSES:
            del self._failed_at[next(iter(self._failed_at))]
