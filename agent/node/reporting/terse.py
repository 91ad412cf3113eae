"""What a host with infrequent heartbeats leaves out while all of its ranks make progress, which it can
see by itself: their positions. As soon as one rank makes none, updates are complete again. Pure.

What the server must not miss is always reported: that a rank is no longer blocked in a call, and the
creation of groups, since a single host cannot see whether all ranks created the same groups.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import FROZEN_AFTER_S
from hangwatch.protocol.heartbeat import ProcessUpdate
from hangwatch.ring.reader import RingSnapshot

from .acked import AckedState
from .updates import is_blocked

PROGRESS_WINDOW_S = 3.0  # a rank makes progress if its last call is at most this old


def make_terse_update(
    snapshot: RingSnapshot | None,
    before: AckedState | None,
    update: ProcessUpdate | None,
    after: AckedState | None,
) -> tuple[ProcessUpdate | None, AckedState] | None:
    """The terse update of a rank, if it has anything to report, and what the server knows then. None
    unless the rank makes progress: it runs and makes calls, none of them is known to be blocked, and
    only its positions have changed.

    ``before`` is what the server knows, ``update`` the complete update, if any, and ``after`` what
    the server would know after it.
    """
    if snapshot is None or before is None or after is None:
        return None
    if after.status_key != before.status_key or snapshot.pulse_s >= FROZEN_AFTER_S:
        return None
    if snapshot.get_newest_call_s() > PROGRESS_WINDOW_S:
        return None
    # Where completion is unknown, as on NCCL, the newest call of an idle group shows nothing.
    for state in snapshot.active_streams:
        if state.completed is not None and is_blocked(state):
            return None
    if update is None:
        return None, before
    is_running = update.ended is None and update.state in "RSI"
    has_findings = update.checksums or update.nonfinite or update.losses or update.retractions
    if update.identity is not None or has_findings or not is_running:
        return None
    for part in update.streams:
        if part.identity is not None or part.shared:
            return None
        if part.calls and part.completed is not None:
            return None

    reported_uids = set()
    for state in snapshot.streams:
        known = before.streams.get(state.uid)
        is_known_as_blocked = (
            known is not None and known.is_pending and known.last_blocked_seq == known.entered
        )
        if state.kind is StreamKind.SETUP or is_known_as_blocked:
            reported_uids.add(state.uid)
    parts = [part for part in update.streams if part.uid in reported_uids]
    if not parts:
        return None, before
    reported = {part.uid: after.streams[part.uid] for part in parts}
    terse_update = ProcessUpdate(key=update.key, streams=tuple(parts))
    return terse_update, replace(before, streams={**before.streams, **reported})
