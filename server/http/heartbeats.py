"""``POST /api/v1/heartbeats``: what node agents report, validated before any of it is applied."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch.model.groups import unpack_ranks
from hangwatch.protocol import codec, heartbeat

from ..core import problems
from ..core.limits import MAX_BODY_BYTES, MAX_NAME_CHARACTERS, check_heartbeat
from ..core.problems import Problem, describe_validation_errors
from ..ingest import decoding
from ..monitor.watch import Watch
from . import error_pages
from .access import Authenticator
from .app_state import AppState
from .connections import HEARTBEATS_PATH_END
from .rendering import SECURITY_HEADERS

log = logging.getLogger("hangwatch")

PATH = f"/api/v1{HEARTBEATS_PATH_END}"
MAX_UNPACKED_BYTES = 64 << 20
MAX_RANKS = 1 << 20
_HEADERS = [
    (b"content-type", b"application/json"),
    *((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()),
]


class HeartbeatFastPath:
    """The outermost ASGI application: it handles heartbeats itself and passes all other requests
    to ``app``, whose middleware and routing take longer than a heartbeat. Like these it
    authenticates, limits the body, and sends the security headers.
    """

    def __init__(
        self, app: ASGIApp, live: AppState, authenticator: Authenticator, prefix: str = ""
    ) -> None:
        self._app, self._watch, self._authenticator = app, live.watch, authenticator
        self._paths = {PATH, prefix + PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = _decode_headers(scope["headers"])
        refusal = self._authenticator.check_request(scope, headers)
        if refusal is None:
            try:
                body = await _handle_request(headers, receive, self._watch)
            except Problem as problem:
                refusal = problems.make_problem_response(
                    problem.status, problem.detail, problem.headers, **problem.extra_members
                )
            except ClientDisconnect:
                return None
            except Exception:
                log.exception("a heartbeat failed; please report this")
                refusal = problems.make_problem_response(500, error_pages.INTERNAL_ERROR_DETAIL)
        if refusal is not None:
            refusal.headers.update(SECURITY_HEADERS)
            return await refusal(scope, receive, send)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(body)), *_HEADERS],
            }
        )
        await send({"type": "http.response.body", "body": body})


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(tags=["agents"])

    @routes.post(
        PATH,
        summary="A node agent's report; the reply says what it should do next",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": {"$ref": "#/components/schemas/HeartbeatBody"}}
                },
            }
        },
    )
    async def post_heartbeat(request: Request) -> Response:
        """For ``/docs``, and for applications without `HeartbeatFastPath`."""
        return Response(
            await _handle_request(request.headers, request.receive, live.watch),
            media_type="application/json",
        )

    return routes


def _decode_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The first header of each name, in lower case. A dozen look-ups in starlette's `Headers` take
    longer than a heartbeat.
    """
    headers: dict[str, str] = {}
    for name, value in raw_headers:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


async def _handle_request(headers: Mapping[str, str], receive: Receive, watch: Watch) -> bytes:
    """Returns the encoded reply. Raises Problem or ClientDisconnect."""
    is_urgent = headers.get("priority") == heartbeat.URGENT_PRIORITY
    refusal = watch.load.make_refusal(is_urgent)
    if refusal is not None:
        body = await _read_body(headers, receive)
        watch.heartbeats.refuse_heartbeat(decoding.decode_agent_id(body))
        raise refusal

    def decode_heartbeat() -> heartbeat.Heartbeat:
        beat = parse_heartbeat(body)
        check_heartbeat(beat, watch.fleet, beat.agent in watch.agents, len(watch.agents))
        return beat

    try:
        body = await _read_body(headers, receive)
        reply = await watch.heartbeat_queue.apply(decode_heartbeat, is_urgent)
    except Problem:
        watch.counters.malformed += 1
        raise
    return msgspec.json.encode(codec.encode_message(reply))


def parse_heartbeat(body: bytes) -> heartbeat.Heartbeat:
    """A heartbeat that can be applied without errors. Raises Problem."""
    try:
        beat = decoding.decode_heartbeat(body)
    except ValidationError as error:
        errors = describe_validation_errors(
            error.errors(include_input=False, include_url=False, include_context=False)
        )
        raise Problem(422, "not a heartbeat; nothing of it was applied", errors=errors) from None
    if beat.version != heartbeat.PROTOCOL_VERSION:
        raise Problem(
            422,
            f"this heartbeat has protocol version {beat.version}, this server has version"
            f" {heartbeat.PROTOCOL_VERSION}: install the same release of hangwatch on the training"
            " nodes and here",
        )
    mistake = next(_iter_mistakes(beat), None)
    if mistake is not None:
        raise Problem(422, f"{mistake}; nothing of the heartbeat was applied")
    return beat


def _iter_mistakes(beat: heartbeat.Heartbeat) -> Iterator[str]:
    """What is wrong although the types are right."""
    for name in (
        beat.host,
        beat.agent,
        *(p.key for p in beat.processes),
        *(p.identity.job for p in beat.processes if p.identity),
    ):
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            yield f"the name {name[:40]!r} is not one to {MAX_NAME_CHARACTERS} printable characters"
    for process in beat.processes:
        identity = process.identity
        if identity is not None and not (
            0 <= identity.rank < MAX_RANKS and 0 <= identity.world_size <= MAX_RANKS
        ):
            yield f"process {process.key} has the invalid rank {identity.rank} of {identity.world_size}"
        for sequence in process.sequences:
            if sequence.identity is not None:
                try:
                    unpack_ranks(sequence.identity.ranks)
                except ValueError as error:
                    yield f"group {sequence.identity.name!r} of process {process.key}: {error}"


async def _read_body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The decompressed body. Raises Problem if it is too large or does not match its headers, and
    ClientDisconnect if it ends early.
    """
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise Problem(
            415,
            f"content encoding {coding} is not supported; send the body plain or as gzip",
            headers={"Accept-Encoding": "gzip"},
        )
    content_length = headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > MAX_BODY_BYTES:
        raise _make_size_problem(MAX_BODY_BYTES)
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
        if size > MAX_BODY_BYTES:
            raise _make_size_problem(MAX_BODY_BYTES)
    body = b"".join(parts)
    return decompress_body(body) if coding == "gzip" else body


def decompress_body(body: Annotated[bytes, "gzip"]) -> bytes:
    """Raises Problem for anything but one gzip stream of bounded size."""
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(body, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise Problem(422, f"the body is not gzip: {error}") from None
    if stream.unconsumed_tail:
        raise _make_size_problem(MAX_UNPACKED_BYTES)
    if not stream.eof:
        raise Problem(422, "the gzip body is cut short")
    return plain


def _make_size_problem(limit_bytes: int) -> Problem:
    detail = f"a heartbeat holds at most {limit_bytes >> 20} MiB: send it in parts"
    return Problem(413, detail, limit=limit_bytes)
