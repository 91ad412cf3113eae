"""Traces the calls of one process from its ring, with an upper bound of each duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .reader import RecordEntry, RingReader

# An unfinished call is held back for this long, so that it can be reported with its duration.
HOLD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBatch:
    """The result of one read of the ring."""

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
    for entry in entries:
        may_wait = not is_last and len(entries) - position < reader.record_capacity // 4
        if entry is None:
            if may_wait:
                break
            missed += 1
        elif may_wait and entry.call.entered_s < HOLD_S and entry.is_pending:
            break
        elif op and entry.call.signature.op != op:
            other_ops.add(entry.call.signature.op)
        elif len(calls) >= max_calls:
            has_more = True
            break
        else:
            calls.append(entry)
        position += 1
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
        while unfinished and unfinished[0].call.seq <= (entry.completed or 0):
            completed.append(unfinished.pop(0))
        unfinished.append(entry)
        for call in completed:
            seconds = max(0, entry.entered_ns - call.entered_ns) / 1e9
            call.within_s = seconds if call.within_s is None else min(seconds, call.within_s)
