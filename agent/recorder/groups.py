"""The sequences of this process: one for each process group, one for each point-to-point channel,
one for each world's set-up.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import pack_ranks

from . import faults
from .streams import Sequence
from .writer import RingWriter

# Completion of these cannot be asked of their Work objects without disturbing the device.
DEVICE_BACKENDS = ("nccl", "xccl", "hccl", "rccl", "mccl")


class GroupTrack:
    """One process group as this process sees it."""

    __slots__ = ("channels", "collective", "described", "device_backend", "gloo", "ranks", "ref")

    def __init__(
        self,
        ref: weakref.ref[Any],
        ranks: tuple[int, ...],
        described: dict[str, Any],
        collective: Sequence | None,
    ) -> None:
        self.ref = (
            ref  # never a strong reference: that would keep a destroyed group's communicators
        )
        self.ranks = ranks
        self.described = described
        self.collective = collective
        self.channels: dict[tuple[str, int, int], Sequence | None] = {}
        self.device_backend = self.runs_on(DEVICE_BACKENDS)

    def runs_on(self, backends: tuple[str, ...]) -> bool:
        """Its calls may go to one of these backends."""
        return any(name in self.described["backend"] for name in backends)

    def sequences(self) -> list[Sequence]:
        return [s for s in (self.collective, *self.channels.values()) if s is not None]

    def global_rank(self, group_rank: int) -> int:
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else -1


class Groups:
    """Finds the sequence that a call belongs to, opening it the first time. Tables that are full
    cost records, not calls.
    """

    def __init__(
        self, ring: RingWriter, sequence: Callable[[int, int], Sequence], forget: Callable[[], None]
    ) -> None:
        """``sequence`` makes one of a uid and a slot; ``forget`` is called when a group's Python
        object goes, before its id can be another's.
        """
        self._ring = ring
        self._forget = forget
        self._make = sequence
        self._uids = itertools.count(1)
        self.tracks: dict[int, GroupTrack] = {}  # by id(process group), to be checked with `ref`
        self._named: dict[tuple[int, int, str, str], GroupTrack] = {}
        self.world = self.generation = (
            0  # its size, and how many of that size this process has been in
        )
        self._retired: list[Sequence] = []
        self.dropped = 0
        self.sequences: list[Sequence] = []

    def channel(self, track: GroupTrack, kind: StreamKind, peer: int, tag: int) -> Sequence | None:
        """The channel to or from group rank ``peer`` (-1: from any)."""
        key = (kind.value, peer, tag)
        if key not in track.channels:
            told = {
                **track.described,
                "kind": kind.value,
                "peer": track.global_rank(peer),
                "tag": tag,
            }
            track.channels[key] = self.sequence(told)
        return track.channels[key]

    def sequence(self, told: dict[str, Any]) -> Sequence | None:
        """A new sequence; None once the ring has no room for it."""
        try:
            described = self._ring.describe(told)
            uid = next(self._uids)
            slot = self._slot(uid, described)
        except OverflowError as full:
            self.dropped += 1
            faults.note(f"{full}; calls beyond them are not watched")
            return None
        opened = self._make(uid, slot)
        self.sequences.append(opened)
        return opened

    def retire(self, sequence: Sequence) -> None:
        """It is over: another may have its slot."""
        self._retired.append(sequence)

    def _slot(self, uid: int, described: tuple[int, int]) -> int:
        """A slot of the ring. Those of what is gone are taken back only now: until then others may
        read their end.
        """
        try:
            return self._ring.open_sequence(uid, described)
        except OverflowError:
            self._close_dead()
            return self._ring.open_sequence(uid, described)

    def _close_dead(self) -> None:
        gone = {
            id(track): track
            for track in (*self.tracks.values(), *self._named.values())
            if track.ref() is None
        }
        self.tracks = {key: track for key, track in self.tracks.items() if id(track) not in gone}
        self._named = {key: track for key, track in self._named.items() if id(track) not in gone}
        retired, self._retired = self._retired, []
        for sequence in (
            *retired,
            *(sequence for track in gone.values() for sequence in track.sequences()),
        ):
            self.sequences.remove(sequence)
            sequence.close()

    def open(self, pg: Any) -> GroupTrack:
        """The track of a process group that makes its first call, or whose Python object is a new
        one.
        """
        ranks = _members(pg)
        told = {
            "kind": StreamKind.COLLECTIVE.value,
            "name": _ask(pg, "group_name"),
            "desc": _ask(pg, "group_desc") or "undefined",
            "ranks": pack_ranks(ranks),
            "backend": _backend(pg),
            "generation": self.generation,
            "world": self.world,
        }
        name = (self.world, self.generation, str(told["name"]), str(told["ranks"]))
        ref = weakref.ref(pg, lambda _: self._forget())
        track = self._named.get(name) if told["name"] else None
        if track is None:
            # The "fake" backend plays all ranks of a job in one process: there is nobody to compare
            # with.
            sequence = None if "fake" in str(told["backend"]) else self.sequence(told)
            track = self._named[name] = GroupTrack(ref, ranks, told, sequence)
        else:
            track.ref = ref  # C++ holds the group; only Python's wrapper of it came and went
        self.tracks[id(pg)] = track
        return track


def _members(pg: Any) -> tuple[int, ...]:
    """Global ranks of a group, in group-rank order."""
    from torch.distributed import distributed_c10d as c10d

    try:
        return tuple(c10d.get_process_group_ranks(pg))
    except (KeyError, ValueError, RuntimeError):  # made without torch.distributed's bookkeeping
        return tuple(range(pg.size()))


def _ask(pg: Any, name: str) -> str:
    try:
        return str(getattr(pg, name))
    except (AttributeError, RuntimeError):  # unnamed groups raise
        return ""


def _backend(pg: Any) -> str:
    from torch.distributed import distributed_c10d as c10d

    try:
        return (
            str(c10d.get_backend_config(pg))
            if pg in c10d._world.pg_backend_config
            else _ask(pg, "name")
        )
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return _ask(pg, "name")
