"""Threads that make the first calls of a group, or of a channel, at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.recorder.groups import GroupRegistry
from hangwatch.agent.recorder.streams import StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import StreamKind
from hangwatch.ring.layout import HEAP_SIZE
from hangwatch.ring.reader import RingReader


def make_ring(folder: Path) -> RingWriter:
    ring = RingWriter(folder / "a.ring", pid=1, start_ticks=1)
    ring.write_identity({"rank": 0})
    return ring


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


class Registry:
    """A registry of groups in whose first call another thread makes the same call."""

    def __init__(self, folder: Path) -> None:
        self.ring = make_ring(folder)
        self.groups = GroupRegistry(self.ring, self._make_stream, lambda: None)
        self.interrupt: Callable[[], Any] | None = None

    def _make_stream(self, uid: int, slot: int) -> StreamRecorder:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            other_thread = threading.Thread(target=interrupt)
            other_thread.start()
            other_thread.join()
        return StreamRecorder(self.ring, uid, slot, lambda work: work)

    def count_streams_in_ring(self) -> int:
        return len(RingReader(self.ring.map).read_snapshot(0).streams)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Makes the interpreter change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", ["default", ""])
def test_simultaneous_first_calls_of_a_group_share_a_stream(registry: Registry, name: str) -> None:
    pg, tracks = Group(name), []
    registry.interrupt = lambda: tracks.append(registry.groups.open_group(pg))
    tracks.append(registry.groups.open_group(pg))
    assert tracks[0] is tracks[1] is registry.groups.tracks[id(pg)]
    assert list(registry.groups.streams.values()) == [tracks[0].collective_stream]
    assert registry.count_streams_in_ring() == 1


def test_unnamed_groups_of_the_same_ranks_have_streams_of_their_own(registry: Registry) -> None:
    first, second = Group(""), Group("")
    tracks = [registry.groups.open_group(pg) for pg in (first, second)]
    assert tracks[0].collective_stream is not tracks[1].collective_stream
    assert registry.count_streams_in_ring() == 2


def test_simultaneous_first_calls_of_a_channel_share_a_stream(registry: Registry) -> None:
    pg = Group("pipeline")
    track, streams = registry.groups.open_group(pg), []

    def find_channel() -> None:
        streams.append(registry.groups.get_channel(track, StreamKind.SEND, 1, 0))

    registry.interrupt = find_channel
    find_channel()
    assert streams[0] is streams[1] is not None
    assert registry.count_streams_in_ring() == 2  # with the group's own


@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_open_streams_share_no_room_in_the_ring(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    opened: list[tuple[str, int]] = []

    def open_streams(thread: int) -> None:
        for number in range(100):
            desc = f"group {thread} {number}"
            description = {"kind": "collective", "name": desc, "desc": desc, "ranks": "0-1"}
            opened.append((desc, ring.open_stream(1 + thread * 100 + number, description)))

    threads = [threading.Thread(target=open_streams, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({slot for _, slot in opened}) == 400
    streams = RingReader(ring.map).read_snapshot(0).streams
    assert sorted(s.group.desc for s in streams) == sorted(desc for desc, _ in opened)


def test_a_full_heap_raises_overflow_error(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    big = {"desc": "x" * (HEAP_SIZE // 2 - 100)}
    ring.open_stream(1, big)
    ring.open_stream(2, big)
    with pytest.raises(OverflowError, match="no room"):
        ring.open_stream(3, big)
    ring.open_stream(4, {"desc": "a short one still has room"})
    assert ring.used_slot_count == 3
