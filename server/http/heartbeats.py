"""``POST /api/v1/heartbeats``: what node agents report, validated before any of it is applied; and
``POST /api/v1/commands``: what they should do, as soon as there is something.

Both bypass the application's middleware and routing, which take longer than a heartbeat: requests
that arrive here go through `HeartbeatFastPath`, those that the process for node agents' connections
has read through `HeartbeatAnswerer`.
"""

from __future__ import annotations

import asyncio
import http
import logging
import zlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH, PROOF_PATH, URGENT_PRIORITY
from hangwatch.protocol.request_signing import may_report_job

from ..core import limits
from ..core.problems import Problem
from ..ingest import heartbeat_checks
from ..ingest.heartbeat_checks import BodyVolume, check_job, check_memory, parse_heartbeat
from ..ingest.heartbeat_queue import DecodeHeartbeat
from ..ingest.worker_frames import WorkerFrame
from ..monitor.cadence import POLL_S
from ..monitor.job_claims import JobClaims
from ..monitor.watch import Watch
from .access import PEER_UID, AgentGrant, Authenticator
from .app_state import AppState
from .rendering import INTERNAL_ERROR_DETAIL, SECURITY_HEADERS

_PART_BYTES = 1 << 20  # decompressed at a time
_SIZE_REMEDY = "send the heartbeat in parts"
_NOT_HERE_STATUSES = (421, 503)  # another server has the job, or may have it
_HEADERS = [
    (name.lower().encode(), value.encode())
    for name, value in {"Content-Type": "application/json", **SECURITY_HEADERS}.items()
]

log = logging.getLogger("hangwatch")


def list_paths(prefix: str) -> list[str]:
    """The paths of heartbeats: behind a reverse proxy also with its prefix."""
    return [before + HEARTBEAT_PATH for before in dict.fromkeys(("", prefix))]


class HeartbeatFastPath:
    """The outermost ASGI application: it answers node agents itself and passes all other requests
    to ``app``. Like the middleware there, it authenticates, limits the body, and sends the security
    headers.
    """

    def __init__(
        self, app: ASGIApp, state: AppState, authenticator: Authenticator, prefix: str
    ) -> None:
        self._app, self._watch, self._authenticator = app, state.watch, authenticator
        self._routes: dict[tuple[str, str], _Handler] = {}
        for before in ("", prefix):
            self._routes["POST", before + HEARTBEAT_PATH] = _handle_heartbeat
            self._routes["POST", before + COMMANDS_PATH] = _handle_poll
            self._routes["GET", before + PROOF_PATH] = _handle_proof_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._routes.get((scope.get("method", ""), scope.get("path", "")))
        if handle is None:
            return await self._app(scope, receive, send)
        # The first header of each name. A dozen look-ups in starlette's `Headers` take longer than
        # a heartbeat.
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        grant = self._authenticator.check_agent(scope, headers)
        if not isinstance(grant, AgentGrant):
            return await _send_refusal(grant, scope, receive, send)
        try:
            body = await handle(headers, receive, self._watch, grant)
        except Problem as problem:
            return await _send_refusal(problem.make_response(), scope, receive, send)
        except ClientDisconnect:
            return None
        except Exception as error:
            return await _send_refusal(_report_bug(error), scope, receive, send)
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


def _report_bug(error: Exception) -> Response:
    log.error("a heartbeat failed; please report this", exc_info=error)
    return Problem(500, INTERNAL_ERROR_DETAIL).make_response()


# A handler returns the JSON of its reply. It raises Problem or ClientDisconnect.
_Handler = Callable[[Mapping[str, str], Receive, Watch, AgentGrant], Coroutine[None, None, bytes]]


async def _handle_heartbeat(
    headers: Mapping[str, str], receive: Receive, watch: Watch, grant: AgentGrant
) -> bytes:
    is_urgent = headers.get("priority") == URGENT_PRIORITY
    try:
        body = await _read_body(headers, receive, grant)
        decode = _prepare_heartbeat(watch, body, grant, is_urgent)
        return _encode_reply(await watch.heartbeat_queue.apply(decode, is_urgent))
    except Problem as problem:
        _count_refusal(watch, problem)
        raise


