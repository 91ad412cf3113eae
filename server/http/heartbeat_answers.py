"""Answers heartbeats that the process for node agents' connections has read (see `agent_worker`).
`heartbeats` answers those that arrive here, by the same steps.
"""

from __future__ import annotations

import http
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from fastapi.responses import Response

from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.heartbeat import URGENT_PRIORITY

from ..core.problems import Problem
from ..ingest import decoding
from ..ingest.heartbeat_checks import check_job, check_memory, parse_heartbeat
from ..ingest.heartbeat_queue import DecodeHeartbeat
from ..ingest.worker_frames import Frame
from ..monitor.job_claims import NOT_HERE_STATUSES
from ..monitor.watch import Watch
from . import error_pages
from .access import PEER_UID, AgentGrant, Authenticator
from .heartbeat_bodies import decode_body
from .rendering import SECURITY_HEADERS

log = logging.getLogger("hangwatch")

REPLY_HEADERS = {"Content-Type": "application/json", **SECURITY_HEADERS}


@dataclass(frozen=True, slots=True)
class HeartbeatAnswerer:
    watch: Watch
    authenticator: Authenticator

    def answer_request(self, request: Frame, send_response: Callable[[bytes], None]) -> None:
        """An `agent_worker.AnswerRequest`."""
        try:
            self._submit_heartbeat(request, send_response)
        except Exception as error:
            send_response(format_refusal(self._make_refusal(error)))

    def _submit_heartbeat(self, request: Frame, send_response: Callable[[bytes], None]) -> None:
        """Raises Problem."""
        path, headers = parse_request_head(request.head)
        peer_uid = None if request.peer_uid < 0 else request.peer_uid
        scope = {"method": "POST", "path": path, "root_path": "", PEER_UID: peer_uid}
        grant = self.authenticator.check_agent(scope, headers)
        if not isinstance(grant, AgentGrant):
            return send_response(format_refusal(grant))
        body = decode_body(headers, request.body, grant)
        is_urgent = headers.get("priority") == URGENT_PRIORITY
        decode = prepare_heartbeat(self.watch, body, grant, is_urgent)

        def take_reply(reply: heartbeat.HeartbeatReply | Exception) -> None:
            if isinstance(reply, Exception):
                return send_response(format_refusal(self._make_refusal(reply)))
            encoded = encode_reply(reply)
            return send_response(format_reply(grant.make_headers(encoded), encoded))

        return self.watch.heartbeat_queue.submit(decode, is_urgent, request.arrived_at, take_reply)

    def _make_refusal(self, error: Exception) -> Response:
        if isinstance(error, Problem):
            count_refusal(self.watch, error)
            return error.make_response()
        log.error("a heartbeat failed; please report this", exc_info=error)
        return Problem(500, error_pages.INTERNAL_ERROR_DETAIL).make_response()


def prepare_heartbeat(
    watch: Watch, body: bytes, grant: AgentGrant, is_urgent: bool
) -> DecodeHeartbeat:
    """What decodes a heartbeat once it is its turn. Raises Problem if the server is overloaded."""
    refusal = watch.load.make_refusal(is_urgent)
    if refusal is not None:
        watch.heartbeats.refuse_heartbeat(decoding.decode_head(body).agent)
        raise refusal
    return lambda: _decode_heartbeat(watch, body, grant)


def _decode_heartbeat(watch: Watch, body: bytes, grant: AgentGrant) -> heartbeat.Heartbeat:
    """A heartbeat that may be applied. Raises Problem."""
    beat = parse_heartbeat(body)
    check_job(beat, grant.job)
    check_memory(beat, watch.fleet, beat.agent in watch.agents, len(watch.agents))
    if watch.job_claims is not None:
        watch.job_claims.check_heartbeat(beat)
    return beat


def encode_reply(reply: heartbeat.HeartbeatReply) -> bytes:
    return msgspec.json.encode(codec.encode_message(reply))


def count_refusal(watch: Watch, problem: Problem) -> None:
    """Counts a heartbeat that is not applied because of what it contains."""
    if problem.status in NOT_HERE_STATUSES:
        return
    watch.counters.malformed += 1
    watch.counters.refusals_by_limit.update(problem.limits)


def parse_request_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The path, and the first header of each name, in lower case."""
    request_line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers.setdefault(name.lower(), value.strip())
    return request_line.split(" ", 2)[1], headers


def format_refusal(response: Response) -> bytes:
    response.headers.update(SECURITY_HEADERS)
    return _join_response(
        _format_status(response.status_code), response.raw_headers, bytes(response.body)
    )


def format_reply(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A successful response; ``headers`` are in addition to the usual ones."""
    return _join_response(_REPLY_HEAD, headers, body)


def _format_status(status: int) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (status, http.HTTPStatus(status).phrase.encode())


def _join_response(start: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [b"%s: %s\r\n" % (name, value) for name, value in headers if name != b"content-length"]
    return b"%s%scontent-length: %d\r\n\r\n%s" % (start, b"".join(lines), len(body), body)


_REPLY_HEAD = _format_status(200) + b"".join(
    f"{name.lower()}: {value}\r\n".encode() for name, value in REPLY_HEADERS.items()
)
