"""Process groups that number their members by themselves, the processes behind these numbers, and the
two ends of point-to-point channels.

Such a group may join processes of different jobs. Each member reports what identifies the group and
its own number there; `ForeignGroups` puts these together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import (
    DECLARED_BACKEND,
    Group,
    GroupKey,
    OutsideMember,
    RankTuple,
    unpack_ranks,
)
from hangwatch.model.ranks import AttemptKey
from hangwatch.protocol import heartbeat

from .call_stream import CallStream, GroupState
from .process import ChannelKey, Process

_FIRST_OUTSIDE = -2  # -1 means any rank
_MAX_OUTSIDE_KEPT = 1 << 17


class MemberAttempt(Protocol):
    """The attempt of a member."""

    job: str
    number: int
    key: AttemptKey

    @property
    def is_finished(self) -> bool: ...

    def replace_group(self, process: Process, stream: CallStream, group: Group) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A process that says that it has a number in a foreign group."""

    attempt: MemberAttempt
    process: Process


@dataclass(slots=True, eq=False)
class _ForeignGroup:
    identity: str
    numbers: tuple[int, ...]
    claims: dict[int, list[Member]] = field(default_factory=dict)  # the key is the number
    # Several live processes claim one number: these are groups that cannot be told apart.
    is_contested: bool = False

    def find_member(self, number: int) -> Member | None:
        """The process behind a number: a live one, or the last that had it."""
        claims = self.claims.get(number)
        if not claims:
            return None
        return next((m for m in claims if m.process.is_alive), claims[-1])


