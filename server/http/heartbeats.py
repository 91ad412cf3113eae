"""``POST /api/v1/heartbeats``: what the node agents report, checked before anything of it is taken
in.
"""

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
from ..core.limits import BODY_MAX, HEARTBEATS, NAME_MAX, check
from ..core.problems import Problem, describe_validation_errors
from ..ingest import decoding
from ..monitor.watch import Watch
from . import error_pages
from .access import Authenticator
from .app_state import AppState
from .rendering import SECURITY_HEADERS

log = logging.getLogger("hangwatch")

PATH = f"/api/v1{HEARTBEATS}"
UNPACKED_MAX = 64 << 20
RANKS_MAX = 1 << 20
_HEADERS = [
    (b"content-type", b"application/json"),
    *((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()),
]


class HeartbeatFastPath:
    """The outermost ASGI application: it answers heartbeats by itself, and leaves all else to the
    layers and routes of the other.

    Those take longer than a heartbeat itself. What they see to, this does too: who may come in, how
    long a body may be, the headers of an answer.
    """

    def __init__(
        self, app: ASGIApp, live: AppState, doorkeeper: Authenticator, prefix: str = ""
    ) -> None:
        self._app, self._watch, self._doorkeeper = app, live.watch, doorkeeper
        self._paths = {PATH, prefix + PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = _first_of_each(scope["headers"])
        if (refusal := self._doorkeeper.check_request(scope, headers)) is None:
            try:
                body = await _answer(headers, receive, self._watch)
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
        summary="What a node agent reports; answers what it should do next",
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
        """Where `Direct` is not in front, and for ``/docs``."""
        return Response(
            await _answer(request.headers, request.receive, live.watch),
            media_type="application/json",
        )

    return routes


def _first_of_each(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """As starlette's `Headers` has them by their names, in small letters; but a dozen questions to
    that take longer than a heartbeat.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


async def _answer(headers: Mapping[str, str], receive: Receive, watch: Watch) -> bytes:
    """Raises Problem or ClientDisconnect."""
    urgent = headers.get("priority") == heartbeat.URGENT_PRIORITY
    if (refusal := watch.load.refusal(urgent)) is not None:
        watch.heartbeats.refuse_heartbeat(decoding.decode_agent_id(await _read(headers, receive)))
        raise refusal

    def beat() -> heartbeat.Heartbeat:
        told = parse(body)
        check(told, watch.fleet, told.agent in watch.agents, len(watch.agents))
        return told

    try:
        body = await _read(headers, receive)
        reply = await watch.heartbeat_queue.apply(beat, urgent)
    except Problem:
        watch.counters.malformed += 1
        raise
    return msgspec.json.encode(codec.encode_message(reply))


def parse(body: bytes) -> heartbeat.Heartbeat:
    """A heartbeat that can be applied without fail. Raises Problem."""
    try:
        beat = decoding.decode_heartbeat(body)
    except ValidationError as error:
        errors = describe_validation_errors(
            error.errors(include_input=False, include_url=False, include_context=False)
        )
        raise Problem(422, "not a heartbeat; nothing of it was taken in", errors=errors) from None
    if beat.version != heartbeat.PROTOCOL_VERSION:
        raise Problem(
            422,
            f"this heartbeat speaks version {beat.version}, this server version"
            f" {heartbeat.PROTOCOL_VERSION}: install the same release of hangwatch on the training"
            " nodes and here",
        )
    if wrong := next(_wrong(beat), None):
        raise Problem(422, f"{wrong}; nothing of it was taken in")
    return beat


def _wrong(beat: heartbeat.Heartbeat) -> Iterator[str]:
    """What the types cannot say."""
    for name in (
        beat.host,
        beat.agent,
        *(p.key for p in beat.processes),
        *(p.identity.job for p in beat.processes if p.identity),
    ):
        if not 0 < len(name) <= NAME_MAX or not name.isprintable():
            yield f"the name {name[:40]!r} is not one to {NAME_MAX} printable characters"
    for process in beat.processes:
        identity = process.identity
        if identity is not None and not (
            0 <= identity.rank < RANKS_MAX and 0 <= identity.world_size <= RANKS_MAX
        ):
            yield f"process {process.key} says rank {identity.rank} of {identity.world_size}"
        for sequence in process.sequences:
            if sequence.identity is not None:
                try:
                    unpack_ranks(sequence.identity.ranks)
                except ValueError as error:
                    yield f"group {sequence.identity.name!r} of process {process.key}: {error}"


async def _read(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The body, unpacked. Raises Problem where it is too large or not what its headers say, and
    ClientDisconnect where it ends early.
    """
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise Problem(
            415,
            f"a body in {coding} is not understood; send it plain or as gzip",
            headers={"Accept-Encoding": "gzip"},
        )
    told = headers.get("content-length", "")
    if told.isdecimal() and int(told) > BODY_MAX:
        raise _too_large(BODY_MAX)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > BODY_MAX:
            raise _too_large(BODY_MAX)
    body = b"".join(parts)
    return unpack(body) if coding == "gzip" else body


def unpack(body: Annotated[bytes, "gzip"]) -> bytes:
    """Raises Problem for anything but one gzip stream of bounded size."""
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(body, UNPACKED_MAX)
    except zlib.error as error:
        raise Problem(422, f"the body is not gzip: {error}") from None
    if stream.unconsumed_tail:
        raise _too_large(UNPACKED_MAX)
    if not stream.eof:
        raise Problem(422, "the gzip body is cut short")
    return plain


def _too_large(limit: int) -> Problem:
    return Problem(
        413, f"a heartbeat holds at most {limit >> 20} MiB: send it in parts", limit=limit
    )
