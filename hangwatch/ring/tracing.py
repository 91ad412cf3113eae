"""The calls of one process as they are made, from its ring: which are ready to be told, and how
long each took at most. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .reader import RingReader
from .snapshot import RecordEntry

HOLD_S = (
    1.0  # an unfinished call is held back for so long, so that it can be told with its duration
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEntry:
    entry: RecordEntry
    within_s: float | None  # see `bounds`

    @property
    def is_pending(self) -> bool:
        """It is known not to be complete."""
        return self.within_s is None and self.entry.completed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBatch:
    """``upto`` is the record at which the next look begins; ``missed`` records were overwritten
    before this one.
    """

    next_index: int
    missed: int = 0
    calls: tuple[TimedEntry, ...] = ()
    has_more: bool = False  # there were more than ``most``
    other_ops: tuple[str, ...] = ()  # operations that were seen and not asked for


def read_trace(
    reader: RingReader,
    from_index: int,
    now_ns: int,
    *,
    op: str = "",
    max_calls: int = 1000,
    is_last: bool = False,
) -> TraceBatch:
    """At most ``most`` calls from record ``after`` on, in their order, of operation ``op`` or of
    all.

    It ends before the first call that is young and unfinished, and may soon be told in full: not
    where that would cost calls, since the ring goes round, and not where there is no next look
    (``last``).
    """
    first, entries = reader.read_entries(from_index, now_ns)
    calls: list[TimedEntry] = []
    others: set[str] = set()
    missed, at, more = max(0, first - from_index), 0, False
    within = bound_durations(entries)
    for at, entry in enumerate(entries):
        may_wait = not is_last and len(entries) - at < reader.record_capacity // 4
        if entry is None:
            if may_wait:
                break
            missed += 1
        elif (
            may_wait
            and entry.call.entered_s < HOLD_S
            and TimedEntry(entry=entry, within_s=within[at]).is_pending
        ):
            break
        elif op and entry.call.signature.op != op:
            others.add(entry.call.signature.op)
        elif more := len(calls) >= max_calls:
            break
        else:
            calls.append(TimedEntry(entry=entry, within_s=within[at]))
    else:
        at = len(entries)
    return TraceBatch(
        next_index=max(first + at, from_index),
        missed=missed,
        calls=tuple(calls),
        has_more=more,
        other_ops=tuple(sorted(others)),
    )


def bound_durations(entries: Sequence[RecordEntry | None]) -> list[float | None]:
    """For each call the seconds within which it was complete: an upper bound, and None where
    nothing says that it is.

    The recorder sees completion when it polls, ten times a second, or when the call returns. A
    blocking call was over before its thread made the next one, and a later record of its sequence
    tells how far that was complete when it was written.
    """
    known: list[float | None] = [None] * len(entries)
    of_thread: dict[int, int] = {}  # thread -> the blocking call it is in
    of_sequence: dict[
        int, list[int]
    ] = {}  # sequence -> its calls that are not known to be complete

    def mark_complete(at: int, by_ns: int) -> None:
        if (entry := entries[at]) is not None:
            seconds = max(0, by_ns - entry.entered_ns) / 1e9
            known[at] = seconds if (seen := known[at]) is None else min(seconds, seen)

    for at, entry in enumerate(entries):
        if entry is None:
            continue
        known[at] = entry.call.duration_s
        if (inside := of_thread.pop(entry.call.thread, None)) is not None:
            mark_complete(inside, entry.entered_ns)
        if entry.call.blocking:
            of_thread[entry.call.thread] = at
        waiting = of_sequence.setdefault(entry.uid, [])
        while (
            waiting
            and entry.completed is not None
            and _entry_seq(entries[waiting[0]]) <= entry.completed
        ):
            mark_complete(waiting.pop(0), entry.entered_ns)
        waiting.append(at)
    return known


def _entry_seq(entry: RecordEntry | None) -> int:
    return 0 if entry is None else entry.call.seq