@dataclass(slots=True)
class ForeignGroups:
    """All foreign groups of all jobs."""

    _groups_by_identity: dict[str, _ForeignGroup] = field(default_factory=dict)
    # The processes that `OutsideMember` objects stand for, by the value of these.
    _members_by_value: dict[int, Member] = field(default_factory=dict)
    _outside: dict[tuple[object, ...], OutsideMember] = field(default_factory=dict)
    _next_value: int = _FIRST_OUTSIDE
    _changed: dict[str, None] = field(default_factory=dict)  # identities, as an ordered set

    def join_group(
        self, attempt: MemberAttempt, process: Process, identity: heartbeat.StreamIdentity
    ) -> Group:
        """Registers a member, and returns the group as it is known before `connect_members`."""
        numbers = unpack_ranks(identity.ranks)
        key = f"{identity.foreign}/{len(numbers)}"
        group = self._groups_by_identity.get(key)
        if group is None:
            group = self._groups_by_identity[key] = _ForeignGroup(
                key, RankTuple(range(len(numbers)))
            )
        if 0 <= identity.number < len(numbers):
            claims = group.claims.setdefault(identity.number, [])
            if all(claim.process is not process for claim in claims):
                claims.append(Member(attempt, process))
        self._changed[key] = None
        # The creation of a group, and calls that are declared for it, are streams of their own.
        part = ""
        if identity.kind is StreamKind.SETUP:
            part = " set-up"
        elif identity.backend == DECLARED_BACKEND:
            part = " declared"
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
        return self._make_view(group, attempt, process, reported)

    def leave_groups(self, process: Process) -> None:
        """Forgets a process that no longer holds its rank."""
        keys = {s.group.foreign for s in process.streams.values() if s.group.foreign}
        if not keys:
            return
        for key in keys:
            group = self._groups_by_identity.get(key)
            if group is None:
                continue
            for number, claims in list(group.claims.items()):
                claims[:] = [claim for claim in claims if claim.process is not process]
                if not claims:
                    del group.claims[number]
            self._changed[key] = None
        self._members_by_value = {
            value: member
            for value, member in self._members_by_value.items()
            if member.process is not process
        }

    def mark_changed(self, process: Process) -> None:
        """Marks the groups of a process to be connected again, because it has exited."""
        for stream in process.streams.values():
            if stream.group.foreign in self._groups_by_identity:
                self._changed[stream.group.foreign] = None

    def connect_members(self) -> None:
        """Brings all groups up to date that have changed since the last time."""
        changed, self._changed = self._changed, {}
        for key in changed:
            group = self._groups_by_identity.get(key)
            if group is not None and group.claims:
                self._connect_group(group)
            elif group is not None:
                del self._groups_by_identity[key]

    def find_outside(self, rank: int) -> Member | None:
        """The process that an `OutsideMember` stands for, if it is known."""
        return self._members_by_value.get(rank)

    def _connect_group(self, group: _ForeignGroup) -> None:
        group.is_contested = any(
            sum(claim.process.is_alive for claim in claims) > 1 for claims in group.claims.values()
        )
        views: dict[tuple[int, GroupKey, str], Group] = {}
        for member in itertools.chain.from_iterable(group.claims.values()):
            for stream in member.process.streams.values():
                if stream.group.foreign == group.identity:
                    view = self._make_view(group, member.attempt, member.process, stream.group)
                    view = views.setdefault((id(member.attempt), view.key, view.backend), view)
                    member.attempt.replace_group(member.process, stream, view)
                    number = stream.member_peer
                    if number is not None and number >= 0:
                        stream.peer = view.ranks[number] if number < len(view.ranks) else -1
        self._connect_streams(group)

    def _connect_streams(self, group: _ForeignGroup) -> None:
        """Shows each attempt the streams of outside members, and connects the ends of channels."""
        states: dict[int, tuple[MemberAttempt, GroupState]] = {}
        channels: dict[tuple[StreamKind, int, int, int | None], CallStream] = {}
        streams: list[tuple[Member, CallStream]] = []
        for number, claims in group.claims.items():
            current = group.find_member(number)
            for member in claims:
                for stream in member.process.streams.values():
                    if stream.group.foreign != group.identity:
                        continue
                    if stream.group_state is not None:
                        states[id(stream.group_state)] = member.attempt, stream.group_state
                    if member is not current or group.is_contested:
                        continue
                    streams.append((member, stream))
                    if stream.member_peer is not None:
                        key = stream.kind, number, stream.member_peer, stream.tag
                        channels[key] = stream
        for attempt, state in states.values():
            state.outside = {
                self._get_outside_process(member): stream
                for member, stream in streams
                if member.attempt is not attempt
                and stream.peer is None
                and stream.group.key == state.key
            }
        for (kind, number, peer, tag), stream in channels.items():
            other = channels.get((StreamKind.RECV, peer, number, tag))
            if kind is StreamKind.SEND and other is not None:
                connect_ends(stream, other)

    def _make_view(
        self, group: _ForeignGroup, attempt: MemberAttempt, process: Process, reported: Group
    ) -> Group:
        """The group with the ranks of an attempt, or of one process alone if it is contested."""
        ranks: list[int] = []
        for number in group.numbers:
            member = group.find_member(number)
            if group.is_contested:
                own_claims = group.claims.get(number, ())
                is_own = any(claim.process is process for claim in own_claims)
                member = Member(attempt, process) if is_own else None
            if member is not None and member.attempt is attempt:
                ranks.append(member.process.rank)
            elif member is not None:
                ranks.append(self._get_outside_process(member))
            else:
                label = f"member {number} of {reported.title} (whose process is not known)"
                ranks.append(self._get_outside((group.identity, number), label))
        part = reported.part.partition("@")[0]
        if group.is_contested:
            part = f"{part}@{process.rank}"
        return replace(reported, ranks=RankTuple(ranks), part=part)

    def _get_outside_process(self, member: Member) -> OutsideMember:
        process, attempt = member.process, member.attempt
        place = f"rank {process.rank} of job {attempt.job}"
        if attempt.number:
            place += f" (attempt {attempt.number})"
        key = attempt.key, process.host, process.key, process.rank
        outside = self._get_outside(key, place)
        self._members_by_value[outside] = member
        return outside

    def _get_outside(self, key: tuple[object, ...], label: str) -> OutsideMember:
        outside = self._outside.get(key)
        if outside is None:
            if len(self._outside) >= _MAX_OUTSIDE_KEPT:
                self._outside.clear()
            outside = self._outside[key] = OutsideMember.create(self._next_value, label)
            self._next_value -= 1
        return outside


def connect_channel(processes: Mapping[int, Process], process: Process, stream: CallStream) -> None:
    """Sets `CallStream.other_end` of a new stream, and of the peer's stream of the same channel."""
    peer = processes.get(stream.peer) if stream.peer is not None else None
    if processes.get(process.rank) is not process:
        return
    process.channels.setdefault(_get_channel_key(stream), []).append(stream)
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
    channels = process.channels.get(_get_channel_key(stream), [])
    if stream in channels:
        channels.remove(stream)
    if not channels:
        process.channels.pop(_get_channel_key(stream), None)


def _get_channel_key(stream: CallStream) -> ChannelKey:
    return stream.kind, stream.peer, stream.tag


def disconnect_channel(stream: CallStream) -> None:
    """Separates a stream from the peer's: its process no longer holds its rank."""
    if stream.other_end is not None:
        stream.other_end.other_end = None
        stream.other_end = None
