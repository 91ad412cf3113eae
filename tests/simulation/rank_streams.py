"""The call streams of the ranks of a `parallel_job` on its backend. Pure."""

from __future__ import annotations

from hangwatch.model.kinds import VerdictKind

from .parallel_job import JobRun
from .parallel_streams import (
    SimulatedStream,
    list_blocking_streams,
    list_streams_at_startup,
    make_setup_stream,
)
from .queued_streams import list_queued_streams

BLOCKED_AFTER_S = 0.5  # as in the node agent


def list_streams(run: JobRun, rank: int, now: float) -> list[SimulatedStream]:
    """How far a rank is in all its streams."""
    fault = run.active_fault(now)
    if fault is not None and fault.kind is VerdictKind.STARTUP_STALL:
        return list_streams_at_startup(fault, rank)
    if run.shape.queues_calls:
        return [make_setup_stream(run, rank, now), *list_queued_streams(run, rank, now)]
    return list_blocking_streams(run, rank, now)


def is_reported_as_blocked(stream: SimulatedStream, now: float) -> bool:
    """Whether the node agent reports the arguments of its newest call: that is unfinished, or may be."""
    if stream.completed is None:
        return now - stream.last_call_at >= BLOCKED_AFTER_S
    return is_blocked(stream, now)


def is_blocked(stream: SimulatedStream, now: float) -> bool:
    return bool(stream.pending_since) and now - stream.pending_since >= BLOCKED_AFTER_S
