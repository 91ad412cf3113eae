"""The edges of the wait-for graph: calls in which ranks wait for others, and for whom, by counts of calls
and never by times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from math import inf, nextafter

from hangwatch.model.calls import ANY_SOURCE, Call, Signature, StreamKind, decode_invalid_peer
from hangwatch.model.groups import Group, unpack_ranks
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Wait
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState
from hangwatch.tracking.process import Process

_FULL_MESH_BACKEND = "gloo"  # a group exists only once all its members are connected
_RANKS_PREFIX = "ranks="  # the start of the detail of a call that creates a group

# The awaited ranks, each with the number of the call that it has not entered.
AwaitedCalls = Mapping[int, int]
ConcernedRanks = tuple[int, ...] | None  # the members that a call concerns; None: all of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEdge:
    """A wait, and the call stream in which the rank waits."""

    wait: Wait
    stream: CallStream

    @property
    def group(self) -> Group:
        return self.stream.group

    @property
    def seq(self) -> int:
        return self.wait.seq

    @property
    def op(self) -> str:
        return get_op_name(self.stream, self.seq)

    @property
    def rank_at_other_end(self) -> int | None:
        """The rank that waits, if it does so in a send or a receive."""
        return None if self.stream.peer is None else self.wait.rank


# Each rank has one, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True, eq=False)
class BlockedCall:
    """A rank waits in its newest call of ``stream`` for the ranks of ``awaited``. Ranks that wait for
    the same ranks share one mapping.
    """

    rank: int
    stream: CallStream
    began_at: float
    awaited: AwaitedCalls

    @property
    def any_suffices(self) -> bool:
        """Whether any one of the awaited ranks can end the wait."""
        return receives_from_any(self.stream)

    def make_wait(self, on_rank: int) -> Wait:
        name = self.stream.group.name
        return Wait(rank=self.rank, on_rank=on_rank, group=name, seq=self.awaited[on_rank])

    def make_edge(self, on_rank: int) -> WaitEdge:
        return WaitEdge(wait=self.make_wait(on_rank), stream=self.stream)


class WaiterIndex:
    """Groups of ranks, or of devices, that wait for the same ones, by their indices."""

    def __init__(self, groups: Iterable[tuple[Set[int], Iterable[int]]]) -> None:
        self.ranks_by_group: list[Set[int]] = []
        self.groups_by_awaited: dict[int, list[int]] = {}
        for index, (ranks, awaited) in enumerate(groups):
            self.ranks_by_group.append(ranks)
            for rank in awaited:
                self.groups_by_awaited.setdefault(rank, []).append(index)

    def find_waiters_of(self, targets: Iterable[int], within: Set[int] | None = None) -> set[int]:
        """The ranks from which a chain of waits leads to any of ``targets``, see `WaitGraph`."""
        target_ranks = set(targets)
        seen = set(target_ranks)
        to_search = list(target_ranks)
        searched_groups: set[int] = set()
        while to_search:
            for index in self.groups_by_awaited.get(to_search.pop(), ()):
                if index in searched_groups:
                    continue
                searched_groups.add(index)
                unseen = self.ranks_by_group[index] - seen
                if within is not None:
                    unseen &= within
                seen |= unseen
                to_search += unseen & self.groups_by_awaited.keys()
        return seen - target_ranks


def group_by_awaited(waits: Iterable[Collection[BlockedCall]]) -> list[list[BlockedCall]]:
    """The blocked calls in groups that wait for the same ranks: these share one mapping."""
    groups = defaultdict(list)
    for blocked_calls in waits:
        for blocked in blocked_calls:
            groups[id(blocked.awaited)].append(blocked)
    return list(groups.values())


def get_op_name(stream: CallStream, seq: int | None = None) -> str:
    """The operation of call ``seq``, or of the newest call."""
    call = stream.calls.get(stream.entered if seq is None else seq)
    if call is not None:
        return call.signature.title
    return Signature(op=stream.op).title if stream.op else "a collective"


def has_entered(stream: CallStream, rank: int, seq: int) -> bool:
    """Whether a member of the stream's group is known to have entered call ``seq`` of a collective."""
    if stream.group_state is None:
        return False
    member = stream.group_state.all_members.get(rank)
    if member is None or stream.loss is not None or member.loss is not None:
        return False
    return member.entered >= seq


