"""Answers requests for traces: the calls of a process while they are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hangwatch.protocol.commands import CallKind, Command, TensorStats, TracedCall, TraceReply
from hangwatch.ring import checks
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.reader import RecordEntry
from hangwatch.ring.tracing import read_trace

from ..discovery.watched import WatchedProcess
from ..system.runtime import describe_error

MAX_TRACE_REQUESTS = 256  # the oldest ones are dropped
MAX_TRACED_CALLS = 8000  # the limit of one heartbeat, for all requests together
TRACE_REQUEST_TTL_S = 15.0  # the server waits no longer for the reply

UNKNOWN_PROCESS = "this node agent knows no such process"
_NO_RING_MESSAGE = (
    "it has no ring: hangwatch is not active in it, or it has not imported torch;"
    " `hangwatch doctor` says why"
)


class TraceRequests:
    """Open requests. For each heartbeat the ring is read again, until a reply was delivered."""

    def __init__(self) -> None:
        # The command and when it arrived, for each request id.
        self._requests: dict[str, tuple[Command, int]] = {}

    def add_request(self, command: Command, now_ns: int) -> None:
        self._requests[command.id] = (command, now_ns)
        while len(self._requests) > MAX_TRACE_REQUESTS:
            del self._requests[next(iter(self._requests))]

    def build_replies(
        self, watched: Mapping[str, WatchedProcess], now_ns: int
    ) -> tuple[TraceReply, ...]:
        """A reply to each open request, with the calls up to now."""
        for request_id, (_, requested_ns) in list(self._requests.items()):
            if (now_ns - requested_ns) / 1e9 >= TRACE_REQUEST_TTL_S:
                del self._requests[request_id]
        max_calls = MAX_TRACED_CALLS // max(1, len(self._requests))
        return tuple(
            _answer_request(command, watched.get(command.key), max_calls, now_ns)
            for command, _ in self._requests.values()
        )

    def mark_delivered(self, replies: Iterable[TraceReply]) -> None:
        for reply in replies:
            self._requests.pop(reply.request, None)


def _answer_request(
    command: Command, process: WatchedProcess | None, max_calls: int, now_ns: int
) -> TraceReply:
    reply = TraceReply(key=command.key, request=command.id)
    if process is None:
        return replace(reply, error=UNKNOWN_PROCESS)
    reader = process.reader
    if process.ring_problem or reader is None:
        return replace(reply, error=process.ring_problem or _NO_RING_MESSAGE)
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
        entries = checks.read_value_entries(reader) if command.values else {}
        return replace(
            reply,
            upto=trace.next_index,
            missed=trace.missed,
            calls=tuple(_make_traced_call(traced, kinds, entries) for traced in trace.calls),
            kinds=tuple(kinds),
            more=trace.has_more,
            others=trace.other_ops,
        )
    except Exception as error:  # a corrupt ring must not keep the heartbeat from being sent
        return replace(reply, error=f"its ring cannot be read: {describe_error(error)}")


def _make_traced_call(
    traced: RecordEntry,
    kinds: dict[CallKind, int],
    entries: Mapping[tuple[int, int], CheckEntry],
) -> TracedCall:
    """``entries``: those with statistics of the tensors of sampled calls, by stream uid and seq."""
    call = traced.call
    values = None
    if (entry := entries.get((traced.uid, call.seq))) is not None:
        # JSON cannot represent numbers that are not finite.
        mean, low, high, norm = [n if math.isfinite(n) else None for n in entry.stats]
        nonfinite = entry.nan + entry.inf
        values = TensorStats(mean=mean, min=low, max=high, norm=norm, nonfinite=nonfinite)
    kind = CallKind(signature=call.signature, site=call.site, blocking=call.blocking)
    return TracedCall(
        uid=traced.uid,
        seq=call.seq,
        kind=kinds.setdefault(kind, len(kinds)),
        entered_s=round(call.entered_s, 6),
        within_s=None if traced.within_s is None else round(traced.within_s, 6),
        pending=traced.is_pending,
        raised=call.raised,
        values=values,
    )
