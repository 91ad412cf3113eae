"""Composes the update of one stream: its positions, checkpoints and blocked calls. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hangwatch.model.calls import Call
from hangwatch.model.groups import pack_ranks
from hangwatch.protocol.heartbeat import MAX_CHECKPOINTS, StreamIdentity, StreamUpdate
from hangwatch.ring.snapshot import StreamState

from .acked import AckedStream, UnackedHistory

BLOCKED_AFTER_S = 0.5  # a call that is unfinished for longer is reported with its arguments

MAX_BLOCKED_CALLS = 8  # reported for each stream

FetchCalls = Callable[[int, int, int], "list[Call]"]  # (uid, from_seq, most): calls, oldest first


def select_checkpoints(
    chains: Mapping[int, int], after: int, upto: int
) -> tuple[tuple[int, int], ...]:
    """Running hashes at the multiples of the smallest power of two that has at most
    `MAX_CHECKPOINTS` multiples in ``(after, upto]``.

    >>> select_checkpoints({seq: -seq for seq in range(101, 118)}, after=100, upto=117)
    ((104, -104), (108, -108), (112, -112), (116, -116))
    """
    step = 1
    while upto // step - after // step > MAX_CHECKPOINTS:
        step *= 2
    first = (after // step + 1) * step
    return tuple((seq, chains[seq]) for seq in range(first, upto + 1, step) if seq in chains)


def compose_stream_update(
    state: StreamState,
    acked: AckedStream | None,
    history: UnackedHistory,
    fetch_calls: FetchCalls,
    last_calls: list[Call] | None,
) -> tuple[StreamUpdate | None, AckedStream]:
    before = acked or AckedStream()
    chains = history.chains.get(state.uid, {})
    # A call's record may be read before its stream counts it, or after: then the hash follows in the
    # next update.
    upto = min(state.entered, max(chains, default=0))
    after = max(before.last_checked_seq, min(chains, default=1) - 1)
    blocked_calls, last_blocked_seq = (
        (last_calls, state.entered)
        if last_calls is not None
        else _find_blocked_calls(state, before, fetch_calls)
    )
    shared = (
        ()
        if before.is_concurrency_reported
        else _find_concurrent_calls(state, history, fetch_calls)
    )
    is_compared = state.peer is None  # point-to-point calls differ between ranks
    has_moved = (state.entered, state.completed, state.pending_s is not None) != (
        before.entered,
        before.completed,
        before.is_pending,
    )
    after_ack = AckedStream(
        entered=state.entered,
        completed=state.completed,
        is_pending=state.pending_s is not None,
        last_checked_seq=max(before.last_checked_seq, upto),
        last_blocked_seq=last_blocked_seq,
        is_concurrency_reported=before.is_concurrency_reported or bool(shared),
        lost_from_seq=state.loss.from_seq if state.loss is not None else 0,
    )
    if (
        acked is not None
        and not has_moved
        and not blocked_calls
        and not shared
        and upto <= before.last_checked_seq
    ):
        return None, after_ack
    update = StreamUpdate(
        uid=state.uid,
        identity=None if acked is not None else _make_stream_identity(state),
        entered=state.entered,
        completed=state.completed,
        chain=state.chain if is_compared else 0,
        op=history.newest_ops.get(state.uid, ""),
        # To the microsecond: hosts queue calls of two groups within 100 us, and their order matters.
        entered_s=round(state.entered_s, 6),
        pending_s=None if state.pending_s is None else round(state.pending_s, 4),
        checkpoints=select_checkpoints(chains, after, upto) if is_compared else (),
        calls=tuple(blocked_calls),
        shared=shared,
    )
    return update, after_ack


def _find_concurrent_calls(
    state: StreamState, history: UnackedHistory, fetch_calls: FetchCalls
) -> tuple[Call, ...]:
    """The last call of the one thread and the first concurrent call of the other; empty if no two
    threads made calls at the same time.
    """
    seq = history.first_concurrent.get(state.uid)
    if seq is None:
        return ()
    calls = [
        call
        for call in fetch_calls(state.uid, max(1, seq - MAX_BLOCKED_CALLS), history.cursor)
        if call.seq <= seq
    ]
    if not calls or calls[-1].seq != seq:
        return ()
    concurrent = calls[-1]
    others = [call for call in calls if call.thread != concurrent.thread]
    return (others[-1], concurrent) if others else ()


def _find_blocked_calls(
    state: StreamState, before: AckedStream, fetch_calls: FetchCalls
) -> tuple[list[Call], int]:
    """The oldest calls of a blocked stream that were not reported yet; the newest call if
    completion is unknown.

    Also returns the last sequence number that was searched: calls that the ring has lost are not
    searched again.
    """
    if not is_blocked(state):
        return [], before.last_blocked_seq
    oldest = state.entered if state.completed is None else state.completed + 1
    first = max(oldest, before.last_blocked_seq + 1)
    last = min(state.entered, oldest + MAX_BLOCKED_CALLS - 1)
    if first > last:
        return [], before.last_blocked_seq
    calls = fetch_calls(state.uid, first, state.entered - first + 1)
    return [call for call in calls if first <= call.seq <= last], last


def is_blocked(state: StreamState) -> bool:
    """A call has been unfinished for a while; if completion is unknown, the newest call may be."""
    if state.completed is not None and state.completed >= state.entered:
        return False
    age_s = state.entered_s if state.pending_s is None else state.pending_s
    return age_s >= BLOCKED_AFTER_S


def _make_stream_identity(state: StreamState) -> StreamIdentity:
    return StreamIdentity(
        kind=state.kind,
        name=state.group.name,
        desc=state.group.desc,
        ranks=pack_ranks(state.group.ranks),
        backend=state.group.backend,
        generation=state.group.generation,
        world=state.group.world_size,
        peer=state.peer,
        tag=state.tag,
        foreign=state.group.foreign,
        number=state.group.number,
    )
