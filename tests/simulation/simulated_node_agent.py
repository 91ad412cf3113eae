"""A simulated node agent: one connection to the server, and heartbeats at the server's pace."""

from __future__ import annotations

import asyncio
import json
import operator
import random
import statistics
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from hangwatch.agent.node.composer import InFlightHeartbeat
from hangwatch.agent.node.reporting.uplink import (
    PATIENT_READ_TIMEOUT_S,
    draw_backoff_s,
    encode_body,
)
from hangwatch.model.kinds import VerdictKind
from hangwatch.protocol.codec import decode_reply, encode_message
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import HeartbeatReply

from .parallel_job import NEIGHBOURS_WAIT_AFTER_S, JobRun, SimulatedFault
from .simulated_host import SimulatedHost, list_streams

if TYPE_CHECKING:
    from .agent_pool import NodeAgentPool

SCAN_INTERVAL_S = 0.5  # between two scans of its ranks, as in the node agent
CHANGE_DETECTED_S, WAIT_DETECTED_S = 0.25, 1.25  # until a scan shows a change, and a wait
PYSPY_DURATION_S = 0.3
_REQUEST_LINE = "POST /api/v1/heartbeats HTTP/1.1"


@dataclass(slots=True)
class AgentCounts:
    """What the node agents of one process did."""

    heartbeats: int = 0
    bytes: int = 0
    failures: int = 0  # connections that failed, or were lost before a reply
    refused: int = 0  # replies with another status than 200
    resyncs: int = 0
    interval_s: float = 0.0
    max_response_s: float = 0.0
    # How many seconds after it was due each heartbeat was sent: what is late there makes verdicts
    # late that the server gave in time.
    lags: list[float] = field(default_factory=list, repr=False)

    @property
    def lag_text(self) -> str:
        """The simulation's own lag: "1, 240 ms" for the median and the worst."""
        lags = self.lags or [0.0]
        return f"{1000 * statistics.median(lags):.0f}, {1000 * max(lags):.0f} ms"

    def add_counts(self, other: AgentCounts) -> None:
        for count in fields(self):
            combine = max if count.name.endswith("_s") else operator.add
            both = combine(getattr(self, count.name), getattr(other, count.name))
            setattr(self, count.name, both)


