"""Answers requests for traces: the calls of a process while they are made, from its ring, with an upper
bound of each duration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hangwatch.protocol.commands import CallKind, Command, TensorStats, TracedCall, TraceReply
from hangwatch.ring import checks
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.reader import RecordEntry, RingReader

from ..discovery.watched import WatchedByKey, WatchedProcess
from ..system.runtime import describe_error

MAX_TRACE_REQUESTS = 256  # the oldest ones are dropped
MAX_TRACED_CALLS = 8000  # the limit of one heartbeat, for all requests together
TRACE_REQUEST_TTL_S = 15.0  # the server waits no longer for the reply
# An unfinished call is held back for this long, so that it can be reported with its duration.
HOLD_S = 1.0

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

    def build_replies(self, watched: WatchedByKey, now_ns: int) -> tuple[TraceReply, ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBatch:
    """The result of one read of a ring."""

    next_index: int  # index of the record at which the next read starts
    missed: int = 0  # records that were overwritten before they were read
    calls: tuple[RecordEntry, ...] = ()
    has_more: bool = False  # more calls are available than the limit
    other_ops: tuple[str, ...] = ()  # operations in the records that the filter excluded


def read_trace(
    reader: RingReader,
    from_index: int,
    now_ns: int,
    *,
    op: str = "",
    max_calls: int = 1000,
    is_last: bool = False,
) -> TraceBatch:
    """At most ``max_calls`` calls from record ``from_index`` on, oldest first, of ``op`` or of all.

    The batch ends before the first recent unfinished call, so that it can be reported later with
    its duration. It does not if the next read is the last (``is_last``) or the ring is close to
    overwriting unread records.
    """
    written = reader.count_records()
    first = max(from_index, written - reader.record_capacity, 0)
    entries = [reader.read_entry(index, now_ns) for index in range(first, written)]
    _bound_durations(entries)
    calls: list[RecordEntry] = []
    other_ops = set()
    missed = max(0, first - from_index)
    position = 0
    has_more = False
    for position, entry in enumerate(entries):
        may_wait = not is_last and len(entries) - position < reader.record_capacity // 4
        if entry is None:
            if may_wait:
                break
            missed += 1
        elif may_wait and entry.call.entered_s < HOLD_S and entry.is_pending:
            break
        elif op and entry.call.signature.op != op:
            other_ops.add(entry.call.signature.op)
        elif has_more := len(calls) >= max_calls:
            break
        else:
            calls.append(entry)
    else:
        position = len(entries)
    return TraceBatch(
        next_index=max(first + position, from_index),
        missed=missed,
        calls=tuple(calls),
        has_more=has_more,
        other_ops=tuple(sorted(other_ops)),
    )


def _bound_durations(entries: Sequence[RecordEntry | None]) -> None:
    """Sets the upper bound of each call's duration, unless the call may be unfinished.

    The recorder detects completion when it polls, ten times a second, or when the call returns. Two
    facts give tighter bounds: a blocking call completed before its thread made the next one, and a
    later record of the same stream holds the number of calls completed when it was written.
    """
    # The blocking call that a thread is in, and the calls of a stream that may be incomplete.
    blocking_by_thread: dict[int, RecordEntry] = {}
    unfinished_by_stream: dict[int, list[RecordEntry]] = {}
    for entry in filter(None, entries):
        entry.within_s = entry.call.duration_s
        completed = []
        previous = blocking_by_thread.pop(entry.call.thread, None)
        if previous is not None:
            completed.append(previous)
        if entry.call.blocking:
            blocking_by_thread[entry.call.thread] = entry
        unfinished = unfinished_by_stream.setdefault(entry.uid, [])
        completed_seq = entry.completed or 0
        while unfinished and unfinished[0].call.seq <= completed_seq:
            completed.append(unfinished.pop(0))
        unfinished.append(entry)
        for call in completed:
            seconds = max(0, entry.entered_ns - call.entered_ns) / 1e9
            call.within_s = seconds if call.within_s is None else min(seconds, call.within_s)
