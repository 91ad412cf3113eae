"""The sequences of this process: one for each process group, one for each point-to-point channel,
one for each world's set-up.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from hangwatch.model.backends import DEVICE_BACKENDS, FLIGHT_RECORDER_BACKENDS
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import pack_ranks

from . import faults
from .streams import StreamRecorder
from .writer import RingWriter


class GroupTrack:
    """One process group as this process sees it."""

    __slots__ = (
        "channels",
        "collective_stream",
        "description",
        "group_ref",
        "has_device_backend",
        "has_flight_recorder",
        "ranks",
    )

    def __init__(
        self,
        group_ref: weakref.ref[Any],
        ranks: tuple[int, ...],
        description: dict[str, Any],
        collective_stream: StreamRecorder | None,
    ) -> None:
        self.group_ref = (
            group_ref  # never a strong reference: that would keep a destroyed group's communicators
        )
        self.ranks = ranks
        self.description = description
        self.collective_stream = collective_stream
        self.channels: dict[tuple[str, int, int], StreamRecorder | None] = {}
        self.has_device_backend = self.runs_on(DEVICE_BACKENDS)
        self.has_flight_recorder = self.runs_on(FLIGHT_RECORDER_BACKENDS)

    def runs_on(self, backends: tuple[str, ...]) -> bool:
        """Its calls may go to one of these backends."""
        return any(name in self.description["backend"] for name in backends)

    def list_streams(self) -> list[StreamRecorder]:
        return [s for s in (self.collective_stream, *self.channels.values()) if s is not None]

    def global_rank(self, group_rank: int) -> int:
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else -1


class GroupRegistry:
    """Finds the sequence that a call belongs to, opening it the first time. Tables that are full
    cost records, not calls.
    """

    def __init__(
        self,
        ring: RingWriter,
        make_stream: Callable[[int, int], StreamRecorder],
        on_group_deleted: Callable[[], None],
    ) -> None:
        """``sequence`` makes one of a uid and a slot; ``forget`` is called when a group's Python
        object goes, before its id can be another's.
        """
        self._ring = ring
        self._on_group_deleted = on_group_deleted
        self._make_stream = make_stream
        self._uids = itertools.count(1)
        self.tracks: dict[int, GroupTrack] = {}  # by id(process group), to be checked with `ref`
        self._tracks_by_name: dict[tuple[int, int, str, str], GroupTrack] = {}
        self.world_size = self.generation = (
            0  # its size, and how many of that size this process has been in
        )
        self._retired_streams: list[StreamRecorder] = []
        self.dropped_count = 0
        self.streams: list[StreamRecorder] = []

    def get_channel(
        self, track: GroupTrack, kind: StreamKind, peer: int, tag: int
    ) -> StreamRecorder | None:
        """The channel to or from group rank ``peer`` (-1: from any)."""
        key = (kind.value, peer, tag)
        if key not in track.channels:
            told = {
                **track.description,
                "kind": kind.value,
                "peer": track.global_rank(peer),
                "tag": tag,
            }
            track.channels[key] = self.open_stream(told)
        return track.channels[key]

    def open_stream(self, description: dict[str, Any]) -> StreamRecorder | None:
        """A new sequence; None once the ring has no room for it."""
        try:
            described = self._ring.write_description(description)
            uid = next(self._uids)
            slot = self._open_slot(uid, described)
        except OverflowError as full:
            self.dropped_count += 1
            faults.record_message(f"{full}; calls beyond them are not watched")
            return None
        opened = self._make_stream(uid, slot)
        self.streams.append(opened)
        return opened

    def retire_stream(self, stream: StreamRecorder) -> None:
        """It is over: another may have its slot."""
        self._retired_streams.append(stream)

    def _open_slot(self, uid: int, heap_span: tuple[int, int]) -> int:
        """A slot of the ring. Those of what is gone are taken back only now: until then others may
        read their end.
        """
        try:
            return self._ring.open_stream(uid, heap_span)
        except OverflowError:
            self._close_dead_streams()
            return self._ring.open_stream(uid, heap_span)

    def _close_dead_streams(self) -> None:
        gone = {
            id(track): track
            for track in (*self.tracks.values(), *self._tracks_by_name.values())
            if track.group_ref() is None
        }
        self.tracks = {key: track for key, track in self.tracks.items() if id(track) not in gone}
        self._tracks_by_name = {
            key: track for key, track in self._tracks_by_name.items() if id(track) not in gone
        }
        retired, self._retired_streams = self._retired_streams, []
        for sequence in (
            *retired,
            *(sequence for track in gone.values() for sequence in track.list_streams()),
        ):
            self.streams.remove(sequence)
            sequence.close_stream()

    def open_group(self, pg: Any) -> GroupTrack:
        """The track of a process group that makes its first call, or whose Python object is a new
        one.
        """
        ranks = _get_members(pg)
        told = {
            "kind": StreamKind.COLLECTIVE.value,
            "name": _read_attribute(pg, "group_name"),
            "desc": _read_attribute(pg, "group_desc") or "undefined",
            "ranks": pack_ranks(ranks),
            "backend": _get_backend(pg),
            "generation": self.generation,
            "world": self.world_size,
        }
        name = (self.world_size, self.generation, str(told["name"]), str(told["ranks"]))
        ref = weakref.ref(pg, lambda _: self._on_group_deleted())
        track = self._tracks_by_name.get(name) if told["name"] else None
        if track is None:
            # The "fake" backend plays all ranks of a job in one process: there is nobody to compare
            # with.
            sequence = None if "fake" in str(told["backend"]) else self.open_stream(told)
            track = self._tracks_by_name[name] = GroupTrack(ref, ranks, told, sequence)
        else:
            track.group_ref = ref  # C++ holds the group; only Python's wrapper of it came and went
        self.tracks[id(pg)] = track
        return track


def _get_members(pg: Any) -> tuple[int, ...]:
    """Global ranks of a group, in group-rank order."""
    from torch.distributed import distributed_c10d as c10d

    try:
        return tuple(c10d.get_process_group_ranks(pg))
    except (KeyError, ValueError, RuntimeError):  # made without torch.distributed's bookkeeping
        return tuple(range(pg.size()))


def _read_attribute(pg: Any, name: str) -> str:
    try:
        return str(getattr(pg, name))
    except (AttributeError, RuntimeError):  # unnamed groups raise
        return ""


def _get_backend(pg: Any) -> str:
    from torch.distributed import distributed_c10d as c10d

    try:
        return (
            str(c10d.get_backend_config(pg))
            if pg in c10d._world.pg_backend_config
            else _read_attribute(pg, "name")
        )
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return _read_attribute(pg, "name")
