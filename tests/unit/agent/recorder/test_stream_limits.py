"""Thousands of process groups and channels in one ring: its room, and what is said beyond it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from hangwatch.agent.recorder import groups as recorder_groups
from hangwatch.agent.recorder.groups import GroupRegistry
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model import groups as model_groups
from hangwatch.model.calls import LossReason, StreamKind
from hangwatch.ring.layout import CHECKS, HEAP_SIZE, INITIAL_SIZE, STREAM_SLOTS
from hangwatch.ring.reader import DORMANT_AFTER_S, RingReader, RingSnapshot

SECOND_NS = 1_000_000_000


class Group:
    """A process group that torch.distributed does not know."""

    def __init__(self, name: str) -> None:
        self.group_name = name
        self.group_desc = "undefined"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def name(self) -> str:
        return "gloo"


class WatchedGroups:
    def __init__(self, folder: Path) -> None:
        self.ring = RingWriter(folder / "a.ring", pid=1, start_ticks=1)
        self.ring.write_identity({"rank": 0})
        self.registry = GroupRegistry(self.ring, self._make_stream, lambda: None)
        self.reader = RingReader(self.ring.map)

    def _make_stream(self, uid: int, slot: int) -> StreamRecorder:
        return StreamRecorder(self.ring, uid, slot, lambda work: work)

    def make_call(self, stream: StreamRecorder | None) -> None:
        assert stream is not None
        body = stream.pack_record_body(0, 0, 0)
        stream.finish_call(stream.enter_call(7, body, 0, CompletionMode.RETURN))

    def read_snapshot(self, now_ns: int = 0) -> RingSnapshot:
        written = self.ring.written_count
        for stream in self.registry.streams.values():
            stream.update_ring(0)
        self.ring.write_pulse(written)
        return self.reader.read_snapshot(now_ns or self.newest_ns)

    @property
    def newest_ns(self) -> int:
        streams = self.registry.streams.values()
        return max(stream._last_entered_ns for stream in streams) + 1


@pytest.fixture
def watched(tmp_path: Path) -> WatchedGroups:
    return WatchedGroups(tmp_path)


def test_file_takes_only_the_room_that_is_used(watched: WatchedGroups) -> None:
    status = os.stat(watched.ring.path)
    assert status.st_size == CHECKS.offset > 4 << 20
    assert status.st_blocks * 512 <= INITIAL_SIZE + (1 << 16) < 3 << 20


def test_all_slots_can_be_used_and_one_more_is_reported_as_missing(watched: WatchedGroups) -> None:
    track = watched.registry.open_group(kept := Group("0"))
    for tag in range(STREAM_SLOTS - 1):
        assert watched.registry.get_channel(track, StreamKind.SEND, 1, tag) is not None
    assert watched.registry.get_channel(track, StreamKind.SEND, 1, STREAM_SLOTS) is None
    watched.make_call(track.channels["send", 1, STREAM_SLOTS - 2])
    snapshot = watched.read_snapshot()
    assert len(snapshot.streams) == STREAM_SLOTS
    assert {s.tag for s in snapshot.streams if s.entered} == {STREAM_SLOTS - 2}
    assert watched.registry.dropped_count == 1
    assert kept.size() == 2


def test_room_of_groups_that_are_gone_is_used_again(
    watched: WatchedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(recorder_groups, "monotonic", lambda: now)
    kept = Group("kept")
    lasting = watched.registry.open_group(kept).collective_stream
    watched.make_call(lasting)
    for number in range(STREAM_SLOTS + 2000):
        group = Group(f"{number}")
        watched.make_call(watched.registry.open_group(group).collective_stream)
        now += 0.1
        del group
        if number % 500 == 0:
            gc.collect()
    snapshot = watched.read_snapshot()
    assert len(snapshot.streams) < 1000
    assert {s.group.name for s in snapshot.streams} >= {"kept", str(STREAM_SLOTS + 1999)}
    assert (snapshot.opened, watched.registry.dropped_count) == (STREAM_SLOTS + 2001, 0)
    assert os.stat(watched.ring.path).st_blocks * 512 < INITIAL_SIZE + (1 << 20)


def test_streams_of_groups_that_are_gone_stay_readable_for_a_while(
    watched: WatchedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_groups, "monotonic", lambda: 100.0)
    for number in range(1000):
        group = Group(f"{number}")
        watched.make_call(watched.registry.open_group(group).collective_stream)
        del group
    assert len(watched.read_snapshot().streams) == 1000


def test_full_file_system_leaves_the_groups_unrecorded(
    watched: WatchedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    track = watched.registry.open_group(kept := Group("0"))
    streams = [watched.registry.get_channel(track, StreamKind.SEND, 1, tag) for tag in range(600)]
    assert streams[0] is not None
    assert streams[-1] is None
    assert watched.registry.dropped_count > 0
    assert kept.size() == 2


def test_loss_of_a_closed_stream_is_not_that_of_its_successor(watched: WatchedGroups) -> None:
    first = watched.registry.open_group(Group("first")).collective_stream
    assert first is not None
    first.mark_incomplete(LossReason.FAULT)
    assert watched.read_snapshot().streams[0].loss is not None
    watched.registry._close_stream(first)
    watched.registry.open_group(kept := Group("second"))
    (state,) = watched.read_snapshot(1).streams
    assert (state.group.name, state.loss) == ("second", None)
    assert kept.size() == 2


def test_heap_is_used_up_only_by_open_streams(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "a.ring", pid=1, start_ticks=1)
    big = {"desc": "x" * (HEAP_SIZE // 3)}
    for _ in range(10):
        ring.close_stream(ring.open_stream(1, big))
    ring.open_stream(2, big)
    ring.open_stream(3, big)
    with pytest.raises(OverflowError, match="no room"):
        ring.open_stream(4, big)


def test_full_heap_is_freed_of_retired_streams(watched: WatchedGroups) -> None:
    big = model_groups.Group(name="x" * (HEAP_SIZE // 3), desc="d", ranks=(0, 1))

    def open_stream() -> StreamRecorder | None:
        return watched.registry.open_stream(StreamKind.COLLECTIVE, big)

    retired, kept = open_stream(), open_stream()
    assert retired is not None and kept is not None
    watched.registry.retire_stream(retired)
    assert open_stream() is not None
    assert open_stream() is None
    assert (watched.registry.dropped_count, watched.ring.used_slot_count) == (1, 2)


def make_dormant_channels(watched: WatchedGroups, count: int) -> list[StreamRecorder | None]:
    track = watched.registry.open_group(group := Group("0"))
    watched.kept = group  # type: ignore[attr-defined]  # it must outlive this function
    channels = [
        watched.registry.get_channel(track, StreamKind.SEND, 1, tag) for tag in range(count)
    ]
    for channel in channels:
        watched.make_call(channel)
    return channels


def test_dormant_streams_are_not_read_again(watched: WatchedGroups) -> None:
    channels = make_dormant_channels(watched, 500)
    later_ns = watched.newest_ns + int(2 * DORMANT_AFTER_S * SECOND_NS)
    first = watched.read_snapshot(later_ns)
    second = watched.read_snapshot(later_ns + SECOND_NS)
    assert len(second.streams) == 501
    assert sum(map(len, second.dormant_chunks.values())) == 501
    assert all(first.dormant_chunks[n] is chunk for n, chunk in second.dormant_chunks.items())
    assert second.active_streams == ()
    watched.make_call(channels[250])
    third = watched.reader.read_snapshot(watched.newest_ns)  # from its record alone
    assert {s.tag for s in third.streams if s.entered == 2} == {250}
    chunks = second.dormant_chunks.items()
    assert sum(third.dormant_chunks.get(n) is not chunk for n, chunk in chunks) == 1
    fourth = watched.read_snapshot(later_ns)
    assert {s.tag for s in fourth.streams if s.entered == 2} == {250}


def test_loss_of_a_dormant_stream_is_seen(watched: WatchedGroups) -> None:
    channels = make_dormant_channels(watched, 100)
    later_ns = watched.newest_ns + int(2 * DORMANT_AFTER_S * SECOND_NS)
    watched.read_snapshot(later_ns)
    assert channels[50] is not None
    channels[50].mark_incomplete(LossReason.FAULT)
    lossy = [s for s in watched.read_snapshot(later_ns).streams if s.loss is not None]
    assert [s.tag for s in lossy] == [50]


def test_ages_of_dormant_streams_are_updated_when_they_are_reported(
    watched: WatchedGroups,
) -> None:
    make_dormant_channels(watched, 20)
    later_ns = watched.newest_ns + int(2 * DORMANT_AFTER_S * SECOND_NS)
    watched.read_snapshot(later_ns)
    (state, *_) = watched.read_snapshot(later_ns + 100 * SECOND_NS).dormant_chunks[0]
    assert state.update_ages(later_ns + 100 * SECOND_NS).entered_s == pytest.approx(
        state.entered_s + 100
    )


def test_age_of_the_newest_call_grows_while_all_streams_are_dormant(
    watched: WatchedGroups,
) -> None:
    make_dormant_channels(watched, 40)
    first = watched.read_snapshot(watched.newest_ns + SECOND_NS)
    assert first.get_newest_call_s() == pytest.approx(1.0, abs=0.01)
    second = watched.read_snapshot(watched.newest_ns + 60 * SECOND_NS)
    assert second.dormant_chunks[0] is first.dormant_chunks[0]
    assert second.get_newest_call_s() == pytest.approx(60.0, abs=0.01)
