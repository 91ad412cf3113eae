"""Builds the wait-for graph from counts of calls, and from what is known about each rank's threads.

Whom a call waits for is found by counts of calls, never by times. Stacks, and the use of the CPU, show
which of a rank's unfinished calls blocks it, if any does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import unpack_ranks
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.stacks.frames import waits_for_communication
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState
from hangwatch.tracking.process import IDLE_AFTER_S, Process

from .graph import (
    BlockedCall,
    WaitGraph,
    can_communicate,
    find_blocked_streams,
    find_silent_ranks,
    has_completed_calls,
    is_waiting_on_channel,
    list_old_unfinished,
)
from .progress import get_calling_thread_since, is_process_waiting

_RANKS_PREFIX = "ranks="  # the start of the detail of a call that creates a group


def build_wait_graph(
    attempt: Attempt, now: float, lost_after_s: float, sample_after_s: float
) -> WaitGraph:
    """The graph at time ``now``, of all waits that have lasted `MIN_WAIT_S` seconds. Ranks that use the
    CPU are sampled after ``sample_after_s``, or soon if a rank makes no further call.
    """
    graph = WaitGraph(silent_ranks=find_silent_ranks(attempt, now, lost_after_s))
    resolver = WaitResolver(attempt, now, graph.silent_ranks)
    builder = _GraphBuilder(
        attempt=attempt,
        graph=graph,
        resolver=resolver,
        queued_calls=QueuedCalls(attempt),
        before=now - MIN_WAIT_S,
        sample_after_s=MIN_WAIT_S if resolver.unable_to_call else sample_after_s,
        silent_groups=_find_groups_of(attempt, graph.silent_ranks),
    )
    excluded = resolver.unable_to_finish | graph.silent_ranks.keys()
    for rank, process in attempt.processes.items():
        reports = process.reports
        # The streams of such a process lag behind it.
        is_further = reports.last_progress_at > reports.last_seen_at
        if is_further or not process.open_calls.unfinished_streams:
            continue
        if rank in excluded or builder.add_plain_wait(rank, process):
            continue
        if not builder.is_ahead_of_device(rank, process):
            builder.add_rank(rank, process)
    for rank, stream, state in attempt.list_outside_waits():
        builder.add_outside_wait(rank, stream, state)
    builder.drop_unfounded_waits()
    builder.add_unrecorded_waits(excluded)
    builder.resolve_uncounted_waits()
    return graph


@dataclass(slots=True, kw_only=True)
class _GraphBuilder:
    attempt: Attempt
    graph: WaitGraph
    resolver: WaitResolver
    queued_calls: QueuedCalls
    before: float  # waits that began later are left out
    sample_after_s: float
    silent_groups: set[int]  # the identities of the states of groups with silent members

    def add_plain_wait(self, rank: int, process: Process) -> bool:
        """Adds the wait of a rank that is certainly blocked in one call, as nearly all of 100,000 ranks
        that wait are. False if that is not the case: `add_rank` adds any wait.
        """
        blocked_streams = process.open_calls.blocked_streams
        if len(blocked_streams) != 1 or process.samples:
            return False
        stream = blocked_streams[0]
        if not process.newest_call_at <= stream.entered_at <= self.before:
            return False
        return self._add_certain_wait(rank, stream)

    def _add_certain_wait(self, rank: int, stream: CallStream) -> bool:
        """Adds the wait of a rank that is blocked in the newest call of this stream alone. False if it
        waits for no rank.
        """
        awaited = self.resolver.find_awaited_ranks(rank, stream, True)
        if not awaited:
            return False
        any_suffices = receives_from_any(stream)
        blocked = BlockedCall(rank, stream, stream.entered_at, awaited, any_suffices)
        self.graph.blocked_calls[rank] = [blocked]
        return True

    def is_ahead_of_device(self, rank: int, process: Process) -> bool:
        """Whether a rank without a sample uses the CPU, and has made a call lately or none of its calls
        waits for another rank, as nearly all of 100,000 ranks on NCCL: it may wait for its device only.
        """
        reports = process.reports
        is_idle = reports.updated_at - process.activity.last_active_at >= IDLE_AFTER_S
        if is_idle or process.samples or process.open_calls.blocked_streams:
            return False
        if reports.last_seen_at - process.newest_call_at < self.sample_after_s:
            return all(s.completed is None for s in process.open_calls.unfinished_streams)
        for stream in process.open_calls.unfinished_streams:
            if stream.completed is not None or not self._has_arrived_with_others(stream):
                return False
        return not any(
            self.queued_calls.find_held_ranks(rank, stream)
            for stream in process.open_calls.unfinished_streams
        )

    def _has_arrived_with_others(self, stream: CallStream) -> bool:
        """Whether all members of a stream's group, or its peer, have entered its newest call and report."""
        if stream.peer is None:
            state = stream.group_state
            if state is None or id(state) in self.silent_groups:
                return False
            return not state.has_member_behind(stream)
        other = stream.other_end
        return (
            other is not None
            and stream.loss is None
            and other.loss is None
            and other.entered >= stream.entered
            and stream.peer not in self.graph.silent_ranks
        )

    def add_outside_wait(self, rank: int, stream: CallStream, state: GroupState) -> None:
        """Adds the wait of a process of another attempt in a call of a foreign group."""
        member = self.attempt.foreign_groups.find_outside(rank)
        if member is None or not state.members or rank in self.graph.blocked_calls:
            return
        process = member.process
        is_certain = any(s is stream for s in find_blocked_streams(process, self.before))
        if not is_certain:
            pending = list_old_unfinished(process, self.before)
            if all(s is not stream for s in pending) or not is_process_waiting(process):
                return
        own_group = next(iter(state.members.values())).group
        seen_here = replace(stream, group=own_group, group_state=state)
        awaited = self.resolver.find_awaited_ranks(rank, seen_here, is_certain)
        if awaited:
            self.graph.blocked_calls[rank] = [
                BlockedCall(rank, seen_here, stream.entered_at, awaited, False)
            ]

    def add_rank(self, rank: int, process: Process) -> None:
        """Adds the waits of one rank."""
        pending = self._find_certain_waits(rank, process)
        if len(pending) == 1 and self._add_certain_wait(rank, next(iter(pending))):
            return
        is_certain, advanced_at = bool(pending), 0.0
        if not is_certain:
            # Some call may be unfinished, and no call was made for a while: a rank that makes
            # further calls does not wait.
            pending = list_old_unfinished(process, self.before)
            if not pending:
                return
            advanced_at = process.last_advanced_at
            if advanced_at > self.before:
                return
        blocked_calls, uncounted, stuck = self._find_waits(
            process, pending, is_certain, advanced_at
        )
        is_held_up = False
        if not blocked_calls and not uncounted and not stuck and not is_certain:
            blocked_calls = self._find_held_calls(rank, pending, advanced_at)
            is_held_up = bool(blocked_calls)
        is_waiting_somewhere = blocked_calls or uncounted or stuck
        if not is_waiting_somewhere and all(s.peer is None for s in pending):
            return
        if not is_certain:
            is_waiting = is_process_waiting(process)
            if is_waiting is False:
                self._record_unsampled(process, blocked_calls)
                return
            if is_waiting is None:
                self.graph.uncertain_ranks.add(rank)
        if is_held_up:
            self.graph.held_up_ranks.add(rank)
        if blocked_calls:
            self.graph.blocked_calls[rank] = blocked_calls
        elif uncounted:
            self.graph.uncounted_waits[rank] = uncounted
        elif stuck:
            self.graph.stuck_streams[rank] = max(stuck, key=lambda s: s.entered_at)
        else:
            self._add_released(rank, pending)

    def _record_unsampled(self, process: Process, blocked_calls: Collection[BlockedCall]) -> None:
        """Records that a stack is needed to see whether the rank waits for its device."""
        if process.samples and get_calling_thread_since(process, process.last_advanced_at):
            return
        calls = [call for call in blocked_calls if call.stream.completed is None]
        if not calls:
            return
        self.graph.unsampled_ranks[process.rank] = min([call.began_at for call in calls])
        if any(rank in call.awaited for call in calls for rank in self.resolver.unable_to_call):
            self.graph.unable_waiters.add(process.rank)

    def _find_certain_waits(self, rank: int, process: Process) -> Collection[CallStream]:
        """The calls in which the whole process is blocked. If there are none, adds the calls that
        block only one of its threads.
        """
        blocked = find_blocked_streams(process, self.before)
        if not blocked:
            self._add_thread_waits(rank, process)
        return blocked

    def _add_thread_waits(self, rank: int, process: Process) -> None:
        """Adds the collectives that block one thread while another one made the newest call. A thread
        that only receives messages may be blocked for any time in a healthy job.
        """
        for stream in process.open_calls.blocked_streams:
            if stream.peer is not None or stream.entered_at > self.before:
                continue
            if stream.entered_at >= process.newest_call_at:
                continue
            awaited = self.resolver.find_awaited_ranks(rank, stream, True)
            if awaited:
                blocked = BlockedCall(rank, stream, stream.entered_at, awaited, False)
                self.graph.thread_waits.setdefault(rank, []).append(blocked)

    def _find_waits(
        self,
        process: Process,
        pending: Collection[CallStream],
        is_certain: bool,
        advanced_at: float,
    ) -> tuple[list[BlockedCall], list[BlockedCall], list[CallStream]]:
        """The pending calls that some rank has not entered, those of which counts do not show it, and
        those that all have entered and that do not complete.
        """
        rank = process.rank
        blocked_calls: list[BlockedCall] = []
        uncounted_calls: list[BlockedCall] = []
        stuck: list[CallStream] = []
        for stream in pending:
            awaited = self.resolver.find_awaited_ranks(rank, stream, is_certain)
            began_at = stream.entered_at if is_certain else max(stream.entered_at, advanced_at)
            if awaited:
                blocked_calls.append(
                    BlockedCall(rank, stream, began_at, awaited, receives_from_any(stream))
                )
            elif uncounted := self.resolver.find_uncounted_ranks(rank, stream):
                may_await = dict.fromkeys(uncounted, stream.entered)
                uncounted_calls.append(
                    BlockedCall(rank, stream, began_at, may_await, receives_from_any(stream))
                )
            elif stream.completed is not None and (
                stream.peer is None or is_waiting_on_channel(process, stream)
            ):
                stuck.append(stream)
        return blocked_calls, uncounted_calls, stuck

    def _find_held_calls(
        self, rank: int, streams: Collection[CallStream], advanced_at: float
    ) -> list[BlockedCall]:
        """The calls to which other ranks' devices cannot come, although their hosts made them; the
        newest first, since a host that waits for its device waits for all of them.
        """
        blocked_calls: list[BlockedCall] = []
        for stream in sorted(streams, key=lambda stream: -stream.entered_at):
            held_ranks = self.queued_calls.find_held_ranks(rank, stream)
            if held_ranks:
                began_at = max(stream.entered_at, advanced_at)
                blocked_calls.append(BlockedCall(rank, stream, began_at, held_ranks, False))
        return blocked_calls

    def _add_released(self, rank: int, pending: Collection[CallStream]) -> None:
        self.graph.released_ranks.add(rank)
        if any(may_be_released(self.attempt, rank, stream) for stream in pending):
            self.graph.newly_released_ranks.add(rank)

    def drop_unfounded_waits(self) -> None:
        """Drops the waits for devices that are held up while their hosts wait for no rank: these
        hosts may be about to make the call that frees them.
        """
        graph = self.graph
        unfounded = graph.held_up_ranks
        while unfounded:
            unfounded = {rank for rank in graph.held_up_ranks if not self._is_founded(rank)}
            graph.held_up_ranks -= unfounded
            for rank in unfounded:
                del graph.blocked_calls[rank]
                process = self.attempt.processes[rank]
                pending = list_old_unfinished(process, self.before)
                if any(stream.peer is not None for stream in pending):
                    self._add_released(rank, pending)
                else:
                    graph.uncertain_ranks.discard(rank)

    def add_unrecorded_waits(self, excluded: Collection[int]) -> None:
        """Adds the ranks whose stacks show that they wait for communication, although all their recorded
        calls are complete: not all of their calls are recorded.
        """
        ranks = self.attempt.incomplete_ranks - self.graph.get_waiting_ranks()
        for rank in ranks.difference(excluded):
            process = self.attempt.processes[rank]
            since = process.idle_since
            if since <= self.before:
                thread = get_calling_thread_since(process, since)
                if waits_for_communication(thread):
                    self.graph.unrecorded_waits[rank] = since

    def resolve_uncounted_waits(self) -> None:
        """Finds by stacks whom a call waits for where counts do not show it: the ranks that are in code
        of their own, if all others for which it may wait are seen to wait.
        """
        graph = self.graph
        waiting = graph.get_waiting_ranks()
        resolved: dict[int, list[BlockedCall]] = {}
        for rank, calls in graph.uncounted_waits.items():
            found = [call for call in map(partial(self._resolve_wait, waiting), calls) if call]
            if found:
                resolved[rank] = found
        for rank, found in resolved.items():
            del graph.uncounted_waits[rank]
            graph.blocked_calls[rank] = found

    def _resolve_wait(self, waiting: Collection[int], blocked: BlockedCall) -> BlockedCall | None:
        absent: dict[int, int] = {}
        for rank, seq in blocked.awaited.items():
            if rank in waiting:
                continue
            process = self.attempt.processes.get(rank)
            if process is None:
                return None
            since = max(blocked.began_at, process.last_advanced_at)
            thread = get_calling_thread_since(process, since)
            is_waiting = waits_for_communication(thread)
            if is_waiting is None:
                return None
            if not is_waiting:
                absent[rank] = seq
        return replace(blocked, awaited=absent) if absent else None

    def _is_founded(self, rank: int) -> bool:
        """Whether all ranks that some call waits for wait themselves."""
        waiting = self.graph.blocked_calls.keys()
        return any(waiting >= blocked.awaited.keys() for blocked in self.graph.blocked_calls[rank])


