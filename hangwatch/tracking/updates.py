"""Applies what a heartbeat reports about one process to the process, its streams and its attempt.

Times are in seconds on the server's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import intern

from hangwatch.model.bounds import limit_texts
from hangwatch.model.calls import Call, Loss, LossReason
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.protocol.heartbeat import DeviceStatus, ProcessUpdate, StreamIdentity, StreamUpdate

from .call_stream import (
    CALLS_KEPT,
    FINISHED_CALLS_KEPT,
    LAST_CALLS_KEPT,
    SMALL_JOB_RANKS,
    CallStream,
)
from .process import MessageMark, Phase, Process

# What is kept of texts that a process may report again and again. Node agents send less.
MAX_NAME_CHARS, MAX_TEXT_CHARS = 256, 4096


def apply_process_update(process: Process, update: ProcessUpdate, now: float) -> bool:
    """Applies a full update; False if it mentions a stream that is unknown."""
    attempt = process.attempt
    if update.identity is not None:
        # Nearly all processes of a job have the same texts: they share them.
        for name in ("job", "python", "torch", "program", "master"):
            object.__setattr__(update.identity, name, intern(getattr(update.identity, name)))
        attempt.replace_identity(process, update.identity)
    process.reports.last_seen_at = process.reports.updated_at = now
    attempt.mark_seen(now)
    if update.lifecycle != process.lifecycle:
        attempt.has_initialised |= update.lifecycle >= Lifecycle.INITIALISING
        process.lifecycle = Lifecycle(min(max(update.lifecycle, 0), int(Lifecycle.EXITING)))
    process.step = update.step
    process.phase = None
    if update.phase is not None:
        process.phase = Phase(
            name=update.phase[:MAX_NAME_CHARS],
            began_at=now - update.phase_s,
            limit_s=update.phase_limit_s,
        )
    activity = process.activity
    activity.pulse_at = None if update.pulse_s is None else now - update.pulse_s
    if activity.state != update.state:
        activity.state = update.state
        activity.state_since = now
    activity.last_active_at = now - update.idle_s
    activity.cpu_s = update.cpu_s
    if update.pulse_s is not None and update.pulse_s < MIN_WAIT_S:
        activity.cpu_at_pulse_s = update.cpu_s
    _apply_ending(process, update, now)
    process.dropped_records = update.dropped
    process.recorder_faults = limit_texts(update.faults, MAX_TEXT_CHARS)
    process.device_setting = update.device_setting[:MAX_NAME_CHARS]
    is_without_ring = update.lifecycle == Lifecycle.ALIVE and update.ended is None
    if is_without_ring and process.streams and process.is_alive:
        # The positions are those before the ring could no longer be read.
        process.has_lost_ring = True
        for stream in process.streams.values():
            loss = Loss(stream.entered + 1, LossReason.UNREADABLE)
            attempt.record_loss(process, stream, loss)
    all_known = _apply_streams(process, update, now)
    for uid in update.closed:
        attempt.close_stream(process, uid)
    process.opened_streams = max(process.opened_streams, update.opened)
    if update.device:
        _apply_device_statuses(process, update.device, now)
    if update.streams or update.device or update.closed:
        _refresh_streams(process)
    if (update.checksums or update.nonfinite) and process.holds_rank:
        process.overflows = max(process.overflows, update.overflows)
        attempt.checks.apply_update(process, update, now)
    return all_known


def apply_terse_update(process: Process, update: ProcessUpdate, now: float) -> bool:
    """Applies the stream updates of a brief heartbeat; False if a stream is unknown.

    The process makes progress: in streams that are not mentioned it may be further than is known.
    """
    all_known = _apply_streams(process, update, now)
    _refresh_streams(process)
    process.attempt.update_suspects(process)
    return all_known


def _refresh_streams(process: Process) -> None:
    process.refresh_streams()
    reported_before = process.reports.previously_seen_at
    process.attempt.record_call_time(process.newest_call_at, reported_before)


def _apply_streams(process: Process, update: ProcessUpdate, now: float) -> bool:
    attempt, streams = process.attempt, process.streams
    losses = {}
    for uid, from_seq, reason in update.losses:
        losses[uid] = Loss(from_seq, LossReason(reason))
        if uid in streams:
            attempt.record_loss(process, streams[uid], losses[uid])
    for uid, from_seq in update.retractions:
        if uid in streams:
            attempt.retract_calls(streams[uid], from_seq)
    all_known = True
    for stream_update in update.streams:
        all_known &= _apply_stream_update(process, stream_update, losses, now)
    return all_known


def _apply_ending(process: Process, update: ProcessUpdate, now: float) -> None:
    """Records the exceptions and the exit. The first report of what ended it is kept."""
    process.handling = limit_texts(update.handling, MAX_TEXT_CHARS)
    if update.raised is not None and process.exception is None:
        process.exception = limit_texts(update.raised, MAX_TEXT_CHARS)
        process.exception_at = now - update.raised_s
    if update.ended is not None and process.exit is None:
        process.exit = update.ended
        process.exited_at = now - update.ended_s
        process.attempt.foreign_groups.mark_changed(process)
    if update.flight_file is not None:
        process.flight_file = limit_texts(update.flight_file, MAX_TEXT_CHARS)


def _apply_stream_update(
    process: Process,
    update: StreamUpdate,
    losses: Mapping[int, Loss],
    now: float,
) -> bool:
    """Applies one update; False if the stream is unknown and the update does not identify it.
    ``losses`` are those that the same heartbeat reports, by uid.
    """
    # A heartbeat has dozens of updates, and reading their fields by name would take longer.
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
    attempt, stream = process.attempt, process.streams.get(uid)
    is_known = stream is not None
    if stream is None:
        if identity is None:
            return False
        stream = _open_stream(process, uid, identity, losses.get(uid))
    entered_at = now - entered_s
    old_first_unfinished, old_completed = stream.first_unfinished, stream.completed or 0
    peer = stream.peer
    if peer is not None and entered > stream.entered and peer in attempt.suspects:
        _, grown_at = stream.last_growth
        if grown_at <= attempt.processes[peer].reports.last_seen_at:
            stream.last_growth = stream.entered, now
    stream.entered = entered
    # The two numbers are usually equal: as one object they take half the memory.
    stream.completed = entered if completed == entered else completed
    stream.entered_at = entered_at
    if op and op != stream.op:
        stream.op = intern(op)
        stream.has_replays |= stream.ends_with_replay
    if stream.first_unfinished > old_first_unfinished:
        stream.advanced_at = entered_at
    if completed is not None and completed > old_completed:
        # The completions in the first update of a stream may be old: the server may have started during
        # a hang.
        if is_known:
            stream.last_completion_at = now
        _record_blocked_interval(process, stream, old_first_unfinished, now)
    stream.pending_at = None if pending_s is None else now - pending_s
    if chain or checkpoints:
        pairs = checkpoints
        if entered and chain and (not pairs or pairs[-1][0] != entered):
            pairs = (*pairs, (entered, chain))
        attempt.record_hashes(stream, pairs)
    if calls:
        record_calls(process, stream, calls)
    if concurrent_calls and not stream.concurrent_calls:
        stream.concurrent_calls = concurrent_calls
        stream.concurrent_at = now - concurrent_calls[-1].entered_s
        process.has_concurrent_calls = True
        state = stream.group_state
        # A process whose rank was taken over is no longer a member.
        if state is not None and state.members.get(process.rank) is stream:
            attempt.concurrent_groups[state.key] = None
    return True


def _open_stream(
    process: Process, uid: int, identity: StreamIdentity, loss: Loss | None
) -> CallStream:
    group = process.attempt.join_group(process, identity)
    peer = identity.peer
    member_peer = None
    if identity.foreign and peer is not None and peer >= 0:
        # `ForeignGroups.connect_members` finds the peer's rank.
        member_peer = peer
        peer = -1
    stream = CallStream(
        uid=uid,
        kind=identity.kind,
        group=group,
        peer=peer,
        tag=identity.tag,
        member_peer=member_peer,
        loss=loss,
    )
    process.attempt.add_stream(process, stream)
    return stream


def _record_blocked_interval(process: Process, stream: CallStream, seq: int, now: float) -> None:
    """Records how long the process was blocked, after calls from ``seq`` on have completed.

    Either it was reported as blocked in call ``seq``, or it may have been blocked in the newest
    call since the previous heartbeat, until it became active.
    """
    if stream.pending_at is None and now - stream.entered_at <= MIN_WAIT_S:
        return
    if seq in stream.calls and stream.pending_at is not None:
        process.last_blocked = stream.pending_at, now
    elif stream.completed == stream.entered:
        began = max(process.reports.previously_seen_at, stream.entered_at)
        ended = min(process.activity.last_active_at, now)
        # Several streams may have blocked it until then: the one with the last call did.
        last_began, last_ended = process.last_blocked
        if ended - began > MIN_WAIT_S and (ended, began) > (last_ended, last_began):
            process.last_blocked = began, ended


def record_calls(process: Process, stream: CallStream, calls: tuple[Call, ...]) -> None:
    """Records calls with their arguments. If calls of this stream were requested, to compare them with
    those of other members, completed ones are kept too.
    """
    attempt = process.attempt
    for call in calls:
        stream.add_call(attempt.intern_call(call))
    attempt.track_calls(process, stream, calls)
    pairs = {call.seq: call.chain for call in calls if call.chain}
    # The hash of the newest call often came with the stream's position.
    new_pairs = pairs.items() - set(stream.reported_hashes[-1:])
    attempt.record_hashes(stream, tuple(sorted(new_pairs)))
    if stream.answered:
        stream.drop_old_calls(CALLS_KEPT)
    elif process.is_alive and (
        stream.completed is not None or attempt.rank_count > SMALL_JOB_RANKS
    ):
        stream.drop_old_calls(FINISHED_CALLS_KEPT)
    else:
        stream.drop_old_calls(LAST_CALLS_KEPT)


def _apply_device_statuses(process: Process, statuses: Iterable[DeviceStatus], now: float) -> None:
    """Updates `CallStream.device`. A stream that is unknown is ignored: the same heartbeat requests
    a resync, after which the node agent reports everything again.
    """
    attempt = process.attempt
    devices = [stream.device for stream in process.streams.values()]
    was_idle = not any(device is not None and device.is_behind_host for device in devices)
    for status in statuses:
        stream = process.streams.get(status.uid)
        if stream is None:
            continue
        former = stream.device
        if former is None:
            attempt.device_groups[stream.group.key] = None
        device = stream.device = DeviceProgress(
            enqueued=status.enqueued,
            started=status.started,
            completed=status.completed,
            read_at=now - status.read_s,
        )
        if stream.is_executed and not stream.has_replays:
            stream.uncounted_calls = stream.entered - device.enqueued
        has_new_work = was_idle and device.is_behind_host
        if (
            former is None
            or has_new_work
            or former.started != device.started
            or former.completed != device.completed
        ):
            stream.device_changed_at = device.read_at
    read_at = process.device_read_at
    process.device_still_s = read_at - process.device_changed_at
    if attempt.message_groups:
        _update_message_mark(process, read_at)


def _update_message_mark(process: Process, read_at: float) -> None:
    """Renews `Process.message_mark` after a new message, or if the counters were not read since."""
    message_at = 0.0
    for stream in process.streams.values():
        if stream.peer is not None and stream.completed is None and stream.entered:
            message_at = max(message_at, stream.entered_at)
    mark = process.message_mark
    if not message_at or (mark is not None and mark.enqueued and message_at <= mark.message_at):
        return
    enqueued = {}
    if read_at >= message_at:
        for uid, stream in process.streams.items():
            if stream.device is not None:
                enqueued[uid] = stream.device.enqueued
    process.message_mark = MessageMark(message_at, enqueued)