async def _handle_poll(
    headers: Mapping[str, str], receive: Receive, watch: Watch, grant: AgentGrant
) -> bytes:
    """Waits for commands."""
    agent = heartbeat_checks.decode_head(await _read_body(headers, receive, grant)).agent
    if agent is None:
        raise Problem(422, 'the body must name the node agent: {"agent": ID}')
    jobs = watch.shared.fleet.list_jobs(agent)
    if not all(may_report_job(grant.job, job) for job in jobs):
        raise Problem(403, "the token is another job's than that of the node agent")
    if watch.shared.commands.waiting_count >= limits.WAITING_AGENTS.maximum:
        raise limits.WAITING_AGENTS.make_problem()
    await _wait_while_connected(watch.shared.commands.wait_for_commands(agent, POLL_S), receive)
    commands = [
        codec.encode_message(command) for command in watch.shared.commands.take_unsent(agent)
    ]
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


async def _handle_proof_request(
    headers: Mapping[str, str], receive: Receive, watch: Watch, grant: AgentGrant
) -> bytes:
    await _read_body(headers, receive, grant)
    return b"{}"


async def _read_body(headers: Mapping[str, str], receive: Receive, grant: AgentGrant) -> bytes:
    """The decompressed body. Raises Problem if it is too large or does not match its headers, and
    ClientDisconnect if it ends early.
    """
    _check_content_coding(headers)  # a refusal comes before a large body is read
    content_length = headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > limits.BODY.maximum:
        raise limits.BODY.make_problem(remedy=_SIZE_REMEDY)
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
        if size > limits.BODY.maximum:
            raise limits.BODY.make_problem(remedy=_SIZE_REMEDY)
    return _decode_body(headers, b"".join(parts), grant)


def build_router(state: AppState) -> APIRouter:
    """The routes of node agents, for ``/docs`` only: `HeartbeatFastPath` answers before them."""
    routes = APIRouter(tags=["agents"])

    @routes.post(
        HEARTBEAT_PATH,
        summary="A node agent's report; the reply says what it should do next",
        openapi_extra=_describe_body({"$ref": "#/components/schemas/HeartbeatBody"}),
    )
    async def post_heartbeat() -> Response:
        raise NotImplementedError

    @routes.post(
        COMMANDS_PATH,
        summary="Waits for commands for a node agent",
        openapi_extra=_describe_body(
            {
                "type": "object",
                "required": ["agent"],
                "properties": {"agent": {"type": "string"}},
            }
        ),
    )
    async def post_poll() -> Response:
        """The reply comes as soon as there is a command, or without one after `poll_s` seconds of the
        reply to a heartbeat.
        """
        raise NotImplementedError

    @routes.get(
        PROOF_PATH,
        summary="Proves that the server knows the token, before an agent sends stacks to it",
    )
    async def get_proof() -> dict[str, str]:
        """The ``Hangwatch-Proof`` header of the answer to a signed request is the proof."""
        raise NotImplementedError

    return routes


def _describe_body(schema: Mapping[str, object]) -> dict[str, object]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@dataclass(frozen=True, slots=True)
class HeartbeatAnswerer:
    """Answers the heartbeats that the process for node agents' connections has read."""

    watch: Watch
    authenticator: Authenticator

    def answer_request(self, request: WorkerFrame, send_response: Callable[[bytes], None]) -> None:
        """Queues a heartbeat, and sends the response once it is applied or refused."""
        try:
            path, headers = _parse_request_head(request.head)
            peer_uid = None if request.peer_uid < 0 else request.peer_uid
            scope = {"method": "POST", "path": path, "root_path": "", PEER_UID: peer_uid}
            grant = self.authenticator.check_agent(scope, headers)
            if not isinstance(grant, AgentGrant):
                return send_response(_format_refusal(grant))
            body = _decode_body(headers, request.body, grant)
            is_urgent = headers.get("priority") == URGENT_PRIORITY
            decode = _prepare_heartbeat(self.watch, body, grant, is_urgent)

            def take_reply(reply: heartbeat.HeartbeatReply | Exception) -> None:
                if isinstance(reply, Exception):
                    return send_response(_format_refusal(self._make_refusal(reply)))
                encoded = _encode_reply(reply)
                headers_sent = grant.make_headers(encoded)
                return send_response(_join_response(_REPLY_START, headers_sent, encoded))

            self.watch.heartbeat_queue.submit(decode, is_urgent, request.arrived_at, take_reply)
        except Exception as error:
            send_response(_format_refusal(self._make_refusal(error)))

    def _make_refusal(self, error: Exception) -> Response:
        if isinstance(error, Problem):
            _count_refusal(self.watch, error)
            return error.make_response()
        return _report_bug(error)