def _find_groups_of(attempt: Attempt, ranks: Collection[int]) -> set[int]:
    """The groups of these ranks, by the identities of their states."""
    processes = (attempt.processes.get(rank) for rank in ranks)
    return {
        id(stream.group_state)
        for process in processes
        if process is not None
        for stream in process.streams.values()
    }


def is_not_initialized(process: Process | None) -> bool:
    """Whether the rank has not reached init_process_group, or not again since it destroyed its
    groups.
    """
    if process is None:
        return True
    has_no_groups = (
        process.lifecycle <= Lifecycle.STARTING or process.lifecycle is Lifecycle.DESTROYED
    )
    return process.is_alive and has_no_groups


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
        self._last_members: dict[int, tuple[int, Mapping[int, int]]] = {}
        # The key has the group, the members concerned if not all are, the call, whether the wait is
        # certain, and whether the stream is counted. The state identifies the group, since the group's
        # own key is as long as its list of members.
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
            return (stream.peer,) if _is_channel_uncounted(self._attempt, stream) else ()
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
            if other is None:
                is_uncounted = member in self._attempt.incomplete_ranks
            else:
                is_uncounted = other.loss is not None
            if is_uncounted:
                uncounted.append(member)
        return uncounted

    def _may_miss_message(self, sender: int, receiving: CallStream) -> bool:
        """Whether sends of a rank to this receiver, or receives from it, may not be recorded."""
        if sender in self._attempt.incomplete_ranks:
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
                # Members without a stream took part in earlier calls, and are not recorded.
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
    """Whether the stream receives from any source."""
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


