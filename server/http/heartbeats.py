"""The requests of node agents: ``POST /api/v1/heartbeats`` reports, and all of it is validated before
any of it is applied; ``POST /api/v1/commands`` waits for what they should do; ``GET /api/v1/proof``
proves that this server knows the token.

They bypass the application's middleware and routing, which take longer than a heartbeat:
`HeartbeatFastPath` passes them to `AgentEndpoint`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH, PROOF_PATH, get_family
from hangwatch.tracking.tenants import qualify_agent

from ..core import limits
from ..core.problems import Problem
from ..ingest import heartbeat_checks
from ..ingest.heartbeat_checks import BodyVolume, check_job, check_memory, parse_heartbeat
from ..monitor.cadence import POLL_S
from ..monitor.watch import Watch
from . import rendering
from .access import AccessRefusedError, AgentGrant, Authenticator, read_body

_PART_BYTES = 1 << 20  # decompressed at a time
_HEAD_BYTES = 4096  # the first fields of a heartbeat, which have its sender
_SIZE_REMEDY = "send the heartbeat in parts"
_NOT_HERE_STATUSES = (421, 503)  # another server has the job, or may have it
_SECURITY_HEADERS = [
    (name.lower().encode(), value.encode()) for name, value in rendering.SECURITY_HEADERS.items()
]

log = logging.getLogger("hangwatch")


class AgentReply(Response):
    """A successful answer; building it takes half the time of starlette's general way."""

    def __init__(self, document: object) -> None:
        self.status_code = 200
        self.background = None
        self.body = msgspec.json.encode(document)
        self.raw_headers = [
            (b"content-length", b"%d" % len(self.body)),
            (b"content-type", b"application/json"),
        ]


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Answers node agents. Its routes raise AccessRefusedError, Problem and ClientDisconnect."""

    watch: Watch
    authenticator: Authenticator
    # The bytes of the heartbeats that arrive or wait, of each family of jobs.
    _bodies: Counter[str] = field(default_factory=Counter)

    async def post_heartbeat(self, request: Request) -> Response:
        headers, size, grant = self._check_head(request, HEARTBEAT_PATH, limits.BODY)
        watch = self.watch
        shared = self.watch.shared
        family = get_family(grant.job or "")
        is_urgent = headers.get("priority") == heartbeat.URGENT_PRIORITY
        with self._account_body(family, size):
            body = await self._read_body(request, grant, limits.BODY)
            refusal = shared.load.make_refusal(is_urgent, family)
            if refusal is not None:
                shared.counters.refused += 1
                agent = find_agent(headers, body, grant)
                if agent is not None:  # the node agent and its ranks are not lost
                    shared.fleet.mark_refused(agent, shared.now())
                raise refusal

            def decode_heartbeat() -> heartbeat.Heartbeat:
                beat = parse_heartbeat(unpack_body(headers, body))
                if grant.tenant:
                    # Nobody else has the heartbeat yet, so that it need not be copied.
                    object.__setattr__(beat, "agent", qualify_agent(grant.tenant, beat.agent))
                check_job(beat, grant.job)
                check_memory(beat, shared.fleet, shared.now())
                if watch.job_claims is not None:
                    watch.job_claims.check_heartbeat(beat)
                return beat

            reply = await watch.heartbeat_queue.submit(decode_heartbeat, is_urgent, family)
        return AgentReply(codec.encode_message(reply))

    async def post_poll(self, request: Request) -> Response:
        """The reply comes as soon as there is a command, or without one after `poll_s` seconds of the
        reply to a heartbeat.
        """
        headers, _, grant = self._check_head(request, COMMANDS_PATH, limits.POLL)
        body = await self._read_body(request, grant, limits.POLL)
        sender = heartbeat_checks.decode_head(unpack_body(headers, body)).agent
        if sender is None:
            raise Problem(422, 'the body must name the node agent: {"agent": ID}')
        agent = qualify_agent(grant.tenant, sender)
        shared = self.watch.shared
        families = [shared.agents.get_families(a)[0] for a in shared.commands.waiting_agents]
        [family, *_] = shared.agents.get_families(agent)
        count = families.count(family) + 1
        total = len(families) + 1
        limits.WAITING_AGENTS.check_share(count, total, family)
        if agent not in shared.agents:
            raise Problem(403, "no node agent of this name reports with this token")
        disconnected = asyncio.ensure_future(request.receive())
        waiting = asyncio.ensure_future(shared.commands.wait_for_commands(agent, POLL_S))
        try:
            await asyncio.wait({disconnected, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done():  # the client would not get the commands
                raise ClientDisconnect
        finally:
            disconnected.cancel()
            waiting.cancel()
        commands = [codec.encode_message(c) for c in shared.commands.take_unsent(agent)]
        return AgentReply({"commands": commands})

    async def get_proof(self, request: Request) -> Response:
        """The ``Hangwatch-Proof`` header of the answer to a signed request is the proof."""
        _, _, grant = self._check_head(request, PROOF_PATH, limits.POLL)
        await self._read_body(request, grant, limits.POLL)
        return AgentReply({})

    def _check_head(
        self, request: Request, path: str, limit: limits.Limit
    ) -> tuple[dict[str, str], int, AgentGrant]:
        """The first header of each name, the most bytes that the body may have, and what the sender may
        send.
        """
        # A dozen look-ups in starlette's `Headers` take longer than a heartbeat.
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(request.scope["headers"])
        }
        grant = self.authenticator.check_agent(request.scope, headers, path)
        _is_compressed(headers)  # a refusal comes before a large body is read
        content_length = headers.get("content-length", "")
        size = int(content_length) if content_length.isdecimal() else limit.maximum
        limit.check(size, remedy=_SIZE_REMEDY)
        return headers, size, grant

    async def _read_body(self, request: Request, grant: AgentGrant, limit: limits.Limit) -> bytes:
        """The body as it was sent."""
        body = await read_body(request.receive, limit, _SIZE_REMEDY)
        if grant.signed is not None and not grant.signed.has_body(body):
            raise Problem(401, "the request's body is not the one that was signed")
        return body

    @contextlib.contextmanager
    def _account_body(self, family: str, size: int) -> Iterator[None]:
        """Raises Problem if heartbeats of this or all families together take too much memory."""
        total = self._bodies.total() + size
        limits.BODIES.check_share(self._bodies[family] + size, total, family)
        self._bodies[family] += size
        try:
            yield
        finally:
            self._bodies[family] -= size
            if not self._bodies[family]:
                del self._bodies[family]

    def refuse(self, error: Exception, *, is_heartbeat: bool) -> Response:
        """The response to a request that failed, which is counted if that is due to its content."""
        if isinstance(error, AccessRefusedError):
            response: Response = error.args[0]
            return response
        if not isinstance(error, Problem):
            log.error("a heartbeat failed; please report this", exc_info=error)
            return Problem(500, rendering.INTERNAL_ERROR_DETAIL).make_response()
        counters = self.watch.shared.counters
        counters.refusals_by_limit.update(error.limits)
        if is_heartbeat and error.status not in _NOT_HERE_STATUSES:
            counters.malformed += 1
        return error.make_response()


class HeartbeatFastPath:
    """The outermost ASGI application: it answers node agents, and ``app`` all other requests."""

    def __init__(self, app: ASGIApp, endpoint: AgentEndpoint, prefix: str) -> None:
        self._app = app
        self._endpoint = endpoint
        self._prefix = prefix
        self._routes = {
            ("POST", HEARTBEAT_PATH): endpoint.post_heartbeat,
            ("POST", COMMANDS_PATH): endpoint.post_poll,
            ("GET", PROOF_PATH): endpoint.get_proof,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(self._prefix)
        handle = self._routes.get((scope.get("method", ""), path))
        if handle is None:
            return await self._app(scope, receive, send)
        try:
            response = await handle(Request(scope, receive))
        except ClientDisconnect:
            return None
        except Exception as error:
            response = self._endpoint.refuse(error, is_heartbeat=path == HEARTBEAT_PATH)
        self._endpoint.authenticator.prove_reply(scope, response)
        response.raw_headers += _SECURITY_HEADERS
        await response(scope, receive, send)


def build_router(endpoint: AgentEndpoint) -> APIRouter:
    """The routes of node agents as ``/docs`` lists them. `HeartbeatFastPath` answers before them."""
    routes = APIRouter(tags=["agents"])
    routes.post(
        HEARTBEAT_PATH,
        summary="A node agent's report; the reply says what it should do next",
        openapi_extra=_describe_body({"$ref": "#/components/schemas/HeartbeatBody"}),
    )(endpoint.post_heartbeat)
    poll = {"type": "object", "required": ["agent"], "properties": {"agent": {"type": "string"}}}
    routes.post(
        COMMANDS_PATH,
        summary="Waits for commands for a node agent",
        openapi_extra=_describe_body(poll),
    )(endpoint.post_poll)
    routes.get(
        PROOF_PATH,
        response_model=dict[str, str],
        summary="Proves that the server knows the token, before an agent sends stacks to it",
    )(endpoint.get_proof)
    return routes


def find_agent(headers: Mapping[str, str], body: bytes, grant: AgentGrant) -> str | None:
    """The server's name of the node agent that sent a heartbeat, by its first kilobytes alone: it is
    refused because the server has no time to decode it.
    """
    with contextlib.suppress(zlib.error):
        if _is_compressed(headers):
            body = zlib.decompressobj(wbits=31).decompress(body, _HEAD_BYTES)
    # A quotation mark within a text has a backslash before it.
    found = re.search(rb'"agent"\s*:\s*("(?:[^"\\]|\\.)*")', body[:_HEAD_BYTES])
    with contextlib.suppress(msgspec.MsgspecError):
        if found is not None:
            return qualify_agent(grant.tenant, msgspec.json.decode(found[1], type=str))
    return None


def _describe_body(schema: Mapping[str, object]) -> dict[str, object]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _is_compressed(headers: Mapping[str, str]) -> bool:
    """Whether the body is compressed. Raises Problem for a compression other than gzip."""
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise Problem(
            415,
            f"content encoding {coding} is not supported; send the body plain or as gzip",
            headers={"Accept-Encoding": "gzip"},
        )
    return coding == "gzip"


def unpack_body(headers: Mapping[str, str], body: bytes) -> bytes:
    """The body without its compression. Raises Problem if it is invalid, and as soon as a part shows that it
    holds more than a heartbeat may: 63 KB can become 64 MB of values.
    """
    if not _is_compressed(headers):
        return body
    stream = zlib.decompressobj(wbits=31)
    parts = []
    size = 0
    volume = BodyVolume()
    while not stream.eof:
        try:
            part = stream.decompress(stream.unconsumed_tail or body, _PART_BYTES)
        except zlib.error as error:
            raise Problem(422, f"the body is not gzip: {error}") from None
        if not (part or stream.eof):
            raise Problem(422, "the gzip body is cut short")
        body = b""
        parts.append(part)
        size += len(part)
        limits.UNPACKED_BODY.check(size, remedy=_SIZE_REMEDY)
        volume.add_part(part)
    return b"".join(parts)
