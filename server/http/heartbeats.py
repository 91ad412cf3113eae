"""``POST /api/v1/heartbeats``: what node agents report, validated before any of it is applied; and
``POST /api/v1/commands``: what they should do, as soon as there is something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch.protocol import codec
from hangwatch.protocol.heartbeat import COMMANDS_PATH, URGENT_PRIORITY
from hangwatch.protocol.signatures import may_report_job

from ..core import limits
from ..core.problems import Problem
from ..ingest import decoding
from ..monitor.report_intervals import POLL_S
from ..monitor.watch import Watch
from . import error_pages
from .access import AgentGrant, Authenticator
from .app_state import AppState
from .heartbeat_answers import REPLY_HEADERS, count_refusal, encode_reply, prepare_heartbeat
from .heartbeat_bodies import SIZE_REMEDY, check_content_coding, decode_body
from .rendering import SECURITY_HEADERS

log = logging.getLogger("hangwatch")

PATH = "/api/v1/heartbeats"
PROOF_PATH = "/api/v1/proof"
_HEARTBEAT_SCHEMA = {"$ref": "#/components/schemas/HeartbeatBody"}
_POLL_SCHEMA = {
    "type": "object",
    "required": ["agent"],
    "properties": {"agent": {"type": "string"}},
}
_Handler = Callable[[Mapping[str, str], Receive, Watch, "AgentGrant"], Coroutine[None, None, bytes]]
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in REPLY_HEADERS.items()]


def list_paths(prefix: str = "") -> list[str]:
    """The paths of heartbeats: behind a reverse proxy also with its prefix."""
    return [before + PATH for before in dict.fromkeys(("", prefix))]


class HeartbeatFastPath:
    """The outermost ASGI application: it answers node agents itself and passes all other requests to
    ``app``, whose middleware and routing take longer than a heartbeat. Like these it
    authenticates, limits the body, and sends the security headers.
    """

    def __init__(
        self, app: ASGIApp, live: AppState, authenticator: Authenticator, prefix: str = ""
    ) -> None:
        self._app, self._watch, self._authenticator = app, live.watch, authenticator
        self._routes: dict[tuple[str, str], _Handler] = {}
        for before in ("", prefix):
            self._routes["POST", before + PATH] = _handle_heartbeat
            self._routes["POST", before + COMMANDS_PATH] = _handle_poll
            self._routes["GET", before + PROOF_PATH] = _handle_proof_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._routes.get((scope.get("method", ""), scope.get("path", "")))
        if handle is None:
            return await self._app(scope, receive, send)
        headers = _decode_headers(scope["headers"])
        grant = self._authenticator.check_agent(scope, headers)
        if not isinstance(grant, AgentGrant):
            return await _send_refusal(grant, scope, receive, send)
        try:
            body = await handle(headers, receive, self._watch, grant)
        except Problem as problem:
            return await _send_refusal(problem.make_response(), scope, receive, send)
        except ClientDisconnect:
            return None
        except Exception:
            log.exception("a heartbeat failed; please report this")
            refusal = Problem(500, error_pages.INTERNAL_ERROR_DETAIL).make_response()
            return await _send_refusal(refusal, scope, receive, send)
        headers_sent = [
            (b"content-length", b"%d" % len(body)),
            *grant.make_headers(body),
            *_HEADERS,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers_sent})
        await send({"type": "http.response.body", "body": body})


async def _send_refusal(refusal: Response, scope: Scope, receive: Receive, send: Send) -> None:
    refusal.headers.update(SECURITY_HEADERS)
    await refusal(scope, receive, send)


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(tags=["agents"])

    async def answer_request(request: Request, handle: _Handler) -> Response:
        body = await handle(request.headers, request.receive, live.watch, AgentGrant())
        return Response(body, media_type="application/json")

    @routes.post(
        PATH,
        summary="A node agent's report; the reply says what it should do next",
        openapi_extra=_describe_body(_HEARTBEAT_SCHEMA),
    )
    async def post_heartbeat(request: Request) -> Response:
        # `HeartbeatFastPath` answers first: the routes of node agents are for ``/docs``.
        return await answer_request(request, _handle_heartbeat)

    @routes.post(
        COMMANDS_PATH,
        summary="Waits for commands for a node agent",
        openapi_extra=_describe_body(_POLL_SCHEMA),
    )
    async def post_poll(request: Request) -> Response:
        """The reply comes as soon as there is a command, or without one after `poll_s` seconds of the
        reply to a heartbeat.
        """
        return await answer_request(request, _handle_poll)

    @routes.get(
        PROOF_PATH,
        summary="Proves that the server knows the token, before an agent sends stacks to it",
    )
    async def get_proof() -> dict[str, str]:
        """The ``Hangwatch-Proof`` header of the answer to a signed request is the proof."""
        return {}

    return routes


def _describe_body(schema: Mapping[str, object]) -> dict[str, object]:
    """Of a route that decodes its body itself, for ``/openapi.json``."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _decode_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The first header of each name, in lower case. A dozen look-ups in starlette's `Headers` take
    longer than a heartbeat.
    """
    headers: dict[str, str] = {}
    for name, value in raw_headers:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


async def _handle_proof_request(
    headers: Mapping[str, str], receive: Receive, watch: Watch, grant: AgentGrant
) -> bytes:
    """Raises Problem or ClientDisconnect."""
    await _read_body(headers, receive, grant)
    return b"{}"


async def _handle_poll(
    headers: Mapping[str, str], receive: Receive, watch: Watch, grant: AgentGrant
) -> bytes:
    """Waits for commands. Raises Problem or ClientDisconnect."""
    agent = decoding.decode_head(await _read_body(headers, receive, grant)).agent
    if agent is None:
        raise Problem(422, 'the body must name the node agent: {"agent": ID}')
    jobs = watch.fleet.list_jobs(agent)
    if not all(may_report_job(grant.job, job) for job in jobs):
        raise Problem(403, "the token is another job's than that of the node agent")
    if watch.commands.waiting_count >= limits.WAITING_AGENTS.most:
        raise limits.WAITING_AGENTS.make_problem()
    await _wait_while_connected(watch.commands.wait_for_commands(agent, POLL_S), receive)
    commands = [codec.encode_message(command) for command in watch.commands.take_unsent(agent)]
    return msgspec.json.encode({"commands": commands})


async def _wait_while_connected(waiting: Coroutine[None, None, None], receive: Receive) -> None:
    """Raises ClientDisconnect if the client has gone: it would not get the commands."""
    disconnected = asyncio.ensure_future(receive())
    awaited = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait({disconnected, awaited}, return_when=asyncio.FIRST_COMPLETED)
        if disconnected.done():
            raise ClientDisconnect
    finally:
        disconnected.cancel()
        awaited.cancel()


async def _handle_heartbeat(
    headers: Mapping[str, str], receive: Receive, watch: Watch, grant: AgentGrant
) -> bytes:
    """Returns the encoded reply. Raises Problem or ClientDisconnect."""
    is_urgent = headers.get("priority") == URGENT_PRIORITY
    try:
        body = await _read_body(headers, receive, grant)
        decode = prepare_heartbeat(watch, body, grant, is_urgent)
        return encode_reply(await watch.heartbeat_queue.apply(decode, is_urgent))
    except Problem as problem:
        count_refusal(watch, problem)
        raise


async def _read_body(headers: Mapping[str, str], receive: Receive, grant: AgentGrant) -> bytes:
    """The decompressed body. Raises Problem if it is too large or does not match its headers, and
    ClientDisconnect if it ends early.
    """
    check_content_coding(headers)  # before a large body is read
    content_length = headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > limits.BODY.most:
        raise limits.BODY.make_problem(remedy=SIZE_REMEDY)
    parts: list[bytes] = []
    size, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        has_more = message.get("more_body", False)
        if size > limits.BODY.most:
            raise limits.BODY.make_problem(remedy=SIZE_REMEDY)
    return decode_body(headers, b"".join(parts), grant)