def _parse_request_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The path, and the first header of each name, in lower case."""
    request_line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers.setdefault(name.lower(), value.strip())
    return request_line.split(" ", 2)[1], headers


def _format_refusal(response: Response) -> bytes:
    response.headers.update(SECURITY_HEADERS)
    start = _format_status(response.status_code)
    return _join_response(start, response.raw_headers, bytes(response.body))


def _format_status(status: int) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (status, http.HTTPStatus(status).phrase.encode())


# The beginning of each successful reply.
_REPLY_START = _format_status(200) + b"".join(b"%s: %s\r\n" % header for header in _HEADERS)


def _join_response(start: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [b"%s: %s\r\n" % (name, value) for name, value in headers if name != b"content-length"]
    return b"%s%scontent-length: %d\r\n\r\n%s" % (start, b"".join(lines), len(body), body)


def _prepare_heartbeat(
    watch: Watch, body: bytes, grant: AgentGrant, is_urgent: bool
) -> DecodeHeartbeat:
    """The function that decodes a heartbeat once it is its turn, and raises Problem if it may not
    be applied. Raises Problem if the server is overloaded.
    """
    refusal = watch.shared.load.make_refusal(is_urgent)
    if refusal is not None:
        watch.heartbeats.refuse_heartbeat(heartbeat_checks.decode_head(body).agent)
        raise refusal

    def decode_heartbeat() -> heartbeat.Heartbeat:
        beat = parse_heartbeat(body)
        check_job(beat, grant.job)
        check_memory(
            beat, watch.shared.fleet, beat.agent in watch.shared.agents, len(watch.shared.agents)
        )
        if watch.job_claims is not None:
            check_claims(watch.job_claims, beat)
        return beat

    return decode_heartbeat


def check_claims(claims: JobClaims, beat: heartbeat.Heartbeat) -> None:
    """Raises Problem 421 if another server has the job of a heartbeat, and 503 until that is known."""
    job = claims.find_unheld_job(beat)
    if job is None:
        return
    if job in claims.foreign:
        raise Problem(421, f"another server of this database has job {job!r}")
    raise Problem(
        503,
        "the database is being asked which server has the job",
        headers={"Retry-After": "1"},
    )


def _encode_reply(reply: heartbeat.HeartbeatReply) -> bytes:
    return msgspec.json.encode(codec.encode_message(reply))


def _count_refusal(watch: Watch, problem: Problem) -> None:
    """Counts a heartbeat that is not applied because of what it contains."""
    if problem.status in _NOT_HERE_STATUSES:
        return
    watch.shared.counters.malformed += 1
    watch.shared.counters.refusals_by_limit.update(problem.limits)


def _check_content_coding(headers: Mapping[str, str]) -> bool:
    """Whether the body is compressed. Raises Problem for a compression other than gzip."""
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise Problem(
            415,
            f"content encoding {coding} is not supported; send the body plain or as gzip",
            headers={"Accept-Encoding": "gzip"},
        )
    return coding == "gzip"


def _decode_body(headers: Mapping[str, str], body: bytes, grant: AgentGrant) -> bytes:
    """The decompressed body. Raises Problem if it is too large or does not match its headers."""
    is_compressed = _check_content_coding(headers)
    grant.check_body(body)
    return decompress_body(body) if is_compressed else body


def decompress_body(body: bytes) -> bytes:
    """The content of a gzip stream. Raises Problem for anything else, and as soon as a part shows that
    it holds more than a heartbeat may: 63 KB can become 64 MB of values.
    """
    stream = zlib.decompressobj(wbits=31)
    parts: list[bytes] = []
    size, volume = 0, BodyVolume()
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
        if size > limits.UNPACKED_BODY.maximum:
            raise limits.UNPACKED_BODY.make_problem(remedy=_SIZE_REMEDY)
        volume.add_part(part)
    return b"".join(parts)
