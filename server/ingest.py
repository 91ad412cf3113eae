"""``POST /api/v1/heartbeats``: what the node agents report, checked before anything of it is taken in."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, RootModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch import wire
from hangwatch.types import unpack_ranks

from . import problems
from .limits import BODY_MAX, NAME_MAX, check
from .live import Live
from .problems import Problem, invalid
from .watch import Watch

PATH = "/api/v1/heartbeats"
UNPACKED_MAX = 64 << 20
RANKS_MAX = 1 << 20


class Body(RootModel[wire.Heartbeat]):
    model_config = ConfigDict(allow_inf_nan=False)


class Direct:
    """ASGI middleware that takes heartbeats past the routing of all other requests, which would take longer than they do themselves."""

    def __init__(self, app: ASGIApp, live: Live) -> None:
        self._app, self._live = app, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            return await self._app(scope, receive, send)
        try:
            answer = await _answer(Request(scope, receive), self._live.watch)
        except Problem as problem:
            answer = problems.document(problem.status, problem.detail, problem.headers, **problem.more)
        except HTTPException as error:  # of the middleware around this one: the body is too long, or too late
            answer = problems.document(error.status_code, error.detail, error.headers)
        except ClientDisconnect:
            return None
        return await answer(scope, receive, send)


def router(live: Live) -> APIRouter:
    routes = APIRouter(tags=["agents"])

    @routes.post(
        PATH,
        summary="What a node agent reports; answers what it should do next",
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}}
        },
    )
    async def heartbeats(request: Request) -> JSONResponse:
        return await _answer(request, live.watch)

    return routes


async def _answer(request: Request, watch: Watch) -> JSONResponse:
    """Raises Problem."""
    watch.load.check()
    try:
        beat = parse(await _read(request))
        check(beat, watch.fleet, beat.agent in watch.agents, len(watch.agents))
    except Problem:
        watch.counters.malformed += 1
        raise
    return JSONResponse(wire.encode(await watch.take(beat)))


def parse(body: bytes) -> wire.Heartbeat:
    """A heartbeat that can be applied without fail. Raises Problem."""
    try:
        beat = Body.model_validate_json(body).root
    except ValidationError as error:
        errors = invalid(error.errors(include_input=False, include_url=False, include_context=False))
        raise Problem(422, "not a heartbeat; nothing of it was taken in", errors=errors) from None
    if beat.version != wire.VERSION:
        raise Problem(
            422,
            f"this heartbeat speaks version {beat.version}, this server version {wire.VERSION}: "
            "install the same release of hangwatch on the training nodes and here",
        )
    if wrong := next(_wrong(beat), None):
        raise Problem(422, f"{wrong}; nothing of it was taken in")
    return beat


def _wrong(beat: wire.Heartbeat) -> Iterator[str]:
    """What the types cannot say."""
    for name in (beat.host, beat.agent, *(p.key for p in beat.processes), *(p.identity.job for p in beat.processes if p.identity)):
        if not 0 < len(name) <= NAME_MAX or not name.isprintable():
            yield f"the name {name[:40]!r} is not one to {NAME_MAX} printable characters"
    for process in beat.processes:
        identity = process.identity
        if identity is not None and not (0 <= identity.rank < RANKS_MAX and 0 <= identity.world_size <= RANKS_MAX):
            yield f"process {process.key} says rank {identity.rank} of {identity.world_size}"
        for sequence in process.sequences:
            if sequence.identity is not None:
                try:
                    unpack_ranks(sequence.identity.ranks)
                except ValueError as error:
                    yield f"group {sequence.identity.name!r} of process {process.key}: {error}"


async def _read(request: Request) -> bytes:
    """The body, unpacked. Raises Problem where it is too large or not what its headers say."""
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise Problem(415, f"a body in {coding} is not understood; send it plain or as gzip", headers={"Accept-Encoding": "gzip"})
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > BODY_MAX:
        raise _too_large(BODY_MAX)
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_MAX:
            raise _too_large(BODY_MAX)
        parts.append(chunk)
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
    return Problem(413, f"a heartbeat holds at most {limit >> 20} MiB: send it in parts", limit=limit)