class SimulatedNodeAgent(asyncio.Protocol):
    """The node agent of one host of the pool's job."""

    def __init__(self, pool: NodeAgentPool, host: int) -> None:
        self.pool, self.host = pool, SimulatedHost(host, lambda: pool.run)
        self.is_finished = False  # the server knows that all ranks have ended
        self._failures = 0  # in a row
        self._due_at = self._sent_at = 0.0
        self._changes_within_s: float | None = None  # in which the server expects changes
        self._is_urgent = self._is_urgent_after_reply = False
        self._is_busy = False  # connecting, or a heartbeat is in flight
        self._in_flight: InFlightHeartbeat | None = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def begin_attempt(self) -> None:
        """The job is restarted, with a new node agent."""
        self.is_finished = False
        self.host.begin_attempt()
        self._in_flight = None

    def schedule_heartbeat(self, delay_s: float) -> None:
        self._due_at = self.pool.loop.time() + delay_s
        self._set_timer(self.pool.loop.call_at(self._due_at, self._post_heartbeat))

    def report_exit(self) -> None:
        """One of its ranks has ended, which is reported immediately."""
        self._is_urgent = True
        self._post_heartbeat()

    def schedule_fault_report(self, fault: SimulatedFault) -> None:
        """Reports a new fault when the node agent would detect that its host differs from others."""
        detected_at = find_detection_time(self.pool.run, fault, self.host)
        if detected_at is not None:
            loop_time = self.pool.loop.time() + max(0.0, detected_at - time.monotonic())
            is_urgent = fault.kind is not VerdictKind.GROUP_MISMATCH
            self.pool.loop.call_at(loop_time, self._report_changes, is_urgent, loop_time)

    def handle_failure(self) -> None:
        self._is_busy = False
        self.pool.counts.failures += 1
        self._schedule_retry()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._is_busy = transport, False
        self._post_heartbeat()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._is_busy:
            self.handle_failure()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < read_number_header(head, b"content-length"):
            return
        self._received, self._is_busy = b"", False
        self._set_timer(None)
        counts = self.pool.counts
        counts.max_response_s = max(counts.max_response_s, self.pool.loop.time() - self._sent_at)
        if head[9:12] == b"200":
            self._handle_reply(decode_reply(json.loads(body)))
        else:
            counts.refused += 1
            self._schedule_retry(read_number_header(head, b"retry-after"))

    def _post_heartbeat(self) -> None:
        if self._is_busy or self.is_finished:
            self._is_urgent_after_reply = self._is_urgent
            return
        now = time.monotonic()
        if self.pool.is_silent(self.host.number, now):
            self.schedule_heartbeat(1.0)
        elif self._transport is None:
            self._is_busy = True
            self.pool.connect_agent(self)
        else:
            self._send_request(self._transport, now)

    def _send_request(self, transport: asyncio.Transport, now: float) -> None:
        counts, loop = self.pool.counts, self.pool.loop
        counts.lags.append(max(0.0, loop.time() - self._due_at))
        is_urgent, self._is_urgent = self._is_urgent or bool(self.host.outbox), False
        self._in_flight = self.host.compose_heartbeat(now)
        document = encode_message(self._in_flight.heartbeat)
        body, headers = encode_body(document, urgent=is_urgent)
        headers |= {"Host": "localhost", "Content-Length": str(len(body))}
        lines = [_REQUEST_LINE, *(f"{name}: {value}" for name, value in headers.items())]
        self._is_busy, self._sent_at = True, loop.time()
        counts.heartbeats += 1
        counts.bytes += len(body)
        transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._set_timer(loop.call_later(PATIENT_READ_TIMEOUT_S, transport.abort))

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _schedule_retry(self, retry_after_s: float = 0.0) -> None:
        """Sends again what the server has not received, but not before ``retry_after_s``."""
        self._failures += 1
        self.schedule_heartbeat(retry_after_s + draw_backoff_s(self._failures))

    def _handle_reply(self, reply: HeartbeatReply) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is None:  # of the node agent of the attempt before
            self.schedule_heartbeat(0.0)
            return
        self.host.apply_reply(flight, reply, time.monotonic())
        self._failures = 0
        if reply.resync:
            self.pool.counts.resyncs += 1
            self.schedule_heartbeat(reply.interval_s if flight.heartbeat.full else 0.0)
            return
        if time.monotonic() >= self.pool.run.ended_at:
            self.is_finished = True
            return
        interval_s = self.pool.counts.interval_s = reply.interval_s
        self._changes_within_s = reply.changes_s
        has_more, self._is_urgent_after_reply = self._is_urgent_after_reply, False
        self._is_urgent = has_more or reply.urgent
        self.schedule_heartbeat(0.0 if self.host.outbox or has_more else interval_s)
        for command in reply.commands:
            delay_s = PYSPY_DURATION_S if command.kind is CommandKind.STACKS else 0.0
            self.pool.loop.call_later(delay_s, self._execute_command, command)

    def _execute_command(self, command: Command) -> None:
        self.host.execute_command(command, time.monotonic())
        if not self._is_busy:
            self._post_heartbeat()

    def _report_changes(self, is_urgent: bool, detected_at: float) -> None:
        """Unless a heartbeat that was sent since the detection has reported them."""
        loop = self.pool.loop
        if self._is_busy:
            loop.call_later(SCAN_INTERVAL_S, self._report_changes, is_urgent, detected_at)
            return
        within_s = self._changes_within_s
        if within_s is None or self._sent_at >= detected_at or self.is_finished:
            return
        self._changes_within_s, self._is_urgent = None, is_urgent
        delay_s = random.uniform(0.0, within_s)
        if loop.time() + delay_s < self._due_at:
            self.schedule_heartbeat(delay_s)


def find_detection_time(run: JobRun, fault: SimulatedFault, host: SimulatedHost) -> float | None:
    """When the node agent detects that a fault makes its host differ from others; None if it does
    not.
    """
    is_culprit_host = fault.host == host.number
    changes_state = fault.kind in (VerdictKind.FROZEN_RANK, VerdictKind.CONCURRENT_USE)
    if fault.kind is VerdictKind.GROUP_MISMATCH or (is_culprit_host and changes_state):
        return fault.starts_at + CHANGE_DETECTED_S
    if run.shape.queues_calls:
        return None  # that a call may be unfinished does not make a host report early
    waiting_at = fault.starts_at + NEIGHBOURS_WAIT_AFTER_S
    is_stuck_host = is_culprit_host and fault.kind is VerdictKind.NO_PROGRESS
    if is_stuck_host or has_mixed_waits(run, host.ranks, waiting_at):
        return waiting_at + WAIT_DETECTED_S
    return None


def has_mixed_waits(run: JobRun, ranks: range, now: float) -> bool:
    """Some of the ranks wait and others do not, or they wait in different operations."""
    awaited_ops = set()
    for rank in ranks:
        pending = (stream.op for stream in list_streams(run, rank, now) if stream.pending_since)
        awaited_ops.add(next(pending, None))
    return len(awaited_ops) > 1


def read_number_header(head: bytes, name: bytes) -> int:
    """A header of a response; 0 if it is absent."""
    value = head.lower().partition(name + b":")[2]
    return int(value.split(b"\r\n")[0] or 0)