def can_communicate(process: Process) -> bool:
    """Whether a process may still make calls: it is alive and has not destroyed its groups."""
    return process.is_alive and process.lifecycle < Lifecycle.DESTROYED


def is_not_initialized(process: Process | None) -> bool:
    """Whether a rank has not reached init_process_group, or not since it destroyed its groups."""
    if process is None:
        return True
    lifecycle = process.lifecycle
    has_no_groups = lifecycle <= Lifecycle.STARTING or lifecycle is Lifecycle.DESTROYED
    return process.is_alive and has_no_groups


def shows_all_members(attempt: Attempt, group_state: GroupState) -> bool:
    """Whether the members of a group that report show that the others exist: all took part in a
    collective, or had to connect before any of them could continue.
    """
    if has_completed_calls(group_state):
        return True
    for member, stream in group_state.members.items():
        if stream.group.foreign or stream.kind is not StreamKind.COLLECTIVE:
            continue
        is_initialised = attempt.processes[member].lifecycle is Lifecycle.INITIALISED
        if is_initialised and _FULL_MESH_BACKEND in stream.group.backend:
            return True
    return False


def has_completed_calls(group_state: GroupState) -> bool:
    """Whether a collective of the group is complete: all members took part in it."""
    for stream in group_state.members.values():
        if stream.kind is StreamKind.COLLECTIVE:
            counter = stream if stream.device is None else stream.device
            if (counter.completed or 0) > 0:
                return True
    return False


def receives_from_any(stream: CallStream) -> bool:
    """Whether the stream receives from any source."""
    return stream.peer == ANY_SOURCE and stream.kind is StreamKind.RECV


def has_receives_from_any(process: Process, channel: CallStream) -> bool:
    """Whether a rank also receives from any source with the group and the tag of a channel: then the
    calls with one number at its two ends need not be those of one message.
    """
    receives = process.channels.get((StreamKind.RECV, ANY_SOURCE, channel.tag), ())
    return any(s.entered > 0 and s.group.key == channel.group.key for s in receives)


def get_new_group_ranks(stream: CallStream) -> ConcernedRanks:
    """The members of the group that the newest call of a set-up stream creates, if the call records them:
    new_group blocks only its members. None for other streams.
    """
    if stream.kind is not StreamKind.SETUP:
        return None
    call = stream.calls.get(stream.entered)
    return None if call is None else read_new_group_ranks(call)


