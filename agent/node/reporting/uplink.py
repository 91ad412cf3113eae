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

from hangwatch.protocol.heartbeat import URGENT_PRIORITY, HeartbeatReply, decode_reply

PATH = "/api/v1/heartbeats"
TIMEOUT_S = 5.0
KEEP_ALIVE = 60.0  # seconds
PATIENT_S = 15.0  # a server of many hosts lets their heartbeats wait in line
COMPRESS_FROM = 4096  # bytes
_LONGEST_BACKOFF_S = 10.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_PAUSE_S = 60.0


class TargetError(ValueError):
    """HANGWATCH_URL is no URL of a server. The message says what one looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the server is. ``base`` has neither credentials nor a trailing slash, and keeps a path
    prefix.
    """

    base: str
    token: str = ""

    @classmethod
    def parse(cls, url: str, token: str = "") -> Target:
        """The token in the URL (``http://:TOKEN@host``) goes before ``token``. Raises TargetError."""
        example = "it looks like http://:TOKEN@master:8642"
        try:
            parsed = httpx.URL(url.strip())
        except (httpx.InvalidURL, ValueError) as error:
            raise TargetError(f"HANGWATCH_URL={url!r} is no URL ({error}): {example}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise TargetError(f"HANGWATCH_URL={url!r} names no http or https server: {example}")
        bare = parsed.copy_with(username=None, password=None, query=None, fragment=None)
        return cls(base=str(bare).rstrip("/"), token=parsed.password or parsed.username or token)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def __str__(self) -> str:
        return self.base


def client(target: Target, timeout_s: float = TIMEOUT_S) -> httpx.Client:
    """The environment's proxies are not used: a cluster's proxy for the outside world would swallow
    heartbeats.

    A connection is kept from one heartbeat to the next, which in a large job are far apart, but not
    for as long as servers keep theirs. Certificates are those that the system and SSL_CERT_FILE
    name, where a cluster keeps its own; loading any takes memory.
    """
    verify = ssl.create_default_context() if target.base.startswith("https:") else False
    limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE)
    return httpx.Client(
        headers=target.headers, timeout=timeout_s, trust_env=False, verify=verify, limits=limits
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one heartbeat. Without ``reply`` it counts as lost, and ``problem`` says why."""

    number: int
    reply: HeartbeatReply | None = None
    problem: str = ""
    refused: bool = (
        False  # the server understood it and will not have it: the same again would fare the same
    )
    retry_after_s: float = 0.0  # the server asked to be left alone for so long
    size: int = 0
    sent_s: float = (
        0.0  # and `back_s`: when it left and when it was answered, on this host's monotonic clock
    )
    back_s: float = 0.0


def backoff_s(failures: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """How long to wait after so many failures in a row: full jitter, so that a thousand nodes do
    not return as one.

    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return draw(0.0, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16)))


class Uplink:
    """A thread that posts what it is given, one heartbeat at a time."""

    def __init__(
        self, target: Target, wake: Callable[[], None], timeout_s: float = TIMEOUT_S
    ) -> None:
        self.target = target
        self.busy = False
        self._client = client(target, timeout_s)
        self._url = httpx.URL(target.base + PATH)
        self._wake = wake
        self._given: queue.SimpleQueue[tuple[int, Any, bool, bool] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="uplink", daemon=True)
        self._thread.start()

    def post(self, number: int, beat: Any, *, urgent: bool = False, patient: bool = False) -> None:
        """Hands over one JSON-ready heartbeat; `busy` until its `outcome` was taken."""
        self.busy = True
        self._given.put((number, beat, urgent, patient))

    def outcome(self, wait_s: float | None = None) -> Outcome | None:
        """What became of the heartbeat, once that is known."""
        try:
            found = self._outcomes.get(timeout=wait_s) if wait_s else self._outcomes.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        return found

    def close(self) -> None:
        self._given.put(None)
        self._thread.join(1.0)

    def _work(self) -> None:
        while (given := self._given.get()) is not None:
            number, beat, urgent, patient = given
            try:
                outcome = self.send(number, beat, urgent=urgent, patient=patient)
            except Exception as error:  # the loop waits for an outcome, whatever happens
                outcome = Outcome(
                    number=number, problem=f"{type(error).__name__}: {error}", refused=True
                )
            self._outcomes.put(outcome)
            self._wake()
        self._client.close()

    def send(
        self, number: int, beat: Any, *, urgent: bool = False, patient: bool = False
    ) -> Outcome:
        """Posts one heartbeat and waits for the answer."""
        body = json.dumps(beat, separators=(",", ":")).encode()
        headers = {
            "Content-Type": "application/json",
            **({"Priority": URGENT_PRIORITY} if urgent else {}),
        }
        if len(body) > COMPRESS_FROM:
            body = gzip.compress(body, 1)
            headers["Content-Encoding"] = "gzip"
        sent_s = time.monotonic()
        try:
            timeout = httpx.Timeout(TIMEOUT_S, read=PATIENT_S) if patient else self._client.timeout
            response = self._client.post(self._url, content=body, headers=headers, timeout=timeout)
            back_s = time.monotonic()
        except httpx.HTTPError as error:
            return Outcome(
                number=number,
                problem=f"no answer from {self.target}: {error or type(error).__name__}",
                size=len(body),
            )
        if response.status_code // 100 != 2:
            return Outcome(
                number=number,
                problem=complaint(response.status_code, str(self.target), detail(response)),
                refused=response.status_code in (400, 413, 422),
                retry_after_s=retry_after_s(response.headers.get("Retry-After", "")),
                size=len(body),
            )
        try:
            return Outcome(
                number=number,
                reply=decode_reply(response.json()),
                size=len(body),
                sent_s=sent_s,
                back_s=back_s,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return Outcome(
                number=number,
                problem=(
                    f"{self.target} answers, but not as a hangwatch server: check HANGWATCH_URL"
                ),
            )


def retry_after_s(told: str) -> float:
    """Seconds, as a server that is overloaded gives them; 0 for what is no number of them."""
    return min(float(told), _LONGEST_PAUSE_S) if told.isdecimal() else 0.0


def detail(response: httpx.Response) -> str:
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


def complaint(status: int, where: str, detail: str = "") -> str:
    """What an HTTP error means here and what to do about it; ``detail`` is what the server said."""
    if status in (401, 403):
        return (
            f"{where} refuses the token ({status}): start the job with the HANGWATCH_URL= line that"
            " hangwatch-server printed"
        )
    if status == 404 or 300 <= status < 400:
        return (
            f"{where} has no {PATH} ({status}): it is no hangwatch server, or a path prefix is"
            " missing in HANGWATCH_URL"
        )
    if status in (400, 413, 422):
        why = f": {detail}" if detail else ": install the same hangwatch on both sides"
        return f"{where} does not take this node agent's heartbeat ({status}){why}"
    return f"{where} answers {status}" + (f": {detail}" if detail else "")
