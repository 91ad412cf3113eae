"""The device table and the notes of a ring: written by the recorder, read by the node agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import (
    DEVICES,
    EXCEPTION,
    FAULTS,
    HEADER_SIZE,
    IDENTITY,
    LIVE_OFFSET,
    DeviceStatusState,
    LiveWord,
)
from hangwatch.ring.parts import DeviceEntry, RingParts
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
    assert FAULTS.end <= DEVICES.offset
    assert DEVICES.end <= HEADER_SIZE


def test_entries_are_read_as_written(ring: RingWriter) -> None:
    entries = (make_entry(3), make_entry(9, started=None), make_entry(12, started=-1))
    for slot, entry in enumerate(entries):
        ring.write_device_entry(slot, make_entry(entry.uid, enqueued=1))
        ring.write_device_entry(slot, entry)
    assert RingParts(ring.map).read_device_entries() == entries
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
    ring.map[DEVICES.offset] += 1  # the lock is odd
    assert RingParts(ring.map).read_device_entries() == (make_entry(4),)


def test_unknown_state_of_newer_writer_is_ignored(ring: RingWriter) -> None:
    ring.map[LIVE_OFFSET + 8 * LiveWord.DEVICE_STATUS] = 99
    snapshot = RingReader(ring.map).read_snapshot(100)
    assert snapshot.device_status is DeviceStatusState.UNKNOWN


def test_note_that_two_threads_wrote_at_the_same_time_stays_readable(ring: RingWriter) -> None:
    reader = RingParts(ring.map)
    lock = FAULTS.offset
    ring.map[lock] = 1  # another thread is writing it
    ring.write_note(FAULTS, {"lines": ["first"]})
    assert reader.read_note(FAULTS) == {"lines": ["first"]}
    ring.write_note(FAULTS, {"lines": ["second"]})
    assert ring.map[lock] % 2 == 0
    assert reader.read_note(FAULTS) == {"lines": ["second"]}


def test_note_without_room_is_cut_and_leaves_the_next_one_alone(ring: RingWriter) -> None:
    ring.write_note(FAULTS, {"lines": ["kept"]})
    ring.write_note(EXCEPTION, {"type": "E", "lines": ["x"], "message": "m" * 3000})
    assert RingParts(ring.map).read_note(EXCEPTION) == {"type": "E", "message": "m" * 200}
    ring.write_note(EXCEPTION, dict.fromkeys("abcd", "\N{FIRE}" * 300))
    assert RingParts(ring.map).read_note(EXCEPTION) is None
    assert RingParts(ring.map).read_note(FAULTS) == {"lines": ["kept"]}
    assert EXCEPTION.end <= FAULTS.offset
    assert IDENTITY.end <= EXCEPTION.offset