def read_new_group_ranks(call: Call) -> ConcernedRanks:
    """The members of the group that a set-up call creates, if it records them."""
    detail = call.signature.detail
    if detail is None or not detail.startswith(_RANKS_PREFIX):
        return None
    try:
        return unpack_ranks(detail.removeprefix(_RANKS_PREFIX))
    except ValueError:
        return None


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
        # The lowest count of calls, and the members with it, by group.
        self._last_members: dict[int, tuple[int, AwaitedCalls]] = {}
        # The key has the group, the members concerned, the call, whether the wait is certain, and
        # whether the stream is counted. The state identifies the group, since the group's own key is
        # as long as its list of members.
        self._awaited_cache: dict[tuple[int, ConcernedRanks, int, bool, bool], AwaitedCalls] = {}

    def find_awaited_ranks(self, rank: int, stream: CallStream, certain: bool) -> AwaitedCalls:
        """The ranks without which a stream cannot continue, each with the number of its first call
        that the rank has not entered.

        A thread that is certainly blocked in the newest call needs all members that are behind.
        Otherwise it may be in any unfinished call, and needs at least the members that are furthest
        behind. Silent ranks may be anywhere: they are awaited if they were last seen behind, or if
        no other rank is awaited. All ranks in the same call of a group share one mapping.

        Ranks that `find_uncounted_ranks` returns are awaited only if they can enter no call.
        """
        if stream.kind not in (StreamKind.COLLECTIVE, StreamKind.SETUP):
            return self._find_awaited_peers(rank, stream)
        state = stream.group_state
        if stream.kind is StreamKind.COLLECTIVE and state is not None and not certain:
            is_known = len(state.members) == state.size and not state.has_losses
            if is_known and not self._silent_ranks and not self.unable_to_finish:
                # Only the members that are furthest behind matter. In a large group each host may have
                # reported another position.
                last_members = self._last_members.get(id(state))
                if last_members is None:
                    lowest = min([member.entered for member in state.members.values()])
                    last = [r for r, member in state.members.items() if member.entered == lowest]
                    last_members = lowest, dict.fromkeys(last, lowest + 1)
                    self._last_members[id(state)] = last_members
                lowest, awaited = last_members
                return awaited if stream.entered > lowest else {}
        concerned = get_new_group_ranks(stream)
        is_counted = stream.loss is None
        key = (id(state), concerned, stream.entered, certain, is_counted)
        cached = self._awaited_cache.get(key)
        if cached is None:
            cached = self._find_awaited_members(stream, concerned, certain)
            self._awaited_cache[key] = cached
        if stream.group.foreign and rank in cached:  # two members are threads of one process
            return {member: seq for member, seq in cached.items() if member != rank}
        return cached

    def _find_awaited_peers(self, rank: int, stream: CallStream) -> AwaitedCalls:
        """The other ends of a send or a receive."""
        uncounted = self.find_uncounted_ranks(rank, stream)
        if uncounted:
            return dict.fromkeys(self.unable_to_call.intersection(uncounted), stream.entered)
        if receives_from_any(stream):
            return self._find_awaited_senders(rank, stream)
        peer = stream.peer
        if peer is None or decode_invalid_peer(peer) is not None:
            return {}
        met_count = self.count_met_calls(rank, stream)
        if met_count < stream.entered:
            return {peer: met_count + 1}
        return {peer: stream.entered} if peer in self._silent_ranks else {}

    def count_met_calls(self, rank: int, stream: CallStream) -> int:
        """How many calls of a send or a receive that names its peer have their other end. A receive from any
        source is one for a message of any sender, and what it took is not there for one by name.
        """
        other_end, peer = stream.other_end, stream.peer
        assert peer is not None
        met_count = 0 if other_end is None else other_end.entered
        if stream.kind is StreamKind.SEND:
            return met_count + self._bound_taken(peer, rank, stream)[1]
        least, most = self._bound_taken(rank, peer, stream)
        if not most or other_end is None:
            return met_count
        process = self._attempt.processes[rank]
        # A message that is there would have ended the receive in which the rank has been for a while.
        is_newest_call = stream.entered_at >= process.newest_call_at
        if is_newest_call and process.reports.last_seen_at - other_end.entered_at >= MIN_WAIT_S:
            taken_count = (other_end.completed or 0) - (stream.completed or 0)
            least = max(least, min(most, taken_count))
        return max(met_count - least, stream.completed or 0)

    def _bound_taken(self, receiver: int, sender: int, reference: CallStream) -> tuple[int, int]:
        """How many messages of one sender the receives from any source of a rank took, at least, and may
        have taken or take, at most: those that took no message of another sender.
        """
        count = self._count_messages
        most, least = count(receiver, StreamKind.RECV, reference, ANY_SOURCE)
        if most == 0:
            return 0, 0
        for other in reference.group.ranks:
            if other not in (receiver, sender):
                sent_count, done_count = count(other, StreamKind.SEND, reference, receiver)
                _, named_count = count(receiver, StreamKind.RECV, reference, other)
                least -= max(0, sent_count - named_count)
                most -= max(0, done_count - named_count)
        return max(0, least), max(0, most)

    def _find_awaited_senders(self, rank: int, stream: CallStream) -> AwaitedCalls:
        """The ranks any one of which may send to this receiver; none if enough was sent."""
        next_sends = {}
        able_ranks = set()
        available_count = 0  # messages that no receive by name has taken
        for member in stream.group.ranks:
            if member == rank:
                continue
            sent_count, _ = self._count_messages(member, StreamKind.SEND, stream, rank)
            _, received_count = self._count_messages(rank, StreamKind.RECV, stream, member)
            available_count += sent_count - received_count
            next_sends[member] = sent_count + 1
            process = self._attempt.processes.get(member)
            if process is None or can_communicate(process):
                able_ranks.add(member)
        if available_count >= stream.entered:
            return {}
        return {member: next_sends[member] for member in able_ranks or next_sends}

    def _count_messages(
        self, rank: int, kind: StreamKind, reference: CallStream, peer: int
    ) -> tuple[int, int]:
        """A rank's calls, and its completed ones, in its channels to or from ``peer`` with the group and
        tag of the reference.
        """
        call_count = completed_count = 0
        process = self._attempt.processes.get(rank)
        if process is not None:
            for stream in process.channels.get((kind, peer, reference.tag), ()):
                if stream.group.key == reference.group.key:
                    call_count += stream.entered
                    completed_count += stream.completed or 0
        return call_count, completed_count

    def find_uncounted_ranks(self, rank: int, stream: CallStream) -> Collection[int]:
        """The ranks for which a call of ``rank`` may wait, where counts do not show whether it does
        because calls of theirs, or its own, are not completely recorded.
        """
        if stream.kind in (StreamKind.COLLECTIVE, StreamKind.SETUP):
            uncounted = self._find_uncounted_members(stream, get_new_group_ranks(stream))
            return [member for member in uncounted if member != rank]
        if stream.peer is None:
            return ()
        if not receives_from_any(stream):
            return (stream.peer,) if _is_channel_uncounted(self._attempt, stream) else ()
        senders = [member for member in stream.group.ranks if member != rank]
        if stream.loss is not None:
            return senders
        return [member for member in senders if self._may_miss_message(member, stream)]

    def _find_uncounted_members(
        self, stream: CallStream, concerned: ConcernedRanks
    ) -> Collection[int]:
        members = stream.group.ranks if concerned is None else concerned
        if stream.loss is not None:
            return members
        state = stream.group_state
        if state is None:
            return ()
        incomplete_ranks = self._attempt.incomplete_ranks
        if not (state.has_losses or state.outside or incomplete_ranks):
            return ()
        streams = state.all_members
        uncounted = []
        for member in members:
            if member in streams:
                is_uncounted = streams[member].loss is not None
            else:
                is_uncounted = member in incomplete_ranks
            if is_uncounted:
                uncounted.append(member)
        return uncounted

    def _may_miss_message(self, sender: int, receiving: CallStream) -> bool:
        """Whether sends of a rank to this receiver, or receives from it, may not be recorded."""
        if sender in self._attempt.incomplete_ranks:
            return True
        process = self._attempt.processes.get(sender)
        if process is None:
            return False
        for other in process.streams.values():
            is_lossy = other.loss is not None and other.peer is not None
            if is_lossy and other.group.key == receiving.group.key:
                return True
        return False

    def _find_awaited_members(
        self, stream: CallStream, concerned: ConcernedRanks, certain: bool
    ) -> AwaitedCalls:
        entered, state = stream.entered, stream.group_state
        streams = state.all_members if state is not None else {}
        members = stream.group.ranks if concerned is None else concerned
        behind = {}
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
            unrecorded = behind.keys() - streams.keys()
            if unrecorded and state is not None and has_completed_calls(state):
                # Members without a stream took part in earlier calls, which are not recorded.
                unknown = {*unknown, *unrecorded}
            # The members in the lowest call, and the ones whose position is unknown.
            known_seqs = [seq for member, seq in behind.items() if member not in unknown]
            lowest = min(known_seqs, default=0)
            behind = {m: seq for m, seq in behind.items() if seq == lowest or m in unknown}
        # Members that have entered the call but will never complete it.
        awaited = {}
        for member in _intersect_ranks(members, self._find_unable(state)):
            if member in streams and streams[member].is_pending:
                awaited[member] = entered
        if not behind:
            awaited.update(dict.fromkeys(_intersect_ranks(members, self._silent_ranks), entered))
        awaited.update(behind)
        return awaited

    def _find_unable(self, state: GroupState | None) -> set[int]:
        """`unable_to_finish`, and the members of a foreign group in other attempts that have exited."""
        if state is None or not state.outside:
            return self.unable_to_finish
        unable = set(self.unable_to_finish)
        for rank in state.outside:
            process = self._attempt.foreign_groups.find_outside(rank)
            if process is not None and not process.is_alive:
                unable.add(rank)
        return unable


