"""Call streams of an attempt that is rebuilt from dumps: adding one, and where its calls end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .calls import FlightRecord


def add_stream(
    attempt: Attempt, rank: int, kind: StreamKind, group: Group, peer: int | None = None
) -> CallStream:
    process = attempt.processes[rank]
    stream = CallStream(uid=len(process.streams) + 1, kind=kind, group=group, peer=peer)
    attempt.add_stream(process, stream)
    return stream


def find_unfinished(records: Sequence[FlightRecord]) -> FlightRecord | None:
    """The first call after the last completed one. Calls run in order: one before that is complete
    even if its record was never updated.
    """
    completed = count_completed(records)
    return records[completed] if completed < len(records) else None


def count_completed(records: Sequence[FlightRecord]) -> int:
    """How many records there are up to and including the last completed one."""
    return next((at + 1 for at in range(len(records) - 1, -1, -1) if records[at].completed), 0)
