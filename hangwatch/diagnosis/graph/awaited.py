"""The ranks that a call waits for: by counts of calls, never by times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import unpack_ranks
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState

from .unwatched import has_completed_calls

_RANKS_PREFIX = "ranks="  # in the detail of a call that creates a group


class WaitResolver:
    """Finds the awaited ranks of calls at one moment.

    ``unable_to_finish`` are the ranks that cannot complete a call that they have entered,
    ``unable_to_call`` those that will enter none, or do not report.
    """

    def __init__(self, attempt: Attempt, now: float, silent_ranks: Collection[int]) -> None:
        self.unable_to_finish: set[int] = set()
        self.unable_to_call = set(silent_ranks)
        for rank in attempt.unable_ranks:
            process = attempt.processes[rank]
            if not process.is_alive or process.freeze_reason(now) is not None:
                self.unable_to_finish.add(rank)
            elif process.lifecycle >= Lifecycle.DESTROYED:
                self.unable_to_call.add(rank)
        self.unable_to_call |= self.unable_to_finish
        self._attempt = attempt
        self._silent_ranks = silent_ranks
        # By group: the lowest count of calls, and the members with it.
        self._last_members: dict[int, tuple[int, Mapping[int, int]]] = {}
        # By group, the members concerned if not all are, the call, and whether that is certain. The
        # group is identified by its state, since its key is as long as its list of members.
        self._awaited_cache: dict[
            tuple[int, tuple[int, ...] | None, int, bool, bool], Mapping[int, int]
        ] = {}

    def find_awaited_ranks(self, rank: int, stream: CallStream, certain: bool) -> Mapping[int, int]:
        """The ranks without which a stream cannot continue, each with the number of its first call
        that the rank has not entered.

        A thread that is certainly blocked in the newest call needs all members that are behind.
        Otherwise it may be in any unfinished call, and needs at least the members that are furthest
        behind. Silent ranks may be anywhere: they are awaited if they were last seen behind, or if
        no other rank is awaited. All ranks in the same call of a group share one mapping.

        Ranks that `find_uncounted_ranks` returns are awaited only if they can enter no call.
        """
        concerned = None
        if stream.kind is StreamKind.SETUP:
            concerned = get_new_group_ranks(stream, stream.entered)
        elif stream.kind is not StreamKind.COLLECTIVE:
            return self._find_awaited_peers(rank, stream)
        elif not certain and self._may_use_last_members(stream.group_state):
            return self._find_last_members(stream)
        is_counted = stream.loss is None
        key = (id(stream.group_state), concerned, stream.entered, certain, is_counted)
        awaited = self._awaited_cache.get(key)
        if awaited is None:
            awaited = self._find_awaited_members(stream, stream.group_state, concerned, certain)
            self._awaited_cache[key] = awaited
        if stream.group.foreign and rank in awaited:  # two members are threads of one process
            return {member: seq for member, seq in awaited.items() if member != rank}
        return awaited

    def _may_use_last_members(self, group_state: GroupState | None) -> bool:
        """Whether the members that are furthest behind are all that a call may wait for."""
        if group_state is None or self._silent_ranks or self.unable_to_finish:
            return False
        if group_state.has_losses:
            return False
        return len(group_state.members) == len(group_state.key[2])

    def _find_last_members(self, stream: CallStream) -> Mapping[int, int]:
        """The members that are furthest behind, if that is before the newest call of ``stream``. In a
        large group each host may have reported another position.
        """
        state = stream.group_state
        assert state is not None  # see `_may_use_last_members`
        last_members = self._last_members.get(id(state))
        if last_members is None:
            lowest = min([member.entered for member in state.members.values()])
            last = [rank for rank, member in state.members.items() if member.entered == lowest]
            last_members = self._last_members[id(state)] = lowest, dict.fromkeys(last, lowest + 1)
        lowest, awaited = last_members
        return awaited if stream.entered > lowest else {}

    def _find_awaited_peers(self, rank: int, stream: CallStream) -> Mapping[int, int]:
        """The other ends of a send or a receive."""
        uncounted = self.find_uncounted_ranks(rank, stream)
        if uncounted:
            return dict.fromkeys(self.unable_to_call.intersection(uncounted), stream.entered)
        if receives_from_any(stream):
            return _find_awaited_senders(self._attempt, rank, stream)
        awaited = _find_awaited_peer(self._attempt, rank, stream)
        if not awaited and stream.peer is not None and stream.peer in self._silent_ranks:
            return {stream.peer: stream.entered}
        return awaited

    def find_uncounted_ranks(self, rank: int, stream: CallStream) -> Collection[int]:
        """The ranks for which a call of ``rank`` may wait and of which counts do not show whether it
        does, because calls of theirs, or its own, are not completely recorded.
        """
        if stream.kind in (StreamKind.COLLECTIVE, StreamKind.SETUP):
            concerned = None
            if stream.kind is StreamKind.SETUP:
                concerned = get_new_group_ranks(stream, stream.entered)
            uncounted = self._find_uncounted_members(stream, concerned)
            return [member for member in uncounted if member != rank]
        if stream.peer is None:
            return ()
        if not receives_from_any(stream):
            other = stream.other_end
            is_lost = other.loss is not None if other is not None else self._may_miss(stream.peer)
            return (stream.peer,) if is_lost or stream.loss is not None else ()
        senders = [member for member in stream.group.ranks if member != rank]
        if stream.loss is not None:
            return senders
        return [member for member in senders if self._may_miss_message(member, stream)]

    def _find_uncounted_members(
        self, stream: CallStream, concerned: tuple[int, ...] | None
    ) -> Collection[int]:
        members = stream.group.ranks if concerned is None else concerned
        if stream.loss is not None:
            return members
        state = stream.group_state
        if state is None:
            return ()
        if not (state.has_losses or state.outside or self._attempt.incomplete_ranks):
            return ()
        uncounted = []
        streams = state.all_members
        for member in members:
            other = streams.get(member)
            if other.loss is not None if other is not None else self._may_miss(member):
                uncounted.append(member)
        return uncounted

    def _may_miss(self, rank: int) -> bool:
        """Whether a rank may have made calls in a stream that it has not reported."""
        return rank in self._attempt.incomplete_ranks

    def _may_miss_message(self, sender: int, receiving: CallStream) -> bool:
        """Whether sends of a rank to this receiver, or receives from it, may not be recorded."""
        if self._may_miss(sender):
            return True
        process = self._attempt.processes.get(sender)
        return process is not None and any(
            other.loss is not None and other.peer is not None
            for other in process.streams.values()
            if other.group.key == receiving.group.key
        )

    def _find_awaited_members(
        self,
        stream: CallStream,
        group_state: GroupState | None,
        concerned: tuple[int, ...] | None,
        certain: bool,
    ) -> Mapping[int, int]:
        entered = stream.entered
        streams = group_state.all_members if group_state is not None else {}
        members = stream.group.ranks if concerned is None else concerned
        behind: dict[int, int] = {}
        if concerned is None and len(streams) == len(members):
            behind = {m: s.entered + 1 for m, s in streams.items() if s.entered < entered}
        else:
            for member in members:
                count = streams[member].entered if member in streams else 0
                if count < entered:
                    behind[member] = count + 1
        uncounted = self._find_uncounted_members(stream, concerned)
        if uncounted:
            kept = self.unable_to_call
            if stream.loss is not None:
                behind = dict.fromkeys(kept.intersection(members), entered)
            for member in uncounted:
                if member not in kept:
                    behind.pop(member, None)
                elif member not in self._silent_ranks:
                    behind[member] = entered
        if behind and not certain:
            unknown: Collection[int] = self._silent_ranks
            if behind.keys() - streams.keys() and group_state and has_completed_calls(group_state):
                # They took part in earlier calls, and are not recorded.
                unknown = {*unknown, *(behind.keys() - streams.keys())}
            behind = _select_furthest_behind(behind, unknown)
        # Members that have entered the call but will never complete it.
        awaited: dict[int, int] = {}
        for member in _intersect_ranks(members, self._find_unable(group_state)):
            if member in streams and streams[member].is_pending:
                awaited[member] = entered
        if not behind:
            awaited.update(dict.fromkeys(_intersect_ranks(members, self._silent_ranks), entered))
        awaited.update(behind)
        return awaited

    def _find_unable(self, group_state: GroupState | None) -> set[int]:
        """`unable_to_finish`, and the members of a foreign group in other attempts that have exited."""
        if group_state is None or not group_state.outside:
            return self.unable_to_finish
        find = self._attempt.foreign_groups.find_outside
        members = {rank: find(rank) for rank in group_state.outside}
        ended = {rank for rank, m in members.items() if m is not None and not m.process.is_alive}
        return self.unable_to_finish | ended


def _select_furthest_behind(behind: Mapping[int, int], unknown: Collection[int]) -> dict[int, int]:
    """The members in the lowest call, and those whose position is unknown."""
    lowest = min((seq for member, seq in behind.items() if member not in unknown), default=0)
    return {member: seq for member, seq in behind.items() if seq == lowest or member in unknown}


def receives_from_any(stream: CallStream) -> bool:
    """Whether it receives from any source."""
    return stream.peer == -1 and stream.kind is StreamKind.RECV


def _intersect_ranks(members: Iterable[int], few: Collection[int]) -> Iterable[int]:
    return [member for member in members if member in few] if few else ()


def get_new_group_ranks(stream: CallStream, seq: int) -> tuple[int, ...] | None:
    """The members of the group that call ``seq`` of a set-up stream creates, if the call records
    them: new_group blocks only its members.
    """
    call = stream.calls.get(seq)
    detail = call.signature.detail if call is not None else None
    if detail is None or not detail.startswith(_RANKS_PREFIX):
        return None
    try:
        return unpack_ranks(detail.removeprefix(_RANKS_PREFIX))
    except ValueError:
        return None


def may_be_released(attempt: Attempt, rank: int, stream: CallStream) -> bool:
    """Whether the awaited call of the other end was reported after the rank's own last report, so
    that it may have continued since.
    """
    if stream.other_end is None:
        return False
    reported_at = attempt.processes[rank].reports.last_seen_at
    entered_before, entered_at = stream.other_end.last_growth
    return entered_before < stream.entered and entered_at > reported_at


def _find_awaited_peer(attempt: Attempt, rank: int, stream: CallStream) -> dict[int, int]:
    """The other end of a channel, if it has made fewer calls on it."""
    peer = stream.peer
    if peer is None:
        return {}
    call_count = 0 if stream.other_end is None else stream.other_end.entered
    if stream.kind is StreamKind.SEND:
        call_count += _count_any_source_receives(attempt, rank, stream, peer)
    return {peer: call_count + 1} if call_count < stream.entered else {}


def _count_any_source_receives(
    attempt: Attempt, rank: int, sending: CallStream, receiver: int
) -> int:
    """How many of the receiver's calls that receive from any source are left for ``rank``, after
    the completed sends of other ranks.
    """
    receives = _find_channels(attempt, receiver, StreamKind.RECV, sending, -1)
    receive_count = sum(stream.entered for stream in receives)
    if not receive_count:
        return 0
    used_count = 0
    for other in sending.group.ranks:
        if other != rank:
            sends = _find_channels(attempt, other, sending.kind, sending, receiver)
            used_count += sum(stream.completed or 0 for stream in sends)
    return max(0, receive_count - used_count)


def _find_awaited_senders(attempt: Attempt, rank: int, stream: CallStream) -> dict[int, int]:
    """The ranks that may still send to a receiver from any source, of which any one suffices; none
    if enough was sent.
    """
    sent_counts: dict[int, int] = {}
    received_count = 0  # by receives that name their source
    for member in stream.group.ranks:
        if member == rank:
            continue
        sends = _find_channels(attempt, member, StreamKind.SEND, stream, rank)
        receives = _find_channels(attempt, rank, StreamKind.RECV, stream, member)
        sent_counts[member] = sum(sending.entered for sending in sends)
        received_count += sum(receiving.completed or 0 for receiving in receives)
    if sum(sent_counts.values()) - received_count >= stream.entered:
        return {}
    able = {member for member in sent_counts if _may_still_send(attempt, member)}
    return {member: sent_counts[member] + 1 for member in able or sent_counts}


def _may_still_send(attempt: Attempt, rank: int) -> bool:
    process = attempt.processes.get(rank)
    if process is None:
        return True
    return process.is_alive and process.lifecycle < Lifecycle.DESTROYED


def _find_channels(
    attempt: Attempt, rank: int, kind: StreamKind, reference: CallStream, peer: int
) -> list[CallStream]:
    """A rank's channels to or from ``peer`` with the group and tag of the reference."""
    process = attempt.processes.get(rank)
    if process is None:
        return []
    return [
        stream
        for stream in process.streams.values()
        if stream.kind is kind
        and stream.peer == peer
        and stream.tag == reference.tag
        and stream.group.key == reference.group.key
    ]
