"""Marks the threads that make a rank's calls in a dump of its stacks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hangwatch.model.threads import ThreadStack
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import Caller
from hangwatch.stacks.frames import runs_user_code


def read_callers(reader: RingReader | None) -> tuple[Caller, ...]:
    """The threads that made the calls in a ring; none if it cannot be read."""
    if reader is None:
        return ()
    try:
        return reader.read_callers()
    except Exception:  # the ring is corrupt, which the reading of its state reports
        return ()


def describe_newest_call(reader: RingReader | None) -> str:
    """The newest call in a ring and its line; empty if it cannot be read."""
    if reader is None:
        return ""
    try:
        call = reader.read_newest_call(time.monotonic_ns())
    except Exception:  # the ring is corrupt, which the reading of its state reports
        return ""
    if call is None:
        return ""
    return call.signature.op if call.site is None else f"{call.signature.op} at {call.site}"


def mark_callers(
    threads: Iterable[ThreadStack], pid: int, callers: Sequence[Caller]
) -> tuple[ThreadStack, ...]:
    """The stacks, with what is known of the calls that their threads made.

    faulthandler, and py-spy for Python before 3.11, may not give the ids of threads. Then a caller
    that is not the main thread must be the only other thread in the user's code.
    """
    by_tid = {caller.thread: recency for recency, caller in enumerate(callers)}
    marked: list[ThreadStack] = []
    for thread in threads:
        tid = pid if thread.main else thread.tid
        marked.append(_mark_caller(thread, by_tid.get(tid or 0), callers))
    if any(thread.tid for thread in marked if not thread.main):
        return tuple(marked)
    unmatched = [recency for tid, recency in by_tid.items() if tid != pid]
    others = [
        index for index, thread in enumerate(marked) if not thread.main and runs_user_code(thread)
    ]
    if unmatched and len(others) == 1:
        marked[others[0]] = _mark_caller(marked[others[0]], unmatched[0], callers)
    return tuple(marked)


def _mark_caller(
    thread: ThreadStack, recency: int | None, callers: Sequence[Caller]
) -> ThreadStack:
    if recency is None:
        return thread
    return replace(thread, call_recency=recency, called_uids=callers[recency].uids)
