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

from hangwatch.agent.node.reporting.uplink import (
    PATIENT_READ_TIMEOUT_S,
    draw_backoff_s,
    encode_body,
)
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.protocol.codec import decode_reply, encode_message
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import Heartbeat, HeartbeatReply

from .parallel_job import NEIGHBOURS_WAIT_AFTER_S, SimulatedFault
from .simulated_host import SimulatedHost

if TYPE_CHECKING:
    from .agent_pool import NodeAgentPool

SCAN_INTERVAL_S = 0.5  # between two scans of its ranks, as in the node agent
CHANGE_DETECTED_S, WAIT_DETECTED_S = 0.01, MIN_WAIT_S  # until a scan shows a change, and a wait
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
        self._sent_at = 0.0
        self._is_busy = False  # connecting, or a heartbeat is in flight
        self._in_flight: Heartbeat | None = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def begin_attempt(self) -> None:
        """The job is restarted, with a new node agent."""
        self.is_finished = False
        self.host.begin_attempt()
        self._in_flight = None

    def delay_heartbeat(self, delay_s: float) -> None:
        """The next heartbeat is due then."""
        self.host.schedule.delay(time.monotonic_ns() + int(delay_s * 1e9))
        self._continue()

    def report_exit(self) -> None:
        """One of its ranks has ended, which is reported immediately."""
        self.host.schedule.hasten()
        self._continue()

    def schedule_scans(self, fault: SimulatedFault) -> None:
        """Scans the processes when a new fault has changed them, and when they have waited for a while."""
        loop = self.pool.loop
        for after_s in (CHANGE_DETECTED_S, NEIGHBOURS_WAIT_AFTER_S + WAIT_DETECTED_S):
            spread_s = random.uniform(0.0, SCAN_INTERVAL_S)
            loop.call_at(fault.starts_at + after_s + spread_s, self._scan_processes)

    def _scan_processes(self) -> None:
        if self._is_busy:  # the reply would set another time
            self.pool.loop.call_later(SCAN_INTERVAL_S, self._scan_processes)
        elif not self.is_finished:
            self.host.scan_processes(time.monotonic())
            self._continue()

    def handle_failure(self) -> None:
        self._is_busy = False
        self.pool.counts.failures += 1
        self._schedule_retry()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._is_busy = transport, False
        self._send_request(transport)

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

    def _continue(self) -> None:
        """Sends the next heartbeat if it is due, or when it is."""
        if self._is_busy or self.is_finished:
            return
        schedule, loop = self.host.schedule, self.pool.loop
        if not schedule.is_due(time.monotonic_ns(), may_hasten=not self._failures):
            self._set_timer(loop.call_at(schedule.next_ns / 1e9, self._continue))
        elif self.pool.is_silent(self.host.number, time.monotonic()):
            self.delay_heartbeat(1.0)
        elif self._transport is None:
            self._is_busy = True
            self.pool.connect_agent(self)
        else:
            self._send_request(self._transport)

    def _send_request(self, transport: asyncio.Transport) -> None:
        counts, loop = self.pool.counts, self.pool.loop
        counts.lags.append(max(0.0, loop.time() - self.host.schedule.next_ns / 1e9))
        self._in_flight = self.host.compose_heartbeat(loop.time())
        document = encode_message(self._in_flight)
        body, headers = encode_body(document, urgent=self.host.is_urgent)
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
        self.delay_heartbeat(retry_after_s + draw_backoff_s(self._failures))

    def _handle_reply(self, reply: HeartbeatReply) -> None:
        heartbeat, self._in_flight = self._in_flight, None
        if heartbeat is None:  # the reply is to the node agent of the former attempt
            return self._continue()
        now = time.monotonic()
        self.host.apply_reply(heartbeat, reply, now)
        self._failures = 0
        self.pool.counts.resyncs += reply.resync
        self.pool.counts.interval_s = reply.interval_s
        self.is_finished = now >= self.pool.run.ended_at and not reply.resync
        for command in reply.commands:
            delay_s = PYSPY_DURATION_S if command.kind is CommandKind.STACKS else 0.0
            self.pool.loop.call_later(delay_s, self._execute_command, command)
        return self._continue()

    def _execute_command(self, command: Command) -> None:
        self.host.execute_command(command, time.monotonic())
        self._continue()


def read_number_header(head: bytes, name: bytes) -> int:
    """A header of a response; 0 if it is absent."""
    value = head.lower().partition(name + b":")[2]
    return int(value.split(b"\r\n")[0] or 0)
