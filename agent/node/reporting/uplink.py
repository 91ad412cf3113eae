"""Heartbeats to the server: one at a time, in a thread of its own, so that a slow network delays
nothing else.
"""

from __future__ import annotations

import gzip
import json
import queue
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from hangwatch.protocol.codec import decode_reply
from hangwatch.protocol.heartbeat import URGENT_PRIORITY, HeartbeatReply

HEARTBEAT_PATH = "/api/v1/heartbeats"
REQUEST_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 60.0  # seconds
PATIENT_READ_TIMEOUT_S = 15.0  # a server of many hosts lets their heartbeats wait in line
MIN_COMPRESSED_BYTES = 4096  # bytes
_MAX_BACKOFF_S = 10.0
_FIRST_BACKOFF_S = 0.5
_MAX_RETRY_AFTER_S = 60.0


class TargetError(ValueError):
    """HANGWATCH_URL is no URL of a server. The message says what one looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """Where the server is. ``base`` has neither credentials nor a trailing slash, and keeps a path
    prefix.
    """

    base_url: str
    token: str = ""

    @classmethod
    def from_url(cls, url: str, token: str = "") -> ServerTarget:
        """The token in the URL (``http://:TOKEN@host``) goes before ``token``. Raises TargetError."""
        example = "it looks like http://:TOKEN@master:8642"
        try:
            parsed = httpx.URL(url.strip())
        except (httpx.InvalidURL, ValueError) as error:
            raise TargetError(f"HANGWATCH_URL={url!r} is no URL ({error}): {example}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise TargetError(f"HANGWATCH_URL={url!r} names no http or https server: {example}")
        bare = parsed.copy_with(username=None, password=None, query=None, fragment=None)
        return cls(
            base_url=str(bare).rstrip("/"), token=parsed.password or parsed.username or token
        )

    @property
    def auth_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def __str__(self) -> str:
        return self.base_url


def make_client(target: ServerTarget, timeout_s: float = REQUEST_TIMEOUT_S) -> httpx.Client:
    """The environment's proxies are not used: a cluster's proxy for the outside world would swallow
    heartbeats.

    A connection is kept from one heartbeat to the next, which in a large job are far apart, but not
    for as long as servers keep theirs. Certificates are those that the system and SSL_CERT_FILE
    name, where a cluster keeps its own; loading any takes memory.
    """
    verify = ssl.create_default_context() if target.base_url.startswith("https:") else False
    limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE_S)
    return httpx.Client(
        headers=target.auth_headers,
        timeout=timeout_s,
        trust_env=False,
        verify=verify,
        limits=limits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOutcome:
    """What became of one heartbeat. Without ``reply`` it counts as lost, and ``problem`` says why."""

    number: int
    reply: HeartbeatReply | None = None
    problem: str = ""
    is_refused: bool = (
        False  # the server understood it and will not have it: the same again would fare the same
    )
    retry_after_s: float = 0.0  # the server asked to be left alone for so long
    body_bytes: int = 0
    sent_s: float = (
        0.0  # and `back_s`: when it left and when it was answered, on this host's monotonic clock
    )
    answered_s: float = 0.0


def draw_backoff_s(failures: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """How long to wait after so many failures in a row: full jitter, so that a thousand nodes do
    not return as one.

    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return draw(0.0, min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16)))


class Uplink:
    """A thread that posts what it is given, one heartbeat at a time."""

    def __init__(
        self, target: ServerTarget, wake: Callable[[], None], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self.target = target
        self.is_busy = False
        self._client = make_client(target, timeout_s)
        self._url = httpx.URL(target.base_url + HEARTBEAT_PATH)
        self._wake = wake
        self._heartbeat_queue: queue.SimpleQueue[tuple[int, Any, bool, bool] | None] = (
            queue.SimpleQueue()
        )
        self._outcomes: queue.SimpleQueue[HeartbeatOutcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_worker, name="uplink", daemon=True)
        self._thread.start()

    def post_heartbeat(
        self, number: int, heartbeat: Any, *, urgent: bool = False, patient: bool = False
    ) -> None:
        """Hands over one JSON-ready heartbeat; `busy` until its `outcome` was taken."""
        self.is_busy = True
        self._heartbeat_queue.put((number, heartbeat, urgent, patient))

    def take_outcome(self, wait_s: float | None = None) -> HeartbeatOutcome | None:
        """What became of the heartbeat, once that is known."""
        try:
            found = self._outcomes.get(timeout=wait_s) if wait_s else self._outcomes.get_nowait()
        except queue.Empty:
            return None
        self.is_busy = False
        return found

    def close(self) -> None:
        self._heartbeat_queue.put(None)
        self._thread.join(1.0)

    def _run_worker(self) -> None:
        while (given := self._heartbeat_queue.get()) is not None:
            number, beat, urgent, patient = given
            try:
                outcome = self.send_heartbeat(number, beat, urgent=urgent, patient=patient)
            except Exception as error:  # the loop waits for an outcome, whatever happens
                outcome = HeartbeatOutcome(
                    number=number, problem=f"{type(error).__name__}: {error}", is_refused=True
                )
            self._outcomes.put(outcome)
            self._wake()
        self._client.close()

    def send_heartbeat(
        self, number: int, heartbeat: Any, *, urgent: bool = False, patient: bool = False
    ) -> HeartbeatOutcome:
        """Posts one heartbeat and waits for the answer."""
        body = json.dumps(heartbeat, separators=(",", ":")).encode()
        headers = {
            "Content-Type": "application/json",
            **({"Priority": URGENT_PRIORITY} if urgent else {}),
        }
        if len(body) > MIN_COMPRESSED_BYTES:
            body = gzip.compress(body, 1)
            headers["Content-Encoding"] = "gzip"
        sent_s = time.monotonic()
        try:
            timeout = (
                httpx.Timeout(REQUEST_TIMEOUT_S, read=PATIENT_READ_TIMEOUT_S)
                if patient
                else self._client.timeout
            )
            response = self._client.post(self._url, content=body, headers=headers, timeout=timeout)
            back_s = time.monotonic()
        except httpx.HTTPError as error:
            return HeartbeatOutcome(
                number=number,
                problem=f"no answer from {self.target}: {error or type(error).__name__}",
                body_bytes=len(body),
            )
        if response.status_code // 100 != 2:
            return HeartbeatOutcome(
                number=number,
                problem=explain_status(
                    response.status_code, str(self.target), read_problem_detail(response)
                ),
                is_refused=response.status_code in (400, 413, 422),
                retry_after_s=parse_retry_after_s(response.headers.get("Retry-After", "")),
                body_bytes=len(body),
            )
        try:
            return HeartbeatOutcome(
                number=number,
                reply=decode_reply(response.json()),
                body_bytes=len(body),
                sent_s=sent_s,
                answered_s=back_s,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return HeartbeatOutcome(
                number=number,
                problem=(
                    f"{self.target} answers, but not as a hangwatch server: check HANGWATCH_URL"
                ),
            )


def parse_retry_after_s(header: str) -> float:
    """Seconds, as a server that is overloaded gives them; 0 for what is no number of them."""
    return min(float(header), _MAX_RETRY_AFTER_S) if header.isdecimal() else 0.0


def read_problem_detail(response: httpx.Response) -> str:
    """The sentence of a problem document (RFC 9457), if it is one."""
    try:
        told = (
            response.json()["detail"]
            if "problem+json" in response.headers.get("Content-Type", "")
            else ""
        )
    except (ValueError, KeyError, TypeError):
        return ""
    return str(told)[:300]


def explain_status(status: int, target: str, detail: str = "") -> str:
    """What an HTTP error means here and what to do about it; ``detail`` is what the server said."""
    if status in (401, 403):
        return (
            f"{target} refuses the token ({status}): start the job with the HANGWATCH_URL= line"
            " that hangwatch-server printed"
        )
    if status == 404 or 300 <= status < 400:
        return (
            f"{target} has no {HEARTBEAT_PATH} ({status}): it is no hangwatch server, or a path"
            " prefix is missing in HANGWATCH_URL"
        )
    if status in (400, 413, 422):
        why = f": {detail}" if detail else ": install the same hangwatch on both sides"
        return f"{target} does not take this node agent's heartbeat ({status}){why}"
    return f"{target} answers {status}" + (f": {detail}" if detail else "")
