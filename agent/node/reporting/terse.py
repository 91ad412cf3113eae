"""What a host whose heartbeats are seldom need not tell at each of them: where a rank is, while it
gets on. Pure.

Whether it does, the host knows by itself. As soon as one of its ranks does not, all is told. That
groups were made is told meanwhile, since whether all ranks made the same ones cannot be seen by a
single host.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import FROZEN_AFTER_S
from hangwatch.protocol.heartbeat import ProcessUpdate
from hangwatch.ring.snapshot import RingSnapshot, StreamState

from .acked import AckedState, AckedStream
from .stream_updates import is_blocked
from .updates import without_step

PROGRESS_WINDOW_S = 3.0  # a rank gets on that made a call in these last seconds


def is_progressing(
    snapshot: RingSnapshot | None,
    before: AckedState | None,
    update: ProcessUpdate | None,
    after: AckedState | None,
) -> bool:
    """It runs and makes calls, none of them stands, and nothing is new but how far it is.

    ``before`` is what the server knows, ``update`` what it would be told, if anything, and
    ``after`` what it would know then.
    """
    if (
        snapshot is None
        or before is None
        or after is None
        or (update is not None and _has_more_than_positions(update))
    ):
        return False
    if (
        without_step(after.status_key) != without_step(before.status_key)
        or snapshot.pulse_s >= FROZEN_AFTER_S
    ):
        return False
    moved = any(
        state.entered > 0 and state.entered_s <= PROGRESS_WINDOW_S for state in snapshot.streams
    )
    return moved and not any(
        _is_stream_blocked(state, before.streams[state.uid]) for state in snapshot.streams
    )


def make_terse_update(
    snapshot: RingSnapshot | None,
    before: AckedState | None,
    update: ProcessUpdate | None,
    after: AckedState | None,
) -> tuple[ProcessUpdate | None, AckedState | None]:
    """What is told of a rank that gets on, if anything, and what the server will know then."""
    if snapshot is None or before is None or update is None or after is None:
        return None, before
    made = {state.uid for state in snapshot.streams if state.kind is StreamKind.SETUP}
    parts = tuple([part for part in update.sequences if part.uid in made])
    if not parts:
        return None, before
    known = {part.uid: after.streams[part.uid] for part in parts}
    return ProcessUpdate(key=update.key, sequences=parts), replace(
        before, streams={**before.streams, **known}
    )


def _has_more_than_positions(update: ProcessUpdate) -> bool:
    if (
        update.identity is not None
        or update.ended is not None
        or update.state not in "RSI"
        or update.checksums
        or update.nonfinite
    ):
        return True
    return any(part.identity is not None or part.calls or part.shared for part in update.sequences)


def _is_stream_blocked(state: StreamState, before: AckedStream) -> bool:
    """The rank stands in a call, or the server takes it for one that does."""
    stood = before.is_pending and before.last_blocked_seq == before.entered
    return stood or is_blocked(state)
