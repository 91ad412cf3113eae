"""The device table of a ring: written by the recorder, read by the node agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import (
    DEVICE_OFFSET,
    DEVICE_SLOTS,
    DEVICE_STRUCT,
    FAULTS_OFFSET,
    HEADER_SIZE,
    LIVE_OFFSET,
    NOTE_SIZE,
    DeviceStatusState,
    LiveWord,
)
from hangwatch.ring.parts import DeviceEntry, read_device_entries
from hangwatch.ring.reader import RingReader


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    writer = RingWriter(tmp_path / "a.ring", pid=1, start_ticks=1)
    writer.write_identity({"job": "j", "rank": 0})
    return writer


def make_entry(uid: int, *, enqueued: int = 6, started: int | None = 5) -> DeviceEntry:
    return DeviceEntry(uid=uid, enqueued=enqueued, started=started, completed=4, read_ns=77)


def test_table_fills_free_space_of_header() -> None:
    """So that readers of an older version ignore it."""
    assert FAULTS_OFFSET + NOTE_SIZE <= DEVICE_OFFSET
    assert DEVICE_OFFSET + DEVICE_SLOTS * DEVICE_STRUCT.size <= HEADER_SIZE


def test_entries_are_read_as_written(ring: RingWriter) -> None:
    entries = (make_entry(3), make_entry(9, started=None), make_entry(12, started=-1))
    for slot, entry in enumerate(entries):
        ring.write_device_entry(slot, make_entry(entry.uid, enqueued=1))
        ring.write_device_entry(slot, entry)
    assert read_device_entries(ring.map) == entries
    assert all(entry.is_behind_host for entry in entries)


def test_snapshot_has_entries_if_backend_reports_them(ring: RingWriter) -> None:
    ring.write_device_entry(0, make_entry(3))
    reader = RingReader(ring.map)
    assert reader.read_snapshot(100).device_entries == ()
    ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.REPORTED)
    snapshot = reader.read_snapshot(100)
    assert snapshot.device_entries == (make_entry(3),)
    assert snapshot.device_status is DeviceStatusState.REPORTED


def test_entry_being_written_is_left_out(ring: RingWriter) -> None:
    ring.write_device_entry(0, make_entry(3))
    ring.write_device_entry(1, make_entry(4))
    ring.map[DEVICE_OFFSET] += 1  # the lock is odd
    assert read_device_entries(ring.map) == (make_entry(4),)


def test_unknown_state_of_newer_writer_is_ignored(ring: RingWriter) -> None:
    ring.map[LIVE_OFFSET + 8 * LiveWord.DEVICE_STATUS] = 99
    snapshot = RingReader(ring.map).read_snapshot(100)
    assert snapshot.device_status is DeviceStatusState.UNKNOWN
