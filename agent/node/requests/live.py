"""Serves live requests: traces of calls while they are made, and recordings of where ranks spend
their time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import (
    CallKind,
    Command,
    CommandKind,
    RecordingReply,
    TracedCall,
    TraceReply,
    decode_tensor_stats,
)
from hangwatch.ring import checks
from hangwatch.ring.reader import RecordEntry
from hangwatch.ring.tracing import read_trace

from ..discovery.watched import WatchedProcess
from ..stacks.pyspy import PySpy
from .recordings import RecordingOrder, RecordingWorker

MAX_TRACE_REQUESTS = 256  # the oldest ones are dropped
MAX_TRACED_CALLS = 8000  # the limit of one heartbeat, for all requests together
TRACE_REQUEST_TTL_S = 15.0  # the server waits no longer for the reply
MAX_RECORDING_REPLIES = 64  # the oldest ones are dropped

UNKNOWN_PROCESS = "this node agent knows no such process"


class LiveRequests:
    """The open requests for traces and recordings.

    A trace is read from the ring again for each heartbeat until one was delivered, so no calls are
    kept here.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self.recording_worker = RecordingWorker(pyspy, wake)
        # The command and when it arrived, for each request id.
        self._trace_requests: dict[str, tuple[Command, int]] = {}
        self._recording_replies: list[RecordingReply] = []

    def __bool__(self) -> bool:
        """A reply waits to be sent."""
        return bool(self._recording_replies)

    def execute_command(
        self, command: Command, process: WatchedProcess | None, now_ns: int
    ) -> None:
        """Starts a trace or a recording. A request that cannot be served gets a reply that says why."""
        if command.kind is CommandKind.TRACE:
            self._trace_requests[command.id] = (command, now_ns)
            while len(self._trace_requests) > MAX_TRACE_REQUESTS:
                del self._trace_requests[next(iter(self._trace_requests))]
            return
        if command.stops:
            self.recording_worker.stop_recording(command.stops)
            return
        problem = self._start_recording(command, process)
        if problem:
            self._recording_replies.append(
                RecordingReply(key=command.key, request=command.id, error=problem)
            )

    def _start_recording(self, command: Command, process: WatchedProcess | None) -> str:
        """Returns why the recording cannot be made; empty if it was queued."""
        if process is None:
            return UNKNOWN_PROCESS
        if process.exit:
            return "the process has ended"
        order = RecordingOrder(
            key=command.key,
            request_id=command.id,
            pid=process.pid,
            start_ticks=process.start_ticks,
            seconds=command.seconds,
            rate=command.rate,
            native=command.native,
            gil=command.gil,
        )
        if not self.recording_worker.submit_order(order):
            return "too many recordings are queued on this node: try again later"
        return ""

    def collect_results(self) -> bool:
        """Collects the worker's replies. Returns True if a recording has begun or ended."""
        replies = self.recording_worker.take_results()
        self._recording_replies = (self._recording_replies + replies)[-MAX_RECORDING_REPLIES:]
        return bool(replies)

    def build_trace_replies(
        self, watched: Mapping[str, WatchedProcess], now_ns: int
    ) -> tuple[TraceReply, ...]:
        """A reply to each open trace request, with the calls up to now."""
        for request_id, (_, requested_ns) in list(self._trace_requests.items()):
            if (now_ns - requested_ns) / 1e9 >= TRACE_REQUEST_TTL_S:
                del self._trace_requests[request_id]
        max_calls = MAX_TRACED_CALLS // max(1, len(self._trace_requests))
        return tuple(
            _answer_trace(command, watched.get(command.key), max_calls, now_ns)
            for command, _ in self._trace_requests.values()
        )

    def next_recording_replies(self) -> tuple[RecordingReply, ...]:
        """The replies for the next heartbeat: up to the first with a profile, since the size of a
        heartbeat is limited.
        """
        for number, reply in enumerate(self._recording_replies, 1):
            if reply.profile:
                return tuple(self._recording_replies[:number])
        return tuple(self._recording_replies)

    def mark_delivered(self, heartbeat: heartbeat.Heartbeat) -> None:
        for trace_reply in heartbeat.traces:
            self._trace_requests.pop(trace_reply.request, None)
        delivered_ids = {id(reply) for reply in heartbeat.recordings}
        self._recording_replies = [
            reply for reply in self._recording_replies if id(reply) not in delivered_ids
        ]


def _answer_trace(
    command: Command, process: WatchedProcess | None, max_calls: int, now_ns: int
) -> TraceReply:
    reply = TraceReply(key=command.key, request=command.id)
    if process is None:
        return replace(reply, error=UNKNOWN_PROCESS)
    reader = process.reader
    if process.ring_problem or reader is None:
        no_ring = (
            "it has no ring: hangwatch is not active in it, or it has not imported torch;"
            " `hangwatch doctor` says why"
        )
        return replace(reply, error=process.ring_problem or no_ring)
    try:
        if command.after < 0:
            return replace(reply, upto=reader.count_records())
        trace = read_trace(
            reader,
            command.after,
            now_ns,
            op=command.op,
            max_calls=min(command.max_calls, max_calls),
            is_last=command.last or process.exit is not None,
        )
        kinds: dict[CallKind, int] = {}
        values = checks.read_check_values(reader) if command.values else {}
        return replace(
            reply,
            upto=trace.next_index,
            missed=trace.missed,
            calls=tuple(_make_traced_call(traced, kinds, values) for traced in trace.calls),
            kinds=tuple(kinds),
            more=trace.has_more,
            others=trace.other_ops,
        )
    except Exception as error:  # a corrupt ring must not keep the heartbeat from being sent
        problem = f"its ring cannot be read: {type(error).__name__}: {error}"
        return replace(reply, error=problem)


def _make_traced_call(
    traced: RecordEntry,
    kinds: dict[CallKind, int],
    values: Mapping[tuple[int, int], Mapping[str, float]],
) -> TracedCall:
    """``values``: statistics of the tensors of sampled calls, by stream uid and seq."""
    call = traced.call
    kind = CallKind(signature=call.signature, site=call.site, blocking=call.blocking)
    return TracedCall(
        uid=traced.uid,
        seq=call.seq,
        kind=kinds.setdefault(kind, len(kinds)),
        entered_s=round(call.entered_s, 6),
        within_s=None if traced.within_s is None else round(traced.within_s, 6),
        pending=traced.is_pending,
        raised=call.raised,
        values=decode_tensor_stats(values.get((traced.uid, call.seq))),
    )
