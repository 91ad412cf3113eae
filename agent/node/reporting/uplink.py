"""Sends heartbeats to the server: which replies to commands they carry, and what happens if the server
does not answer.

`Uplink` sends them one at a time in a separate thread, so that a slow network delays nothing else.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import queue
import random
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from hangwatch.protocol.codec import decode_reply
from hangwatch.protocol.commands import RecordingReply
from hangwatch.protocol.heartbeat import (
    HEARTBEAT_PATH,
    URGENT_PRIORITY,
    AbortReply,
    CallsReply,
    HardwareReply,
    Heartbeat,
    HeartbeatReply,
    KernelsReply,
    StackReply,
    get_family,
)
from hangwatch.ring.parts import compute_age_s

from ...transport.client import ServerTarget, SignedClient, TransportError, order_targets
from ..system.runtime import AgentLog, OrderWorker

# Fields that hold stacks, kernels, call sites or arguments of calls.
CONFIDENTIAL_FIELDS = frozenset(("samples", "kernels", "calls", "traces", "recordings"))
REQUEST_TIMEOUT_S = 5.0
PATIENT_READ_TIMEOUT_S = 15.0  # a server with many hosts queues their heartbeats
MIN_COMPRESSED_BYTES = 8192  # a host with eight blocked ranks sends less
# The server names the place of an error so.
_PROCESS_ERROR = re.compile(r"at `\$\.processes\[(\d{1,6})\]")
_UNPROVEN_INTERVAL_S = 0.5  # the shortest interval between heartbeats to a server that is not known
_MAX_CPU_SHARE = 0.05  # the part of a core that replies of such a server may take
_MAX_BACKOFF_S = 10.0
_FIRST_BACKOFF_S = 0.5
_MAX_RETRY_AFTER_S = 60.0
_USER_NOTICE_AFTER_NS = 3_000_000_000  # the server's absence until the user is notified
MAX_REPLIES = 256
_MAX_BULKY_REPLIES = {"hardware": 8, "recordings": 64}
MAX_FRAMES = 50_000  # all stacks together then take a few megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOutcome:
    """The result of sending one heartbeat. Without ``reply`` it failed, and ``problem`` says why."""

    reply: HeartbeatReply | None = None
    problem: str = ""
    is_refused: bool = False  # the server would refuse the same heartbeat again
    refused_key: str = ""  # names the process in whose update the server refuses a value
    is_misdirected: bool = False  # another server may take it
    retry_after_s: float = 0.0  # the backoff that the server requests
    # When it was sent and answered, on this host's monotonic clock.
    sent_s: float = 0.0
    answered_s: float = 0.0


def draw_backoff_s(failures: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """How long to wait after this many consecutive failures: full jitter, so that a thousand nodes
    do not return at the same moment.

    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return draw(0.0, min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16)))


class HeartbeatPost(NamedTuple):
    """A JSON-ready heartbeat. The server handles an ``urgent`` one before others; a ``patient`` one
    waits longer for the reply.
    """

    content: Any
    urgent: bool = False
    patient: bool = False


