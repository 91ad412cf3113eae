"""The streams of this process: of process groups, point-to-point channels, and worlds' set-ups."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeVar

from torch.distributed import distributed_c10d as c10d

from hangwatch.model.calls import ANY_SOURCE, LossReason, StreamKind, encode_invalid_peer
from hangwatch.model.groups import (
    DEVICE_BACKENDS,
    FLIGHT_RECORDER_BACKENDS,
    SYMMETRIC_BACKEND,
    Group,
    RankTuple,
)
from hangwatch.ring.parts import encode_description

from . import faults
from .group_origins import origin_tracker
from .streams import StreamRecorder
from .writer import JsonObject, RingWriter

StreamKey = TypeVar("StreamKey")

MIN_SWEPT_SLOTS = 256
_OPENED_BETWEEN_SWEEPS = 64  # streams
# Node agents read the ring twice a second, and at least every 20 seconds report what they read.
CLOSING_DELAY_S = 10.0


@dataclass(slots=True, eq=False)
class GroupTrack:
    """One process group as this process sees it."""

    group: Group  # the ranks of a foreign group are the numbers of its members
    group_ref: weakref.ref[Any]  # a strong reference would keep the communicators
    collective_stream: StreamRecorder | None
    channels: dict[tuple[str, int | None, int], StreamRecorder | None] = field(default_factory=dict)
    has_lost_messages: bool = False  # perhaps of channels that are not opened yet
    has_device_backend: bool = field(init=False)
    has_flight_recorder: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_device_backend = self.runs_on(DEVICE_BACKENDS)
        self.has_flight_recorder = self.runs_on(FLIGHT_RECORDER_BACKENDS)

    def runs_on(self, backends: tuple[str, ...]) -> bool:
        """Whether calls of the group may go to one of these backends."""
        return any(name in self.group.backend for name in backends)

    def mark_incomplete(self, *, messages: bool) -> None:
        """Records that a collective was not recorded or, with ``messages``, a send or receive."""
        self.has_lost_messages |= messages
        streams = list(self.channels.values()) if messages else [self.collective_stream]
        for stream in streams:
            if stream is not None:
                stream.mark_incomplete(LossReason.FAULT)


class GroupRegistry:
    """Finds the stream that a call belongs to, and opens it the first time. If a table of the ring
    is full, calls are not recorded, but they are made.

    Threads that make the first call of a group at the same time wait for no lock: each opens a
    stream, and `dict.setdefault`, which is atomic, decides which of them is used.
    """

    def __init__(
        self,
        ring: RingWriter,
        make_stream: Callable[[int, int], StreamRecorder],
        on_group_deleted: Callable[[], None],
    ) -> None:
        """``make_stream`` takes a uid and a slot; ``on_group_deleted`` is called when the Python
        object of a group is deleted, before another object can get its id.
        """
        self._ring = ring
        self._on_group_deleted = on_group_deleted
        self._make_stream = make_stream
        self._uids = itertools.count(1)
        # The tracks by id(process group). The id may be reused: compare with `group_ref`.
        self.tracks: dict[int, GroupTrack] = {}
        self.symmetric_tracks: dict[int, GroupTrack] = {}  # likewise, of `find_symmetric_group`
        # The key of a group without a name is the group itself.
        self._tracks_by_key: dict[Any, GroupTrack] = {}
        self.world_size = 0
        self.generation = 0  # the number of worlds of that size that this process has been in
        # Each retired stream with the time at which it was retired.
        self._retired_streams: list[tuple[float, StreamRecorder]] = []
        self._sweep_at = MIN_SWEPT_SLOTS  # the number of used slots that starts the next sweep
        self.dropped_count = 0
        # The reason why calls of groups that are not opened yet may have been lost, if any were.
        self._loss: LossReason | None = None
        self.streams: dict[int, StreamRecorder] = {}  # the key is the uid

    def get_channel(
        self, track: GroupTrack, kind: StreamKind, peer: int | None, tag: int
    ) -> StreamRecorder | None:
        """The channel to or from group rank ``peer`` (None: from any); None if it is not recorded."""
        key = (kind.value, peer, tag)
        if key not in track.channels:
            ranks = track.group.ranks
            if peer is None:
                peer_rank = ANY_SOURCE
            elif 0 <= peer < len(ranks):
                peer_rank = ranks[peer]
            else:
                peer_rank = encode_invalid_peer(peer)
            channel = self.open_stream_once(track.channels, key, kind, track.group, peer_rank, tag)
            if channel is not None and track.has_lost_messages:
                channel.mark_incomplete(LossReason.FAULT)
        return track.channels[key]

    def open_stream_once(
        self,
        streams: dict[StreamKey, StreamRecorder | None],
        key: StreamKey,
        kind: StreamKind,
        group: Group,
        peer: int | None = None,
        tag: int | None = None,
    ) -> StreamRecorder | None:
        """Opens the stream of this key, unless it exists or another thread opens it first."""
        if key not in streams:
            stream = self.open_stream(kind, group, peer, tag)
            if streams.setdefault(key, stream) is not stream:
                self._close_stream(stream)
        return streams[key]

    def open_stream(
        self, kind: StreamKind, group: Group, peer: int | None = None, tag: int | None = None
    ) -> StreamRecorder | None:
        """Opens a stream, of a channel if ``peer`` is set; None if the ring has no room for it."""
        uid = next(self._uids)
        try:
            slot = self._open_slot(uid, encode_description(kind, group, peer, tag))
        except OverflowError as full:
            self.dropped_count += 1
            faults.record_message(f"{full}; calls beyond them are not watched")
            return None
        stream = self._make_stream(uid, slot)
        self.streams[uid] = stream
        if self._loss is not None:
            stream.mark_incomplete(self._loss)
        return stream

    def mark_incomplete(self, reason: LossReason) -> None:
        """Records that a call of some stream was lost: from now on no numbers are certain."""
        self.dropped_count += 1
        self._loss = reason
        for stream in list(self.streams.values()):
            stream.mark_incomplete(reason)

    def retire_stream(self, stream: StreamRecorder) -> None:
        """Allows another stream to take the slot of this one after `CLOSING_DELAY_S`, or earlier if
        the ring is full. Until then a reader can still see its last position.
        """
        self._retired_streams.append((monotonic(), stream))

    def _open_slot(self, uid: int, description: JsonObject) -> int:
        """Takes a slot of the ring. From `MIN_SWEPT_SLOTS` on, streams of deleted groups are closed
        now and then, so that there are about as many slots as streams in use.
        """
        if self._ring.used_slot_count >= self._sweep_at:
            self._close_dead_streams(monotonic() - CLOSING_DELAY_S)
            self._sweep_at = self._ring.used_slot_count + _OPENED_BETWEEN_SWEEPS
        try:
            return self._ring.open_stream(uid, description)
        except OverflowError:
            self._close_dead_streams(monotonic())
            return self._ring.open_stream(uid, description)

    def _close_dead_streams(self, before: float) -> None:
        """Retires the streams of deleted groups, and closes those retired before that time."""
        tables: tuple[dict[Any, GroupTrack], ...] = (
            self.tracks,
            self.symmetric_tracks,
            self._tracks_by_key,
        )
        dead_tracks = {}
        for table in tables:
            for key, track in list(table.items()):
                if track.group_ref() is None:
                    dead_tracks[id(track)] = track
                    table.pop(key, None)
        for track in dead_tracks.values():
            for stream in (track.collective_stream, *track.channels.values()):
                if stream is not None:
                    self.retire_stream(stream)
        retired, self._retired_streams = self._retired_streams, []
        for retired_at, stream in retired:
            if retired_at > before:
                self._retired_streams.append((retired_at, stream))
            else:
                self._close_stream(stream)

    def _close_stream(self, stream: StreamRecorder | None) -> None:
        if stream is not None:
            self.streams.pop(stream.uid, None)
            stream.close_stream()

    def find_group(self, pg: Any) -> GroupTrack:
        """The track of a process group, which is opened at its first call."""
        track = self.tracks.get(id(pg))
        if track is None or track.group_ref() is not pg:
            track = self.open_group(pg)
        return track

    def find_symmetric_group(self, pg: Any) -> GroupTrack:
        """The track of a group's calls on symmetric memory. The group's backend neither makes nor
        counts them, so their stream, its numbers and what is known of its completion are their own.
        """
        track = self.symmetric_tracks.get(id(pg))
        if track is None or track.group_ref() is not pg:
            whole = self.find_group(pg)
            group = whole.group
            described = group.desc not in ("", "undefined")
            symmetric = replace(
                group,
                name=f"{group.name}/{SYMMETRIC_BACKEND}",
                desc=f"{group.desc} (symmetric memory)" if described else group.desc,
                backend=SYMMETRIC_BACKEND,
            )
            key = (whole.group.key, SYMMETRIC_BACKEND)
            is_recorded = whole.collective_stream is not None
            track = self._open_track(symmetric, key, whole.group_ref, is_recorded=is_recorded)
            self.symmetric_tracks[id(pg)] = track
        return track

    def open_group(self, pg: Any) -> GroupTrack:
        """Makes the track of a group, or finds it if C++ made a new Python object of the group."""
        origin = origin_tracker.find_origin(pg)
        name = _read_attribute(pg, "group_name")
        desc = _read_attribute(pg, "group_desc") or "undefined"
        backend = _get_backend(pg)
        if (foreign := origin.foreign) is not None:
            group = replace(foreign, name=name or foreign.name, desc=desc, backend=backend)
        else:
            try:
                ranks = RankTuple(c10d.get_process_group_ranks(pg))
            except (KeyError, ValueError, RuntimeError):  # torch destroyed it and forgot its ranks
                ranks = RankTuple(range(pg.size()))
            group = Group(
                name=name,
                desc=desc,
                backend=backend,
                ranks=ranks,
                generation=self.generation,
                world_size=self.world_size,
            )
        # The callback also runs at the end of the process, when the modules are already empty.
        on_group_deleted = self._on_group_deleted
        is_finalizing = sys.is_finalizing

        def handle_deletion(_: Any) -> None:
            if not is_finalizing():
                on_group_deleted()

        ref = weakref.ref(pg, handle_deletion)
        key = group.key if group.name or group.foreign else weakref.ref(pg)
        # The "fake" backend simulates a world in one process: no other rank makes these calls.
        track = self._open_track(group, key, ref, is_recorded="fake" not in backend)
        self.tracks[id(pg)] = track
        return track

    def _open_track(
        self, group: Group, key: Any, ref: weakref.ref[Any], *, is_recorded: bool
    ) -> GroupTrack:
        track = self._tracks_by_key.get(key)
        if track is None:
            stream = self.open_stream(StreamKind.COLLECTIVE, group) if is_recorded else None
            track = self._tracks_by_key.setdefault(key, GroupTrack(group, ref, stream))
            if track.collective_stream is not stream:
                self._close_stream(stream)  # another thread has opened it, too, and was first
        else:
            track.group_ref = ref  # C++ kept the group; only its Python object was replaced
        return track


def _read_attribute(pg: Any, name: str) -> str:
    try:
        return str(getattr(pg, name))
    except (AttributeError, RuntimeError):  # unnamed groups raise
        return ""


def _get_backend(pg: Any) -> str:
    """The backends by device, such as ``cpu:gloo,cuda:nccl``; empty if they are not known."""
    try:
        if pg in c10d._world.pg_backend_config:
            return str(c10d.get_backend_config(pg))
        # torch.distributed does not know a group that other code has put together.
        return ",".join(f"{each.type}:{pg._get_backend(each).name()}" for each in pg._device_types)
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return ""
