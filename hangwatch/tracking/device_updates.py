"""Applies what a heartbeat reports of a process's device to the streams of the process. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.model.device import DeviceProgress
from hangwatch.protocol.heartbeat import DeviceStatus

from .attempt import Attempt
from .process import Process


def apply_device_statuses(
    attempt: Attempt, process: Process, statuses: Iterable[DeviceStatus], now: float
) -> None:
    """Updates `CallStream.device`; ``now`` is on the server's monotonic clock.

    A stream that is unknown is ignored: the same heartbeat requests a resync, after which the node
    agent reports everything again.
    """
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
        if former is None or _has_advanced(former, device):
            stream.device_changed_at = device.read_at


def _has_advanced(former: DeviceProgress, device: DeviceProgress) -> bool:
    """Whether it began or completed a collective, or has one to do again."""
    if (former.started, former.completed) != (device.started, device.completed):
        return True
    return device.is_behind_host and not former.is_behind_host