def _is_channel_uncounted(attempt: Attempt, stream: CallStream) -> bool:
    """Whether the two ends of a channel cannot be compared by counts, because calls of one of them are
    not completely recorded.
    """
    if stream.loss is not None:
        return True
    if stream.other_end is None:
        return stream.peer in attempt.incomplete_ranks
    return stream.other_end.loss is not None


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
    received_count = 0  # the completed receives that name their source
    for member in stream.group.ranks:
        if member == rank:
            continue
        sends = _find_channels(attempt, member, StreamKind.SEND, stream, rank)
        receives = _find_channels(attempt, rank, StreamKind.RECV, stream, member)
        sent_counts[member] = sum(sending.entered for sending in sends)
        received_count += sum(receiving.completed or 0 for receiving in receives)
    if sum(sent_counts.values()) - received_count >= stream.entered:
        return {}
    processes = attempt.processes
    able = {m for m in sent_counts if m not in processes or can_communicate(processes[m])}
    return {member: sent_counts[member] + 1 for member in able or sent_counts}


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


class QueuedCalls:
    """The calls that devices cannot come to at one moment, because they are queued behind a message
    without its other end; as far as the counts and times of calls show it.

    Where a call only queues work for the device, as on NCCL, hosts continue after a send or a receive that
    the peer has not met. A device executes its calls in the order in which its host made them, so those
    after the message are held up as well: collectives that all hosts have made, and messages whose other
    end is queued. Where the completion of calls is reported, as on gloo, none of this applies. Nor does
    it to a message that the user's code started by ``isend`` or ``irecv``: until something waits for it,
    calls on other communicators may overtake it.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        # When a rank's host made the first call that its device cannot come to or complete, by rank.
        self._held_since: dict[int, float] | None = None
        self._held_members: dict[tuple[int, int], Mapping[int, int]] = {}

    def find_held_ranks(self, rank: int, stream: CallStream) -> Mapping[int, int]:
        """The other ranks that have made the newest call of ``stream`` and whose devices cannot come
        to it, each with its sequence number. Ranks in the same collective share one mapping.
        """
        held_since = self._held_since
        if held_since is None:
            has_messages = bool(self._attempt.message_groups)
            unmet = self._find_unmet_messages() if has_messages else {}
            held_since = self._held_since = self._propagate(unmet)
        if stream.completed is not None or not stream.entered or not held_since:
            return {}
        if held_since.get(rank, inf) < stream.entered_at:
            return {}  # the rank's own device does not come to this call: it waits in an earlier one
        if stream.kind is not StreamKind.COLLECTIVE:
            return self._select_held(rank, stream, held_since)
        key = (id(stream.group_state), stream.entered)
        held = self._held_members.get(key)
        if held is None:
            held = self._held_members[key] = self._select_held(rank, stream, held_since)
        return held

    def _select_held(
        self, rank: int, stream: CallStream, held_since: Mapping[int, float]
    ) -> dict[int, int]:
        return {
            partner: stream.entered
            for partner, other in self._list_partners(rank, stream)
            if held_since.get(partner, inf) < other.entered_at
        }

    def _find_unmet_messages(self) -> dict[int, float]:
        """The time when a rank's host made the first message whose other end does not exist, by rank.
        Only the time of the newest message of a channel is known.
        """
        messages: list[tuple[int, int, CallStream]] = []  # each with its rank and its receiver
        any_receivers: set[tuple[int, int]] = set()
        for rank, process in self._attempt.processes.items():
            for stream in process.open_calls.unfinished_streams:
                if stream.peer is None or stream.completed is not None:
                    continue
                if receives_from_any(stream):
                    any_receivers.add((rank, id(stream.group)))
                    continue
                if _is_channel_uncounted(self._attempt, stream):
                    continue
                met_count = 0 if stream.other_end is None else stream.other_end.entered
                if met_count < stream.entered:
                    receiver = stream.peer if stream.kind is StreamKind.SEND else rank
                    messages.append((rank, receiver, stream))
        unmet: dict[int, float] = {}
        for rank, receiver, stream in messages:
            newest = stream.calls.get(stream.entered)
            if (receiver, id(stream.group)) in any_receivers or newest is None:
                continue
            if newest.blocking is not False:
                unmet[rank] = min(unmet.get(rank, inf), stream.entered_at)
        return unmet

    def _propagate(self, held_since: dict[int, float]) -> dict[int, float]:
        """Adds the calls that are held up by those of other ranks, until there are no more."""
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

    def _list_partners(self, rank: int, stream: CallStream) -> Iterator[tuple[int, CallStream]]:
        """The other ranks whose newest call is the same, with their streams."""
        if stream.kind is StreamKind.COLLECTIVE:
            state = stream.group_state
            for member, other in state.members.items() if state is not None else ():
                is_same = other.entered == stream.entered and other.loss is None
                if other is not stream and is_same and stream.loss is None:
                    yield member, other
            return
        other_end = stream.other_end
        if (
            stream.peer is not None
            and other_end is not None
            and not _is_channel_uncounted(self._attempt, stream)
            and other_end.entered == stream.entered
        ):
            yield stream.peer, other_end
