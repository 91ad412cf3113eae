"""The calls in which a rank may be blocked, and those in which it certainly is."""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.stacks.frames import waits_for_work
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .thread_waits import has_continuing_caller, is_wholly_blocked


def list_old_unfinished(process: Process, before: float) -> list[CallStream]:
    return [
        s for s in process.open_calls.unfinished_streams if s.entered_at <= before and s.entered > 0
    ]


def is_waiting_on_channel(process: Process, stream: CallStream) -> bool:
    """Whether its stack shows that it waits. The completion of many sends is never reported, so
    only a stack shows that a rank waits for a send that its peer received.

    A message received from any source may be the one that this call was to receive.
    """
    samples = [s for s in process.samples if s.taken_at >= stream.entered_at and s.threads]
    if not samples or not waits_for_work(samples[-1].calling_thread):
        return False
    return all(other.peer != -1 for other in process.streams.values())


def find_blocked_streams(process: Process, before: float) -> Collection[CallStream]:
    """The calls in which the whole process is blocked, and not one thread while others continue."""
    blocked = [s for s in process.open_calls.blocked_streams if s.entered_at <= before]
    if not blocked:
        return blocked
    since = max([stream.entered_at for stream in blocked])
    if process.newest_call_at > since + MIN_WAIT_S:
        # Another thread made calls since; it may wait for this one now.
        return blocked if is_wholly_blocked(process, blocked) else []
    return [] if has_continuing_caller(process, blocked, since) else blocked
