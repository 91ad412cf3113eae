"""Applies the stream updates of a heartbeat to a process and its attempt. Pure.

Times are in seconds on the server's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import intern

from hangwatch.model.calls import Call
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.losses import Loss
from hangwatch.protocol import heartbeat

from .attempt import Attempt
from .call_stream import (
    CALLS_KEPT,
    FINISHED_CALLS_KEPT,
    LAST_CALLS_KEPT,
    SMALL_JOB_RANKS,
    CallStream,
)
from .hash_histories import NEWEST_KEPT
from .process import Process


def apply_stream_update(
    attempt: Attempt,
    process: Process,
    update: heartbeat.StreamUpdate,
    losses: Mapping[int, Loss],
    now: float,
) -> bool:
    """Applies one update; False if the stream is unknown and the update does not identify it.
    ``losses`` are those that the same heartbeat reports, by uid.
    """
    # Unpacked: a heartbeat has dozens of these, and reading a field by name takes longer.
    (
        uid,
        entered,
        completed,
        entered_s,
        op,
        chain,
        checkpoints,
        pending_s,
        calls,
        identity,
        concurrent_calls,
    ) = update
    stream = process.streams.get(uid)
    is_known = stream is not None
    if stream is None:
        if identity is None:
            return False
        stream = _open_stream(attempt, process, uid, identity, losses.get(uid))
    entered_at = now - entered_s
    old_first_unfinished, old_completed = stream.first_unfinished, stream.completed or 0
    if stream.peer is not None and entered > stream.entered:
        _record_growth(attempt, stream, now)
    stream.entered = entered
    # Usually the same number: as one object it takes half the memory.
    stream.completed = entered if completed == entered else completed
    stream.chain = chain
    stream.entered_at = entered_at
    if op and op != stream.op:
        stream.op = intern(op)
    if stream.first_unfinished > old_first_unfinished:
        stream.advanced_at = entered_at
    # The completions in the first update of a stream may be old: the server may have started during
    # a hang.
    if is_known and completed is not None and completed > old_completed:
        stream.last_completion_at = now
        if stream.pending_at is not None or now - entered_at > MIN_WAIT_S:
            _record_blocked_interval(process, stream, old_first_unfinished, now)
    stream.pending_at = None if pending_s is None else now - pending_s
    if stream.group_state is not None and (chain or checkpoints):
        pairs = checkpoints
        if entered and chain and (not pairs or pairs[-1][0] != entered):
            pairs = (*pairs, (entered, chain))
        attempt.record_hashes(stream, pairs)
        if stream.reported_hashes and stream.reported_hashes[-1][1] == chain:
            stream.chain = stream.reported_hashes[-1][1]  # the same number, shared by all ranks
    if calls:
        record_calls(attempt, process, stream, calls)
    if concurrent_calls and not stream.concurrent_calls:
        stream.concurrent_calls = concurrent_calls
        stream.concurrent_at = now - concurrent_calls[-1].entered_s
        process.open_calls.has_concurrent_calls = True
        state = stream.group_state
        # A process whose rank was taken over is no longer a member.
        if state is not None and state.members.get(process.rank) is stream:
            attempt.concurrent_groups[state.key] = None
    return True


def _open_stream(
    attempt: Attempt,
    process: Process,
    uid: int,
    identity: heartbeat.StreamIdentity,
    loss: Loss | None,
) -> CallStream:
    peer, member_peer = identity.peer, None
    if not identity.foreign:
        group = attempt.intern_group(identity)
    else:
        group = attempt.join_foreign_group(process, identity)
        if peer is not None and peer >= 0:
            member_peer, peer = peer, group.ranks[peer] if peer < len(group.ranks) else -1
    stream = CallStream(
        uid=uid,
        kind=identity.kind,
        group=group,
        peer=peer,
        tag=identity.tag,
        member_peer=member_peer,
        loss=loss,
    )
    attempt.add_stream(process, stream)
    return stream


def _record_growth(attempt: Attempt, stream: CallStream, now: float) -> None:
    """Records that a channel has more calls than before, if its peer is blocked."""
    peer = stream.peer
    if peer in attempt.suspects and (
        stream.last_growth[1] <= attempt.processes[peer].reports.last_seen_at
    ):
        stream.last_growth = stream.entered, now


def _record_blocked_interval(process: Process, stream: CallStream, seq: int, now: float) -> None:
    """Records how long the process was blocked, after calls from ``seq`` on have completed.

    Either it was reported as blocked in call ``seq``, or it may have been blocked in the newest
    call since the previous heartbeat, until it became active.
    """
    if seq in stream.calls and stream.pending_at is not None:
        process.open_calls.last_blocked = stream.pending_at, now
    elif stream.completed == stream.entered:
        began = max(process.reports.previously_seen_at, stream.entered_at)
        ended = min(process.activity.last_active_at, now)
        if ended - began > MIN_WAIT_S and ended > process.open_calls.last_blocked[1]:
            process.open_calls.last_blocked = began, ended


def record_calls(
    attempt: Attempt, process: Process, stream: CallStream, calls: tuple[Call, ...]
) -> None:
    """Records calls with their arguments. If calls of this stream were requested, to compare them with
    those of other members, completed ones are kept too.
    """
    pairs: dict[int, int] = {}
    for call in calls:
        stream.add_call(attempt.intern_call(call))
        # The hash of the newest call came with the stream's position.
        if call.chain and (call.seq, call.chain) != (stream.entered, stream.chain):
            pairs[call.seq] = call.chain
    attempt.track_calls(process, stream, calls)
    if pairs:
        report = tuple(sorted(pairs.items()))
        if len(report) > NEWEST_KEPT:
            attempt.record_requested_hashes(stream, report)
        else:
            attempt.record_hashes(stream, report)
    if stream.answered:
        stream.drop_old_calls(CALLS_KEPT)
    elif process.is_alive and (
        stream.completed is not None or attempt.rank_count > SMALL_JOB_RANKS
    ):
        stream.drop_old_calls(FINISHED_CALLS_KEPT)
    else:
        stream.drop_old_calls(LAST_CALLS_KEPT)