def _intersect_ranks(members: Iterable[int], few: Collection[int]) -> Iterable[int]:
    return [member for member in members if member in few] if few else ()


def _is_channel_uncounted(attempt: Attempt, stream: CallStream) -> bool:
    """Whether a channel's ends cannot be compared, since calls of one are not all recorded."""
    if stream.loss is not None:
        return True
    if stream.other_end is None:
        return stream.peer in attempt.incomplete_ranks
    return stream.other_end.loss is not None


class QueuedCalls:
    """The calls that devices cannot come to at one moment, because they are queued behind a message
    without its other end; as far as the counts and times of calls show it.

    Where a call only queues work for the device, as on NCCL, hosts continue after a send or a receive that
    the peer has not met. A device executes its calls in the order in which its host made them, so those
    after the message are held up as well: collectives that all hosts have made, and messages whose other
    end is queued. The parts of a batch have one time, and so no order among themselves. Where the
    completion of calls is reported, as on gloo, none of this applies. Nor does it to a message that the
    user's code started by ``isend`` or ``irecv``: until something waits for it, calls on other
    communicators may overtake it.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        # The key has the identity of the group's state, and the number of a collective.
        self._held_members: dict[tuple[int, int], AwaitedCalls] = {}

    def find_held_ranks(self, rank: int, stream: CallStream) -> AwaitedCalls:
        """The other ranks that have made the newest call of ``stream`` and whose devices cannot come
        to it, each with its sequence number. Ranks in the same collective share one mapping.
        """
        if stream.completed is not None or not stream.entered or not self._held_since:
            return {}
        if self._held_since.get(rank, inf) < stream.entered_at:
            return {}  # the rank's own device does not come to this call: it waits in an earlier one
        if stream.kind is not StreamKind.COLLECTIVE:
            return self._select_held(rank, stream)
        key = (id(stream.group_state), stream.entered)
        held = self._held_members.get(key)
        if held is None:
            held = self._held_members[key] = self._select_held(rank, stream)
        return held

    @cached_property
    def _held_since(self) -> dict[int, float]:
        """When a rank's host made the first call that its device cannot come to or complete, by rank: calls
        behind a message without its other end, and those that are held up by these.
        """
        held_since = self._find_unmet_messages() if self._attempt.message_groups else {}
        searched_collectives: set[tuple[int, int]] = set()
        to_search = list(held_since)
        for rank in to_search:  # grows in the loop
            for stream in self._attempt.processes[rank].streams.values():
                is_queued = stream.entered > 0 and stream.completed is None
                if not is_queued or stream.entered_at <= held_since[rank]:
                    continue
                if stream.kind is StreamKind.COLLECTIVE:
                    collective = (id(stream.group_state), stream.entered)
                    if collective in searched_collectives:
                        continue
                    searched_collectives.add(collective)
                for partner, other in self._list_partners(rank, stream):
                    if other.entered_at < held_since.get(partner, inf):
                        held_since[partner] = other.entered_at
                        to_search.append(partner)
        return held_since

    def _select_held(self, rank: int, stream: CallStream) -> AwaitedCalls:
        held = {}
        for partner, other in self._list_partners(rank, stream):
            if self._held_since.get(partner, inf) < other.entered_at:
                held[partner] = stream.entered
        return held

    def _find_unmet_messages(self) -> dict[int, float]:
        """The time when a rank's host made the first message whose other end does not exist, by rank.
        Only the time of the newest message of a channel is known, which is behind any earlier one.
        """
        messages = []
        any_receivers = set()  # the ranks, with the identities of the groups
        for rank, process in self._attempt.processes.items():
            for stream in process.unfinished_streams:
                if stream.peer is None or stream.completed is not None:
                    continue
                if receives_from_any(stream):
                    any_receivers.add((rank, id(stream.group)))
                    continue
                newest = stream.calls.get(stream.entered)
                may_block = newest is not None and newest.blocking is not False
                if not may_block or _is_channel_uncounted(self._attempt, stream):
                    continue
                met_count = 0 if stream.other_end is None else stream.other_end.entered
                unmet_count = stream.entered - met_count
                if unmet_count > 0:
                    at = stream.entered_at
                    if unmet_count > 1:
                        at = nextafter(at, -inf)
                    receiver = stream.peer if stream.kind is StreamKind.SEND else rank
                    messages.append((rank, (receiver, id(stream.group)), at))
        unmet: dict[int, float] = {}
        for rank, receiver_in_group, at in messages:
            if receiver_in_group not in any_receivers:
                unmet[rank] = min(unmet.get(rank, inf), at)
        return unmet

    def _list_partners(self, rank: int, stream: CallStream) -> Iterator[tuple[int, CallStream]]:
        """The other ranks whose newest call is the same, with their streams."""
        if stream.loss is not None:
            return
        others = {}
        if stream.kind is StreamKind.COLLECTIVE and stream.group_state is not None:
            others = stream.group_state.members
        elif stream.peer is not None and stream.other_end is not None:
            others = {stream.peer: stream.other_end}
        for partner, other in others.items():
            is_same = other.entered == stream.entered and other.loss is None
            if is_same and other is not stream:
                yield partner, other
