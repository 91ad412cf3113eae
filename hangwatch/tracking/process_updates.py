"""Applies what a heartbeat reports about one process to the process and its attempt. Pure.

Times are in seconds on the server's monotonic clock.
"""

from __future__ import annotations

from sys import intern

from hangwatch.model.losses import Loss, LossReason
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat

from .call_stream import CallWindow
from .device_updates import apply_device_statuses
from .foreign_groups import ForeignGroups
from .process import Process, StackSample
from .process_parts import Phase, ProcessActivity, RecorderHealth
from .stream_updates import apply_stream_update, record_calls
from .tracked_process import TrackedProcess

SAMPLES_KEPT_PER_PROCESS = 4


def apply_process_update(
    tracked: TrackedProcess, update: heartbeat.ProcessUpdate, now: float
) -> bool:
    """Applies a full update; False if it mentions a stream that is unknown."""
    process, attempt = tracked.process, tracked.attempt
    if update.identity is not None:
        attempt.replace_identity(process, _share_texts(update.identity))
    process.reports.last_seen_at = process.reports.updated_at = now
    if attempt.last_seen_at != now:
        attempt.mark_seen(now)
    if update.lifecycle != process.lifecycle:
        attempt.has_initialised |= update.lifecycle >= Lifecycle.INITIALISING
        process.lifecycle = Lifecycle(min(max(update.lifecycle, 0), int(Lifecycle.EXITING)))
    process.step = update.step
    if update.phase is not None or process.phase is not None:
        _apply_phase(process, update, now)
    _apply_activity(process.activity, update, now)
    if update.ended is not None or update.raised is not None or update.flight_file is not None:
        _apply_ending(process, update, now, attempt.foreign_groups)
    health = process.recorder
    if update.dropped != health.dropped or update.faults != health.faults:
        process.recorder = RecorderHealth(update.dropped, update.faults)
    process.device_setting = update.device_setting
    is_without_ring = update.lifecycle == Lifecycle.ALIVE and update.ended is None
    if is_without_ring and process.streams and process.is_alive:
        _record_lost_ring(tracked)
    all_known = _apply_streams(tracked, update, now)
    for uid in update.closed:
        attempt.close_stream(process, uid)
    process.opened_streams = max(process.opened_streams, update.opened)
    if process.misses_streams and tracked.holds_rank:
        attempt.incomplete_ranks.add(process.rank)
    else:
        attempt.incomplete_ranks.discard(process.rank)
    if update.device:
        apply_device_statuses(attempt, process, update.device, now)
    if update.sequences or update.device or update.closed:
        _refresh_streams(tracked)
    if (update.checksums or update.nonfinite) and tracked.holds_rank:
        process.overflows = max(process.overflows, update.overflows)
        attempt.checks.apply_update(process, update, now)
    return all_known


def _share_texts(identity: heartbeat.ProcessIdentity) -> heartbeat.ProcessIdentity:
    """Gives it texts that equal ones of other processes share, and returns it. Nearly all processes
    of a job have the same.
    """
    for name in ("job", "python", "torch", "program", "master"):
        object.__setattr__(identity, name, intern(getattr(identity, name)))
    return identity


def apply_terse_update(
    tracked: TrackedProcess, update: heartbeat.ProcessUpdate, now: float
) -> bool:
    """Applies the stream updates of a brief heartbeat; False if a stream is unknown.

    The process makes progress: in streams that are not mentioned it may be further than is known.
    """
    all_known = _apply_streams(tracked, update, now)
    _refresh_streams(tracked)
    tracked.attempt.update_suspects(tracked.process)
    return all_known


def _refresh_streams(tracked: TrackedProcess) -> None:
    process, attempt = tracked.process, tracked.attempt
    process.refresh_streams()
    if process.newest_call_at > attempt.newest_call_at:
        attempt.newest_call_at = process.newest_call_at


def _apply_streams(tracked: TrackedProcess, update: heartbeat.ProcessUpdate, now: float) -> bool:
    all_known = True
    losses = _parse_losses(update)
    for uid in losses.keys() & tracked.process.streams.keys():
        tracked.attempt.record_loss(tracked.process, tracked.process.streams[uid], losses[uid])
    for stream_update in update.sequences:
        all_known &= apply_stream_update(
            tracked.attempt, tracked.process, stream_update, losses, now
        )
    return all_known


def _parse_losses(update: heartbeat.ProcessUpdate) -> dict[int, Loss]:
    """By stream uid."""
    return {
        uid: Loss(from_seq, LossReason.from_number(reason))
        for uid, from_seq, reason in update.losses
    }


def _record_lost_ring(tracked: TrackedProcess) -> None:
    """Its positions are those before its ring could no longer be read."""
    tracked.process.has_lost_ring = True
    for stream in tracked.process.streams.values():
        loss = Loss(stream.entered + 1, LossReason.UNREADABLE)
        tracked.attempt.record_loss(tracked.process, stream, loss)


def _apply_phase(process: Process, update: heartbeat.ProcessUpdate, now: float) -> None:
    if update.phase is not None:
        process.phase = Phase(
            name=update.phase, began_at=now - update.phase_s, limit_s=update.phase_limit_s
        )
    else:
        process.phase = None


def _apply_activity(activity: ProcessActivity, update: heartbeat.ProcessUpdate, now: float) -> None:
    activity.pulse_at = None if update.pulse_s is None else now - update.pulse_s
    if activity.state != update.state:
        activity.state, activity.state_since = update.state, now
    activity.last_active_at = now - update.idle_s
    activity.cpu_s = update.cpu_s


def _apply_ending(
    process: Process,
    update: heartbeat.ProcessUpdate,
    now: float,
    foreign_groups: ForeignGroups,
) -> None:
    """Records the exception and the exit. The first report of each is kept."""
    if update.raised is not None and process.exception is None:
        process.exception, process.exception_at = update.raised, now - update.raised_s
    if update.ended is not None and process.exit is None:
        process.exit, process.exited_at = update.ended, now - update.ended_s
        foreign_groups.mark_changed(process)
    if update.flight_file is not None:
        process.flight_file = update.flight_file


def add_sample(process: Process, reply: heartbeat.StackReply, now: float) -> None:
    """Adds the stacks that a node agent took; only the newest samples are kept."""
    sample = StackSample.from_reply(reply, now)
    process.samples = (*process.samples, sample)[-SAMPLES_KEPT_PER_PROCESS:]


def apply_calls_reply(tracked: TrackedProcess, reply: heartbeat.CallsReply) -> None:
    """Records calls that were requested from the node agent."""
    stream = tracked.process.streams.get(reply.uid)
    if stream is None:
        return
    stream.add_answer(_get_answered_window(reply))
    record_calls(tracked.attempt, tracked.process, stream, reply.calls)
    tracked.process.refresh_streams()


def _get_answered_window(reply: heartbeat.CallsReply) -> CallWindow:
    """The window that it answers. Node agents of earlier versions do not say, and send all calls from
    some number on.
    """
    if reply.to_seq:
        return CallWindow(reply.from_seq, reply.to_seq, reply.step)
    seqs = [call.seq for call in reply.calls]
    return CallWindow(min(seqs, default=0), max(seqs, default=0))
