"""Reads a ring's device table. `hangwatch.ring.layout` documents the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .layout import DEVICE_OFFSET, DEVICE_SLOTS, DEVICE_STRUCT

_READ_ATTEMPTS = 8  # an entry that keeps changing is read at most this many times


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """How far the device has come in the collectives of one group; see `hangwatch.model.device`."""

    uid: int  # of the group's stream of collectives
    enqueued: int
    started: int | None  # None: the backend does not record starts
    completed: int
    read_ns: int  # when the counters were read, on the host's monotonic clock

    @property
    def counters(self) -> tuple[int, int | None, int]:
        return self.enqueued, self.started, self.completed

    @property
    def is_behind_host(self) -> bool:
        """Whether the host has queued collectives that the device has not completed."""
        return self.completed < self.enqueued


def read_device_entries(data: Any) -> tuple[DeviceEntry, ...]:
    """All entries of a mapped ring, in the order in which they were first written. An entry that
    is being written is left out.
    """
    entries: list[DeviceEntry] = []
    for slot in range(DEVICE_SLOTS):
        offset = DEVICE_OFFSET + slot * DEVICE_STRUCT.size
        for _ in range(_READ_ATTEMPTS):
            values = DEVICE_STRUCT.unpack_from(data, offset)
            lock, uid, records_starts, enqueued, started, completed, read_ns = values
            if not lock:  # slots are used in order
                return tuple(entries)
            if lock % 2 == 0 and DEVICE_STRUCT.unpack_from(data, offset) == values:
                entry = DeviceEntry(
                    uid=uid,
                    enqueued=enqueued,
                    started=started if records_starts else None,
                    completed=completed,
                    read_ns=read_ns,
                )
                entries.append(entry)
                break
    return tuple(entries)
