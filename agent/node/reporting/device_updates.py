"""Composes what a process update reports of the device. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hangwatch.protocol.heartbeat import DeviceStatus
from hangwatch.ring.devices import DeviceEntry
from hangwatch.ring.layout import DeviceStatusState
from hangwatch.ring.snapshot import RingSnapshot

# Counters that do not change are confirmed this often while the device is behind: then their age
# matters to the diagnosis.
CONFIRM_INTERVAL_S = 2.0

_BUFFER_ENTRIES = 2000  # the default where torch has it on


def compose_device_statuses(
    snapshot: RingSnapshot, reported: Mapping[int, DeviceEntry], now_ns: int
) -> tuple[tuple[DeviceStatus, ...], Mapping[int, DeviceEntry]]:
    """The counters to report, and the entries that the server will then know, by stream uid.

    ``reported`` are the entries that the server knows.
    """
    if not snapshot.device_entries:
        return (), reported
    uids = {state.uid for state in snapshot.streams}
    due = {
        entry.uid: entry
        for entry in snapshot.device_entries
        if entry.uid in uids and _is_due(entry, reported.get(entry.uid))
    }
    if not due:
        return (), reported
    statuses = [_make_status(entry, now_ns) for entry in due.values()]
    return tuple(statuses), {**reported, **due}


def _is_due(entry: DeviceEntry, reported: DeviceEntry | None) -> bool:
    if reported is None or entry.counters != reported.counters:
        return True
    age_ns = entry.read_ns - reported.read_ns
    return entry.is_behind_host and age_ns >= CONFIRM_INTERVAL_S * 1e9


def _make_status(entry: DeviceEntry, now_ns: int) -> DeviceStatus:
    return DeviceStatus(
        uid=entry.uid,
        enqueued=entry.enqueued,
        started=entry.started,
        completed=entry.completed,
        read_s=round(max(0, now_ns - entry.read_ns) / 1e9, 3),
    )


def find_missing_setting(state: DeviceStatusState, torch_version: str) -> str:
    """The environment variable, with its value, that makes torch count the device's progress; empty
    if it does already or no variable is known.

    >>> find_missing_setting(DeviceStatusState.OFF, "2.9.1+cu128")
    'TORCH_FR_BUFFER_SIZE=2000'
    """
    if state in (DeviceStatusState.UNKNOWN, DeviceStatusState.REPORTED):
        return ""
    version = _parse_version(torch_version)
    if state is DeviceStatusState.OFF:
        # The older name works in newer versions too, with a warning.
        name = "TORCH_FR_BUFFER_SIZE" if version >= (2, 9) else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        return f"{name}={_BUFFER_ENTRIES}"
    if state is DeviceStatusState.UNSUPPORTED and version >= (2, 15):
        return "TORCH_DIST_USE_NCCL2=0"  # the process group whose counters are in every version
    return ""


def _parse_version(torch_version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
