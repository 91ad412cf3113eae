"""Terse updates: a host with infrequent heartbeats leaves out the positions of its ranks while all
of them make progress. Pure.

The host can see by itself whether its ranks make progress. As soon as one does not, updates are
complete again. What the server must not miss is always reported: that a rank is no longer blocked
in a call, and the creation of groups, since a single host cannot see whether all ranks created the
same groups.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import FROZEN_AFTER_S
from hangwatch.protocol.heartbeat import ProcessUpdate
from hangwatch.ring.snapshot import RingSnapshot

from .acked import AckedState, AckedStream
from .stream_updates import is_blocked
from .updates import without_step

PROGRESS_WINDOW_S = 3.0  # a rank makes progress if its last call is at most this old


def is_progressing(
    snapshot: RingSnapshot | None,
    before: AckedState | None,
    update: ProcessUpdate | None,
    after: AckedState | None,
) -> bool:
    """The rank runs and makes calls, none of them is known to be blocked, and only its positions have
    changed. Where completion is unknown, as on NCCL, the newest call of an idle group says nothing.

    ``before`` is what the server knows, ``update`` the complete update, if any, and ``after`` what
    the server would know after it.
    """
    if snapshot is None or before is None or after is None:
        return False
    if update is not None and _has_more_than_positions(update):
        return False
    if without_step(after.status_key) != without_step(before.status_key):
        return False
    if snapshot.pulse_s >= FROZEN_AFTER_S:
        return False
    for state in snapshot.active_streams:
        if state.completed is not None and is_blocked(state):
            return False
    return snapshot.get_newest_call_s() <= PROGRESS_WINDOW_S


def make_terse_update(
    snapshot: RingSnapshot | None,
    before: AckedState | None,
    update: ProcessUpdate | None,
    after: AckedState | None,
) -> tuple[ProcessUpdate | None, AckedState | None]:
    """The terse update of a rank that makes progress, if any, and what the server will know after
    it.
    """
    if snapshot is None or before is None or update is None or after is None:
        return None, before
    reported_uids = {
        state.uid
        for state in snapshot.streams
        if state.kind is StreamKind.SETUP or _is_known_as_blocked(before.streams.get(state.uid))
    }
    parts = [part for part in update.sequences if part.uid in reported_uids]
    if not parts:
        return None, before
    streams = dict(before.streams)
    for part in parts:
        streams[part.uid] = after.streams[part.uid]
    terse_update = ProcessUpdate(key=update.key, sequences=tuple(parts))
    return terse_update, replace(before, streams=streams)


def _has_more_than_positions(update: ProcessUpdate) -> bool:
    if update.identity is not None or update.ended is not None:
        return True
    if update.state not in "RSI" or update.checksums or update.nonfinite or update.losses:
        return True
    return any(
        part.identity is not None or part.shared or (part.calls and part.completed is not None)
        for part in update.sequences
    )


def _is_known_as_blocked(before: AckedStream | None) -> bool:
    """Whether the server believes that the rank is blocked in this stream's newest call."""
    return before is not None and before.is_pending and before.last_blocked_seq == before.entered
