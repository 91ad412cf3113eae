"""Process groups that number their members by themselves, the processes behind these numbers, and the
two ends of point-to-point channels.

Such a group may join processes of different jobs. Each member reports what identifies the group and
its own number there; `ForeignGroups` puts these together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import (
    DECLARED_BACKEND,
    SYMMETRIC_BACKEND,
    Group,
    OutsideMember,
    RankTuple,
    unpack_ranks,
)
from hangwatch.protocol.heartbeat import StreamIdentity

from .call_stream import CallStream
from .process import Process
from .tenants import get_tenant

_FIRST_OUTSIDE = -2  # -1 means any rank
_MAX_OUTSIDE_KEPT = 1 << 17


@dataclass(slots=True, eq=False)
class _ForeignGroup:
    identity: str
    numbers: tuple[int, ...]
    # The processes that report a number, by this number.
    claims: dict[int, list[Process]] = field(default_factory=dict)
    # Several live processes report one number: these are groups that cannot be distinguished.
    is_contested: bool = False

    def find_member(self, number: int) -> Process | None:
        """The process behind a number: a live one, or the last that had it."""
        member = None
        for member in self.claims.get(number, ()):
            if member.is_alive:
                break
        return member


@dataclass(slots=True)
class ForeignGroups:
    """All foreign groups of all jobs."""

    _groups_by_identity: dict[str, _ForeignGroup] = field(default_factory=dict)
    # The processes behind `OutsideMember` objects, by their values.
    _members_by_value: dict[int, Process] = field(default_factory=dict)
    _outside: dict[tuple[object, ...], OutsideMember] = field(default_factory=dict)
    _next_value: int = _FIRST_OUTSIDE
    _changed: dict[str, None] = field(default_factory=dict)  # identities, as an ordered set

    def join_group(self, process: Process, identity: StreamIdentity) -> Group:
        """Registers a member, and returns the group as it is known before `connect_members`."""
        numbers = unpack_ranks(identity.ranks)
        # Whoever may not report the other members cannot join their group either.
        key = f"{identity.foreign}/{len(numbers)}/{get_tenant(process.agent)}"
        if process.attempt.is_of_group:
            # What such processes do must not change what is concluded about the ranks of a world.
            key += f"/{process.attempt.job}"
        group = self._groups_by_identity.get(key)
        if group is None:
            group = _ForeignGroup(key, RankTuple(range(len(numbers))))
            self._groups_by_identity[key] = group
        if 0 <= identity.number < len(numbers):
            claims = group.claims.setdefault(identity.number, [])
            if process not in claims:
                claims.append(process)
        self._changed[key] = None
        # The creation of a group, and calls that its backend does not make, are streams of their own.
        part = ""
        if identity.kind is StreamKind.SETUP:
            part = " set-up"
        elif identity.backend in (DECLARED_BACKEND, SYMMETRIC_BACKEND):
            part = f" {identity.backend}"
        reported = Group(
            name=identity.name,
            desc=identity.desc,
            ranks=(),
            backend=identity.backend,
            generation=0,
            foreign=key,
            part=part,
            numbers=group.numbers,
        )
        return self._make_view(group, process, reported)

    def leave_groups(self, process: Process) -> None:
        """Forgets a process that no longer holds its rank."""
        keys = self.mark_changed(process)
        if not keys:
            return
        for key in keys:
            claims_by_number = self._groups_by_identity[key].claims
            for number, claims in list(claims_by_number.items()):
                if process in claims:
                    claims.remove(process)
                if not claims:
                    del claims_by_number[number]
        for value, member in list(self._members_by_value.items()):
            if member is process:
                del self._members_by_value[value]

    def mark_changed(self, process: Process) -> Collection[str]:
        """Marks the groups of a process to be connected again, and returns their identities."""
        identities = [stream.group.foreign for stream in process.streams.values()]
        known = dict.fromkeys(key for key in identities if key in self._groups_by_identity)
        self._changed.update(known)
        return known

    def connect_members(self) -> None:
        """Brings all groups up to date that have changed since the last time."""
        changed = self._changed
        self._changed = {}
        for key in changed:
            group = self._groups_by_identity.get(key)
            if group is not None and group.claims:
                self._connect_group(group)
            elif group is not None:
                del self._groups_by_identity[key]

    def find_outside(self, rank: int) -> Process | None:
        """The process behind an `OutsideMember`, if it is known."""
        return self._members_by_value.get(rank)

    def _connect_group(self, group: _ForeignGroup) -> None:
        """Gives the members their view of the group, shows each attempt the streams of outside members,
        and connects the ends of channels.
        """
        group.is_contested = any(
            sum(process.is_alive for process in claims) > 1 for claims in group.claims.values()
        )
        views: dict[tuple[object, ...], Group] = {}
        states = {}
        current = []  # the streams of the processes behind the numbers, unless that is contested
        channels = {}
        numbered = [
            (number, process) for number, claims in group.claims.items() for process in claims
        ]
        for number, process in numbered:
            attempt = process.attempt
            is_current = not group.is_contested and process is group.find_member(number)
            for stream in process.streams.values():
                if stream.group.foreign != group.identity:
                    continue
                view = self._make_view(group, process, stream.group)
                view = views.setdefault((attempt.key, view.key, view.backend), view)
                attempt.replace_group(process, stream, view)
                peer = stream.member_peer
                if peer is not None:
                    rank = view.ranks[peer] if peer < len(view.ranks) else -1
                    if rank != stream.peer:  # as far as it is known by now
                        forget_channel(process, stream)
                        stream.peer = rank
                        _add_channel(process, stream)
                if stream.group_state is not None:
                    states[id(stream.group_state)] = (attempt, stream.group_state)
                if is_current:
                    current.append((process, stream))
                    if peer is not None:
                        channels[stream.kind, number, peer, stream.tag] = stream
        for attempt, state in states.values():
            state.outside = {}
            for process, stream in current:
                is_outside = process.attempt is not attempt and stream.peer is None
                if is_outside and stream.group.key == state.key:
                    state.outside[self._get_outside_process(process)] = stream
        for (kind, number, peer, tag), stream in channels.items():
            receiving = channels.get((StreamKind.RECV, peer, number, tag))
            if kind is StreamKind.SEND and receiving is not None:
                connect_ends(stream, receiving)

    def _make_view(self, group: _ForeignGroup, process: Process, reported: Group) -> Group:
        """The group with the ranks of an attempt, or of one process alone if it is contested."""
        ranks = []
        for number in group.numbers:
            member = group.find_member(number)
            if group.is_contested:
                member = process if process in group.claims.get(number, ()) else None
            if member is not None and member.attempt is process.attempt:
                ranks.append(member.rank)
            elif member is not None:
                ranks.append(self._get_outside_process(member))
            else:
                label = f"member {number} of {reported.title} (whose process is not known)"
                ranks.append(self._get_outside((group.identity, number), label))
        part = reported.part.partition("@")[0]
        if group.is_contested:
            part = f"{part}@{process.rank}"
        return replace(reported, ranks=RankTuple(ranks), part=part)

    def _get_outside_process(self, process: Process) -> OutsideMember:
        attempt = process.attempt
        label = f"rank {process.rank} of job {attempt.job}"
        if attempt.number:
            label += f" (attempt {attempt.number})"
        key = attempt.key, process.host, process.key, process.rank
        outside = self._get_outside(key, label)
        self._members_by_value[outside] = process
        return outside

    def _get_outside(self, key: tuple[object, ...], label: str) -> OutsideMember:
        if key not in self._outside:
            if len(self._outside) >= _MAX_OUTSIDE_KEPT:
                self._outside.clear()
            self._outside[key] = OutsideMember.create(self._next_value, label)
            self._next_value -= 1
        return self._outside[key]


def connect_channel(process: Process, stream: CallStream) -> None:
    """Sets `CallStream.other_end` of a new stream, and of the peer's stream of the same channel."""
    if stream.peer is None:
        return
    _add_channel(process, stream)
    peer = process.attempt.processes.get(stream.peer)
    if peer is None:
        return
    opposite_kind = StreamKind.RECV if stream.kind is StreamKind.SEND else StreamKind.SEND
    for other in peer.channels.get((opposite_kind, process.rank, stream.tag), ()):
        if other.group.key == stream.group.key:
            connect_ends(stream, other)
            return


def connect_ends(stream: CallStream, other: CallStream) -> None:
    """Makes two streams the ends of one channel, and of no other."""
    if stream.other_end is not other or other.other_end is not stream:
        disconnect_channel(stream)
        disconnect_channel(other)
        stream.other_end, other.other_end = other, stream


def forget_channel(process: Process, stream: CallStream) -> None:
    """Leaves a closed stream out of the search for other ends. The peer's keeps its end: until it is
    closed as well, its calls are compared with those that were made here.
    """
    key = (stream.kind, stream.peer, stream.tag)
    others = [other for other in process.channels.pop(key, ()) if other is not stream]
    if others:
        process.channels[key] = others


def _add_channel(process: Process, stream: CallStream) -> None:
    key = (stream.kind, stream.peer, stream.tag)
    process.channels.setdefault(key, []).append(stream)


def disconnect_channel(stream: CallStream) -> None:
    """Separates a stream from the peer's: its process no longer holds its rank."""
    if stream.other_end is not None:
        stream.other_end.other_end = None
        stream.other_end = None