class Uplink(OrderWorker[HeartbeatPost, HeartbeatOutcome]):
    """A thread that posts heartbeats, one at a time."""

    def __init__(
        self,
        targets: Sequence[ServerTarget],
        wake: Callable[[], None],
        timeout_s: float = REQUEST_TIMEOUT_S,
        warn_once: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("uplink", wake, max_waiting=1)
        self.target = targets[0]  # the server that gets the heartbeats
        self.is_busy = False
        self._targets = tuple(targets)
        self._is_ordered = len(self._targets) == 1
        self._timeout_s = timeout_s
        self._client = SignedClient(self.target, timeout_s)
        self._warn_once = warn_once

    def post_heartbeat(
        self, heartbeat: Any, *, urgent: bool = False, patient: bool = False
    ) -> None:
        """Queues one `HeartbeatPost`; `is_busy` until `take_outcome` has returned its outcome."""
        self.is_busy = True
        self.submit_order(HeartbeatPost(heartbeat, urgent, patient))

    def take_outcome(self, wait_s: float | None = None) -> HeartbeatOutcome | None:
        """The outcome of the posted heartbeat; None while there is none."""
        self._client.enforce_deadline()
        try:
            outcome = self._results.get(block=bool(wait_s), timeout=wait_s)
        except queue.Empty:
            return None
        self.is_busy = False
        return outcome

    def close(self) -> None:
        """Closes the connection, unless a heartbeat is being sent."""
        if not self.is_busy:
            self._client.close()

    def explain_failure(self, _: HeartbeatPost, error: str) -> HeartbeatOutcome:
        return HeartbeatOutcome(problem=error, is_refused=True)

    def execute_order(self, order: HeartbeatPost) -> HeartbeatOutcome:
        """Posts one heartbeat and waits for the reply; tries the servers until one takes it."""
        if not self._is_ordered:
            # All hosts of a job try the servers in one order, as soon as the job is known.
            identities = [update.get("identity") for update in order.content.get("processes", ())]
            jobs = [identity["job"] for identity in identities if identity]
            if jobs:
                self._targets = order_targets(self._targets, get_family(min(jobs)))
                self._is_ordered = True
                self._use_target(self._targets[0])
        for _ in self._targets:
            outcome = self._send_to_target(order)
            if not outcome.is_misdirected:
                break
            following = self._targets.index(self.target) + 1
            self._use_target(self._targets[following % len(self._targets)])
        return outcome

    def _use_target(self, target: ServerTarget) -> None:
        if target is not self.target:
            self._client.close()
            self.target = target
            self._client = SignedClient(target, self._timeout_s)

    def _send_to_target(self, post: HeartbeatPost) -> HeartbeatOutcome:
        """Whatever a server replies that has not proven itself, it takes little of this host's CPU time."""
        body, headers = encode_body(post.content, urgent=post.urgent)
        began_cpu_s = time.thread_time()
        outcome = self._exchange(post, body, headers)
        if self._client.is_server_known:
            return outcome
        pause_s = compute_pause_s(began_cpu_s)
        if outcome.reply is None:
            return replace(outcome, retry_after_s=max(outcome.retry_after_s, pause_s))
        reply = outcome.reply
        shortest_s = max(_UNPROVEN_INTERVAL_S, pause_s)
        reply = replace(
            reply,
            commands=(),
            interval_s=max(reply.interval_s, shortest_s),
            steady_s=None if reply.steady_s is None else max(reply.steady_s, shortest_s),
            poll_s=None,
        )
        if outcome.reply.commands:
            self._warn_once(
                f"the orders of {self.target} are ignored: it has no token to prove that it is the"
                " job's"
            )
        return replace(outcome, reply=reply)

    def _exchange(
        self, post: HeartbeatPost, body: bytes, headers: Mapping[str, str]
    ) -> HeartbeatOutcome:
        sent_s = time.monotonic()
        try:
            response = self._client.send_request(
                "POST",
                HEARTBEAT_PATH,
                body,
                headers,
                read_timeout_s=PATIENT_READ_TIMEOUT_S if post.patient else None,
                is_confidential=not CONFIDENTIAL_FIELDS.isdisjoint(post.content),
            )
        except TransportError as error:
            problem = f"no answer from {self.target}: {error}"
            return HeartbeatOutcome(problem=problem, is_misdirected=True)
        answered_s = time.monotonic()
        status = response.status
        if status // 100 != 2:
            detail = refused_key = ""
            if "problem+json" in response.headers.get("Content-Type", ""):  # RFC 9457
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    document = response.parse_json()
                    detail = str(document["detail"])[:300]
                    if self._client.is_server_known or not self.target.token:
                        refused_key = find_refused_process(document["errors"], post.content)
            return HeartbeatOutcome(
                problem=explain_status(status, str(self.target), detail),
                is_refused=status in (400, 413, 422),
                refused_key=refused_key,
                is_misdirected=status == HTTPStatus.MISDIRECTED_REQUEST,
                retry_after_s=parse_retry_after_s(response.headers.get("Retry-After", "")),
            )
        if self.target.token and not self._client.is_server_known:
            problem = (
                f"{self.target} did not prove that it knows the token: nothing in its reply is"
                " applied"
            )
            return HeartbeatOutcome(problem=problem, is_misdirected=True)
        try:
            reply = decode_reply(response.parse_json())
        except (ValueError, KeyError, TypeError, AttributeError):
            problem = f"{self.target} answers, but not as a hangwatch server: check HANGWATCH_URL"
            return HeartbeatOutcome(problem=problem)
        return HeartbeatOutcome(reply=reply, sent_s=sent_s, answered_s=answered_s)


def encode_body(heartbeat: Any, *, urgent: bool) -> tuple[bytes, dict[str, str]]:
    """The body of the request that carries a JSON-ready heartbeat, and the headers that it needs."""
    body = json.dumps(heartbeat, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json"}
    if urgent:
        headers["Priority"] = URGENT_PRIORITY
    if len(body) > MIN_COMPRESSED_BYTES:
        body = gzip.compress(body, 1)
        headers["Content-Encoding"] = "gzip"
    return body, headers


def find_refused_process(errors: Any, heartbeat: Any) -> str:
    """The key of the process whose update has an error; empty if the errors name none. Raises TypeError
    or KeyError.
    """
    updates = heartbeat.get("processes", ())
    for error in errors:
        place = _PROCESS_ERROR.search(str(error["message"]))
        if place is not None:
            number = int(place[1])
            return str(updates[number]["key"]) if number < len(updates) else ""
    return ""


def compute_pause_s(began_cpu_s: float) -> float:
    """How long to wait after an exchange that began at this CPU time of this thread."""
    return (time.thread_time() - began_cpu_s) / _MAX_CPU_SHARE


def parse_retry_after_s(header: str) -> float:
    """The seconds in a Retry-After header, limited; 0 if it is not a number."""
    return min(float(header), _MAX_RETRY_AFTER_S) if header.isdecimal() else 0.0


def explain_status(status: int, target: str, detail: str = "") -> str:
    """What an HTTP error means and what to do about it; ``detail`` is the server's explanation."""
    if status in (401, 403):
        return (
            f"{target} refuses the token ({status}): start the job with the HANGWATCH_URL= line"
            " that hangwatch-server printed"
        )
    if status == 404 or 300 <= status < 400:
        return (
            f"{target} has no {HEARTBEAT_PATH} ({status}): it is not a hangwatch server, or a path"
            " prefix is missing in HANGWATCH_URL"
        )
    if status in (400, 413, 422):
        why = f": {detail}" if detail else ": install the same hangwatch on both sides"
        return f"{target} does not accept this node agent's heartbeat ({status}){why}"
    return f"{target} answers {status}" + (f": {detail}" if detail else "")


@dataclass(slots=True)
class OutageTracker:
    """Follows whether the server answers."""

    notice_path: Path
    log: AgentLog
    consecutive_refusals: int = 0
    _consecutive_failures: int = 0
    _began_ns: int = 0
    _problem: str = ""
    _is_user_notified: bool = False

    @property
    def is_failing(self) -> bool:
        """The last heartbeat failed."""
        return self._consecutive_failures > 0

    def record_failure(self, outcome: HeartbeatOutcome, now_ns: int) -> float:
        """Returns after how many seconds to try again."""
        self._consecutive_failures += 1
        if outcome.is_refused:
            self.consecutive_refusals += 1
        if not self._began_ns:
            self._began_ns = now_ns
            self._problem = outcome.problem
            self.log.warning(f"{outcome.problem}; the job continues, heartbeats are retried")
        return outcome.retry_after_s + draw_backoff_s(self._consecutive_failures)

    def record_success(self, server: str) -> None:
        """``server`` is its name in the log."""
        self._consecutive_failures = self.consecutive_refusals = 0
        if self._began_ns:
            self._began_ns = 0
            self.log.info(f"{server} answers again")
            with contextlib.suppress(OSError):  # a rank has taken the notice
                self.notice_path.unlink()

    def write_user_notice(self, now_ns: int) -> None:
        """Writes a line that a rank prints for the user, once the server is away for a while."""
        if self._is_user_notified or not self._began_ns:
            return
        if now_ns - self._began_ns < _USER_NOTICE_AFTER_NS:
            return
        self._is_user_notified = True
        temporary = self.notice_path.with_suffix(".new")
        try:
            temporary.write_text(
                f"{self._problem}; the job continues, unwatched until the server answers\n"
            )
            temporary.replace(self.notice_path)
        except OSError as error:
            self.log.warn_once(f"cannot write the notice for the user: {error.strerror}")


CommandReply = StackReply | KernelsReply | CallsReply | HardwareReply | AbortReply | RecordingReply
# The fields of a heartbeat that carry them
_FIELDS: dict[type[CommandReply], str] = {
    StackReply: "samples",
    KernelsReply: "kernels",
    CallsReply: "calls",
    HardwareReply: "hardware",
    AbortReply: "aborts",
    RecordingReply: "recordings",
}


class Outbox:
    """Keeps each reply until the server has acknowledged the heartbeat that carried it. Calls
    ``on_reply`` for each.
    """

    def __init__(self, on_reply: Callable[[], None] = lambda: None) -> None:
        self.dropped_count = 0
        self._on_reply = on_reply
        # The replies with the times at which they were taken, by field of the heartbeat.
        self._replies: dict[str, deque[tuple[CommandReply, int]]] = {
            name: deque(maxlen=_MAX_BULKY_REPLIES.get(name, MAX_REPLIES))
            for name in _FIELDS.values()
        }

    def __bool__(self) -> bool:
        return any(self._replies.values())

    def add_reply(self, reply: CommandReply, taken_ns: int) -> None:
        """Keeps a reply. If there are too many of its kind, the oldest are dropped."""
        self._on_reply()
        kept = self._replies[_FIELDS[type(reply)]]
        self.dropped_count += len(kept) == kept.maxlen
        kept.append((reply, taken_ns))
        if isinstance(reply, StackReply):
            frame_count = sum(_count_frames(sample) for sample, _ in kept)
            while frame_count > MAX_FRAMES and len(kept) > 1:
                frame_count -= _count_frames(kept.popleft()[0])
                self.dropped_count += 1

    def list_pending(self, now_ns: int) -> dict[str, Any]:
        """The replies, with their ages as of now, as fields of a heartbeat. The size of a heartbeat
        is limited, so it has the recordings up to the first with a profile.
        """
        pending: dict[str, Any] = {}
        for name, kept in self._replies.items():
            replies: list[CommandReply] = []
            for reply, taken_ns in kept:
                if isinstance(reply, StackReply | KernelsReply | HardwareReply):
                    reply = replace(reply, taken_s=compute_age_s(now_ns, taken_ns))
                replies.append(reply)
                if isinstance(reply, RecordingReply) and reply.profile:
                    break
            pending[name] = tuple(replies)
        return pending

    def mark_delivered(self, heartbeat: Heartbeat) -> None:
        """Removes the replies that a heartbeat carried."""
        for name, kept in self._replies.items():
            sent = {_identify(reply) for reply in getattr(heartbeat, name)}
            unsent = [entry for entry in kept if _identify(entry[0]) not in sent]
            kept.clear()
            kept.extend(unsent)


def _identify(reply: CommandReply) -> tuple[str, str, bool]:
    """A request for a recording has two replies; the first one says that it has begun."""
    return reply.key, reply.request, isinstance(reply, RecordingReply) and reply.begun


def _count_frames(reply: CommandReply) -> int:
    if not isinstance(reply, StackReply):
        return 0
    return sum(len(thread.frames) for thread in reply.threads)
