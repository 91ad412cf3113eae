"""Applies what a heartbeat reports of a process's device to the streams of the process. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.model.device import DeviceProgress
from hangwatch.protocol.heartbeat import DeviceStatus

from .attempt import Attempt
from .process import Process
from .process_parts import MessageMark


def apply_device_statuses(
    attempt: Attempt, process: Process, statuses: Iterable[DeviceStatus], now: float
) -> None:
    """Updates `CallStream.device`; ``now`` is on the server's monotonic clock.

    A stream that is unknown is ignored: the same heartbeat requests a resync, after which the node
    agent reports everything again.
    """
    was_idle = not any(
        stream.device is not None and stream.device.is_behind_host
        for stream in process.streams.values()
    )
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
        has_begun_again = was_idle and device.is_behind_host
        if former is None or has_begun_again or _has_advanced(former, device):
            stream.device_changed_at = device.read_at
    read_at = process.device_read_at
    process.device_still_s = read_at - process.device_changed_at
    if attempt.message_groups:
        _update_message_mark(process, read_at)


def _update_message_mark(process: Process, read_at: float) -> None:
    """Renews it if the host has queued a message since, or if its counters were not read since then."""
    message_at = 0.0
    for stream in process.streams.values():
        if stream.peer is not None and stream.completed is None and stream.entered:
            message_at = max(message_at, stream.entered_at)
    mark = process.message_mark
    if not message_at or (mark is not None and mark.enqueued and message_at <= mark.message_at):
        return
    enqueued = {
        stream.uid: stream.device.enqueued
        for stream in process.streams.values()
        if stream.device is not None and read_at >= message_at
    }
    process.message_mark = MessageMark(message_at, enqueued)


def _has_advanced(former: DeviceProgress, device: DeviceProgress) -> bool:
    """Whether it began or completed a collective."""
    return (former.started, former.completed) != (device.started, device.completed)
