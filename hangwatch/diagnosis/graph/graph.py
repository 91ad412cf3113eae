"""The wait-for graph of a job at one moment: which rank waits for which ranks, in its first unfinished
calls. A host, each of its threads and its device may wait for others.

The ends of its chains are causes, a cycle is a deadlock (see `hangwatch.diagnosis.rules.deadlock`),
and all other ranks are victims. The last known state of silent ranks, whose node agents do not
report, is old; what other ranks report may show that they are alive. Stacks, and the use of the CPU,
show which of a rank's unfinished calls blocks it, if any does.

Prior art: T. Hilbrich et al., "MPI runtime error detection with MUST" (2012), on wait-for graphs for
MPI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from hangwatch.model.calls import ANY_SOURCE, StreamKind
from hangwatch.model.limits import MIN_WAIT_S, READING_DELAY_S, Limits
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Wait
from hangwatch.stacks.frames import waits_for_communication, waits_for_work
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState, StreamsByRank
from hangwatch.tracking.process import IDLE_AFTER_S, Process, is_of_world

from .devices import DeviceGraph, build_device_graph
from .edges import BlockedCall, QueuedCalls, WaiterIndex, WaitResolver, group_by_awaited
from .progress import find_blocked_streams, get_calling_thread_since, is_process_waiting

_FREED_AT_A_TIME = 1000

WaitsByRank = dict[int, list[BlockedCall]]


@dataclass
class WaitGraph:
    """The waits of an attempt at one moment.

    Ranks that wait for the same ranks form one waiter group, so the graph grows linearly with the
    number of ranks. The state of silent ranks is unknown, so that here they wait for no rank.
    """

    attempt: Attempt
    limits: Limits
    resolver: WaitResolver
    silent_ranks: Mapping[int, Silence]
    # The calls that block a rank, by rank.
    blocked_calls: WaitsByRank = field(default_factory=dict)
    # The calls that block one thread of a rank while another thread makes calls, by rank.
    thread_waits: WaitsByRank = field(default_factory=dict)
    # The calls that do not complete although every rank that they need has entered them, by rank.
    stuck_streams: StreamsByRank = field(default_factory=dict)
    # The blocking calls whose awaited ranks counts do not show, because calls are not completely
    # recorded, by rank. ``awaited`` are the ranks for which they may wait.
    uncounted_waits: WaitsByRank = field(default_factory=dict)
    # The ranks whose stack shows that they wait in a call that is not recorded, and since when.
    unrecorded_waits: dict[int, float] = field(default_factory=dict)
    # Ranks that may or may not wait.
    uncertain_ranks: set[int] = field(default_factory=set)
    # Ranks that only wait for devices which cannot come to a call that their hosts have made.
    held_up_ranks: set[int] = field(default_factory=set)
    # The calls in which ranks that use the CPU may wait, by rank: others are behind, and whether they are
    # complete is unknown. A host may spin while it waits for its device, so only a stack shows it.
    unsampled_waits: WaitsByRank = field(default_factory=dict)
    # Ranks last seen in a send or a receive whose other end has arrived: they may continue any
    # moment. The newly released have not reported since.
    released_ranks: set[int] = field(default_factory=set)
    newly_released_ranks: set[int] = field(default_factory=set)

    @cached_property
    def devices(self) -> DeviceGraph:
        """How far the devices are; empty where no backend reports it."""
        return build_device_graph(self.attempt)

    @cached_property
    def still_devices(self) -> DeviceGraph:
        """The graph of the devices, empty while each one is known to have made progress lately: then
        none can be the subject of a verdict. To find that out takes a tenth of the time.
        """
        processes = self.attempt.processes
        limit_s = self.limits.suspicion_delay_s - 2 * READING_DELAY_S
        if self.attempt.device_groups:
            stills_s = [process.device_still_s for process in processes.values()]
            if max(stills_s, default=0.0) >= limit_s:
                return self.devices
        return DeviceGraph((), {}, processes)

    @cached_property
    def waiter_groups(self) -> list[list[BlockedCall]]:
        """All blocked calls, in groups that wait for the same ranks."""
        return group_by_awaited(self.blocked_calls.values())

    @cached_property
    def index(self) -> WaiterIndex:
        """The ranks of each waiter group, and the waiter groups that wait for a rank."""
        return WaiterIndex(
            ({blocked.rank for blocked in group}, group[0].awaited) for group in self.waiter_groups
        )

    def free_waits(self) -> None:
        """Ends the use of the graph. The waits of 100,000 ranks are freed in parts: all in one go would block the
        other threads for a tenth of a second.
        """
        by_awaited = self.index.groups_by_awaited
        by_rank: list[Any] = []
        for waits_by_rank in (self.blocked_calls, self.unsampled_waits, by_awaited):
            by_rank += waits_by_rank.values()
            waits_by_rank.clear()
        lists: list[list[Any]] = [*self.waiter_groups, by_rank]
        for waits in lists:
            while waits:
                del waits[-_FREED_AT_A_TIME:]

    def get_waiting_ranks(self) -> set[int]:
        return {
            *self.blocked_calls,
            *self.stuck_streams,
            *self.uncounted_waits,
            *self.unrecorded_waits,
        }

    def iter_waits(self, rank: int) -> Iterator[Wait]:
        for blocked in self.blocked_calls.get(rank, ()):
            yield from map(blocked.make_wait, blocked.awaited)

    def find_chain_ends(self) -> set[int]:
        """Ranks that others wait for and that wait for no rank."""
        # A difference of the keys would search for each waiting rank.
        return {rank for rank in self.index.groups_by_awaited if rank not in self.blocked_calls}

    def iter_waits_for(self, rank: int) -> Iterator[BlockedCall]:
        """The waits for a rank, one of each waiter group: all of a group are in the same call."""
        indices = self.index.groups_by_awaited.get(rank, ())
        return (self.waiter_groups[index][0] for index in indices)

    def find_waiters_of(self, targets: Iterable[int], within: Set[int] | None = None) -> set[int]:
        """The ranks from which a chain of waits leads to any of ``targets``, without the targets.
        The chains only include ranks of ``within``, if that is given.
        """
        return self.index.find_waiters_of(targets, within)

    def group_chain_ends(self, chain_ends: Iterable[int]) -> list[set[int]]:
        """The ``chain_ends`` in sets that delay some rank in common."""
        sets_by_end = {end: {end} for end in sorted(chain_ends)}
        if len(sets_by_end) < 2:
            return list(sets_by_end.values())
        groups_by_awaited = self.index.groups_by_awaited
        # Chains of waits may meet at ranks that others wait for, or that are in several groups.
        meeting_ranks = {rank for rank, calls in self.blocked_calls.items() if len(calls) > 1}
        meeting_ranks.update(groups_by_awaited)
        # The end from which the search first reached a rank, or a waiter group.
        end_by_rank = {end: end for end in sets_by_end}
        end_by_group: dict[int, int] = {}
        for end in list(sets_by_end):
            to_search = [end]
            while to_search:
                for index in groups_by_awaited.get(to_search.pop(), ()):
                    if index in end_by_group:
                        _merge_sets(sets_by_end, end, end_by_group[index])
                        continue
                    end_by_group[index] = end
                    for rank in self.index.ranks_by_group[index] & meeting_ranks:
                        if rank in end_by_rank:
                            _merge_sets(sets_by_end, end, end_by_rank[rank])
                        else:
                            end_by_rank[rank] = end
                            to_search.append(rank)
        return list({id(ends): ends for ends in sets_by_end.values()}.values())


def _merge_sets(sets: dict[int, set[int]], one: int, other: int) -> None:
    """Joins the sets of two members; every member of a set refers to the same object."""
    small, large = sorted((sets[one], sets[other]), key=len)
    if small is not large:
        large |= small
        sets.update(dict.fromkeys(small, large))


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A time without reports since ``began_at``; ``last_alive_at`` is the last sign, also from other
    ranks, that the ranks of the node run.
    """

    began_at: float
    last_alive_at: float
    # The last sign is from well within the silence: only the connection to the server is broken.
    is_proven_alive: bool


def build_wait_graph(attempt: Attempt, now: float, limits: Limits) -> WaitGraph:
    """The graph at time ``now``, of all waits that have lasted `MIN_WAIT_S` seconds. Ranks that use the
    CPU are sampled after ``limits.suspicion_delay_s``, or soon if a rank makes no further call.
    """
    silent_ranks = find_silent_ranks(attempt, now, limits.lost_after_s)
    resolver = WaitResolver(attempt, now, silent_ranks)
    graph = WaitGraph(attempt, limits, resolver, silent_ranks)
    builder = _GraphBuilder(graph, now)
    excluded = resolver.unable_to_finish | silent_ranks.keys()
    for rank, process in attempt.processes.items():
        reports = process.reports
        # The streams of such a process lag behind it.
        is_further = reports.last_progress_at > reports.last_seen_at
        if process.unfinished_streams and not is_further and rank not in excluded:
            builder.add_rank(rank, process)
    for rank, stream, state in attempt.list_outside_waits():
        builder.add_outside_wait(rank, stream, state)
    builder.drop_unfounded_waits()
    builder.add_waits_seen_in_stacks(excluded)
    return graph


class _GraphBuilder:
    def __init__(self, graph: WaitGraph, now: float) -> None:
        self._graph = graph
        self._attempt = attempt = graph.attempt
        self._resolver = graph.resolver
        self._queued_calls = QueuedCalls(attempt)
        self._before = now - MIN_WAIT_S  # waits that began later are left out
        self._sample_after_s = graph.limits.suspicion_delay_s
        if self._resolver.unable_to_call:
            self._sample_after_s = MIN_WAIT_S
        # The groups with silent members, by the identities of their states.
        self._silent_groups = {
            id(stream.group_state)
            for rank in graph.silent_ranks
            for stream in attempt.processes[rank].streams.values()
        }

    def _is_ahead_of_device(self, rank: int, process: Process) -> bool:
        """Whether a rank without a sample uses the CPU, and has made a call lately or none of its calls
        waits for another rank, as nearly all of 100,000 ranks on NCCL: it may wait for its device only.
        """
        if process.samples or process.blocked_streams or process.inactive_s >= IDLE_AFTER_S:
            return False
        streams = process.unfinished_streams
        if any(stream.completed is not None for stream in streams):
            return False
        if process.reports.last_seen_at - process.newest_call_at < self._sample_after_s:
            return True
        if not all(map(self._has_arrived_with_others, streams)):
            return False
        return not any(self._queued_calls.find_held_ranks(rank, stream) for stream in streams)

    def _has_arrived_with_others(self, stream: CallStream) -> bool:
        """Whether all members of a stream's group, or its peer, have entered its newest call and report."""
        if stream.peer is None:
            state = stream.group_state
            if state is None or id(state) in self._silent_groups:
                return False
            return not state.has_member_behind(stream)
        other = stream.other_end
        if other is None or stream.loss is not None or other.loss is not None:
            return False
        return other.entered >= stream.entered and stream.peer not in self._graph.silent_ranks

    def add_outside_wait(self, rank: int, stream: CallStream, state: GroupState) -> None:
        """Adds the wait of a process of another attempt in a call of a foreign group."""
        process = self._attempt.foreign_groups.find_outside(rank)
        if process is None or not state.members or rank in self._graph.blocked_calls:
            return
        is_certain = stream in find_blocked_streams(process, self._before)
        if not is_certain:
            is_pending = stream in list_old_unfinished(process, self._before)
            if not is_pending or not is_process_waiting(process):
                return
        own_group = next(iter(state.members.values())).group
        seen_here = replace(stream, group=own_group, group_state=state)
        awaited = self._resolver.find_awaited_ranks(rank, seen_here, is_certain)
        if awaited:
            blocked = BlockedCall(rank, seen_here, stream.entered_at, awaited)
            self._graph.blocked_calls[rank] = [blocked]

    def add_rank(self, rank: int, process: Process) -> None:
        """Adds the waits of one rank."""
        blocked_streams = find_blocked_streams(process, self._before)
        if len(blocked_streams) == 1:  # as in nearly all of 100,000 ranks that wait
            stream = blocked_streams[0]
            awaited = self._resolver.find_awaited_ranks(rank, stream, True)
            if awaited:
                blocked = BlockedCall(rank, stream, stream.entered_at, awaited)
                self._graph.blocked_calls[rank] = [blocked]
                return
        if blocked_streams:
            self._add_waits(process, blocked_streams, -inf)
            return
        if self._is_ahead_of_device(rank, process):
            return
        # A collective may block one thread while another one made the newest call. A thread that only
        # receives messages may be blocked for any time in a healthy job.
        for stream in process.blocked_streams:
            is_old = stream.entered_at <= self._before
            if stream.peer is None and is_old and stream.entered_at < process.newest_call_at:
                awaited = self._resolver.find_awaited_ranks(rank, stream, True)
                if awaited:
                    blocked = BlockedCall(rank, stream, stream.entered_at, awaited)
                    self._graph.thread_waits.setdefault(rank, []).append(blocked)
        # Some call may be unfinished, and no call was made for a while: a rank that makes further calls
        # does not wait.
        pending = list_old_unfinished(process, self._before)
        advanced_at = process.last_advanced_at if pending else inf
        if advanced_at <= self._before:
            self._add_waits(process, pending, advanced_at)

    def _add_waits(self, process: Process, pending: list[CallStream], advanced_at: float) -> None:
        """Adds the waits of a rank in some of the pending calls. It last made progress at ``advanced_at``; if
        that is ``-inf``, it is certainly blocked in these calls.
        """
        rank, graph = process.rank, self._graph
        is_certain = advanced_at == -inf
        blocked_calls, uncounted, stuck = self._find_waits(process, pending, advanced_at)
        is_held_up = False
        if not (is_certain or blocked_calls or uncounted or stuck):
            # Other ranks' devices may not come to a call, although their hosts made it. The newest is the
            # first, since a host that waits for its device waits for all of them.
            for stream in sorted(pending, key=lambda stream: -stream.entered_at):
                held_ranks = self._queued_calls.find_held_ranks(rank, stream)
                if held_ranks:
                    began_at = max(stream.entered_at, advanced_at)
                    blocked_calls.append(BlockedCall(rank, stream, began_at, held_ranks))
            is_held_up = bool(blocked_calls)
        if not (blocked_calls or uncounted or stuck or _has_messages(pending)):
            return
        if not is_certain:
            is_waiting = is_process_waiting(process)
            if is_waiting is False:
                # Only a stack since then shows whether the rank waits for its device.
                unsampled = [call for call in blocked_calls if call.stream.completed is None]
                if unsampled and get_calling_thread_since(process, advanced_at) is None:
                    graph.unsampled_waits[rank] = unsampled
                return
            if is_waiting is None:
                graph.uncertain_ranks.add(rank)
        if is_held_up:
            graph.held_up_ranks.add(rank)
        if blocked_calls:
            graph.blocked_calls[rank] = blocked_calls
        elif uncounted:
            graph.uncounted_waits[rank] = uncounted
        elif stuck:
            graph.stuck_streams[rank] = max(stuck, key=lambda s: s.entered_at)
        else:
            self._add_released(rank, pending)

    def _find_waits(
        self, process: Process, pending: list[CallStream], advanced_at: float
    ) -> tuple[list[BlockedCall], list[BlockedCall], list[CallStream]]:
        """The pending calls that some rank has not entered, those where counts do not show it, and
        those that all have entered and that do not complete.
        """
        rank, resolver = process.rank, self._resolver
        blocked_calls = []
        uncounted_calls = []
        stuck = []
        for stream in pending:
            awaited = resolver.find_awaited_ranks(rank, stream, advanced_at == -inf)
            began_at = max(stream.entered_at, advanced_at)
            if awaited:
                blocked_calls.append(BlockedCall(rank, stream, began_at, awaited))
            elif uncounted := resolver.find_uncounted_ranks(rank, stream):
                may_await = dict.fromkeys(uncounted, stream.entered)
                uncounted_calls.append(BlockedCall(rank, stream, began_at, may_await))
            elif stream.completed is not None and self._is_stuck(process, stream):
                stuck.append(stream)
        return blocked_calls, uncounted_calls, stuck

    def _is_stuck(self, process: Process, stream: CallStream) -> bool:
        """Whether a rank waits in a call that all have entered. The completion of many sends is never
        reported, so only a stack shows that a rank waits for a send that its peer received. A message received
        from any source may be the one that this call was to receive.
        """
        if stream.peer is None:
            return True
        if stream.peer not in self._attempt.processes:
            return False
        if any(other.peer == ANY_SOURCE for other in process.streams.values()):
            return False
        return waits_for_work(get_calling_thread_since(process, stream.entered_at))

    def _add_released(self, rank: int, pending: Collection[CallStream]) -> None:
        """Adds a rank whose peers have made their calls. If one of these was reported after the rank's own
        last report, it may have continued since.
        """
        graph = self._graph
        graph.released_ranks.add(rank)
        reported_at = self._attempt.processes[rank].reports.last_seen_at
        for stream in pending:
            if stream.other_end is not None:
                entered_before, entered_at = stream.other_end.last_growth
                if entered_before < stream.entered and entered_at > reported_at:
                    graph.newly_released_ranks.add(rank)

    def drop_unfounded_waits(self) -> None:
        """Drops the waits for devices that are held up while their hosts wait for no rank: these
        hosts may be about to make the call that frees them.
        """
        graph = self._graph
        waiting = graph.blocked_calls.keys()
        while True:
            # In each of its calls, the rank waits for some rank that does not wait.
            unfounded = set()
            for rank in graph.held_up_ranks:
                if not any(waiting >= call.awaited.keys() for call in graph.blocked_calls[rank]):
                    unfounded.add(rank)
            if not unfounded:
                return
            graph.held_up_ranks -= unfounded
            for rank in unfounded:
                del graph.blocked_calls[rank]
                pending = list_old_unfinished(self._attempt.processes[rank], self._before)
                if _has_messages(pending):
                    self._add_released(rank, pending)
                else:
                    graph.uncertain_ranks.discard(rank)

    def add_waits_seen_in_stacks(self, excluded: Collection[int]) -> None:
        """Adds what only stacks show, because not all calls are recorded."""
        graph = self._graph
        # Ranks that wait for communication, although all their recorded calls are complete.
        ranks = self._attempt.incomplete_ranks - graph.get_waiting_ranks()
        for rank in ranks.difference(excluded):
            process = self._attempt.processes[rank]
            since = process.idle_since
            if since <= self._before:
                thread = get_calling_thread_since(process, since)
                if waits_for_communication(thread):
                    graph.unrecorded_waits[rank] = since
        # A call whose awaited ranks counts do not show waits for those that are in code of their own, if
        # all others for which it may wait are seen to wait.
        waiting = graph.get_waiting_ranks()
        for rank, calls in list(graph.uncounted_waits.items()):
            resolved = []
            for blocked in calls:
                absent = {}
                are_all_seen = True
                for other, seq in blocked.awaited.items():
                    if other not in waiting:
                        is_waiting = self._is_seen_waiting(other, blocked)
                        are_all_seen &= is_waiting is not None
                        if is_waiting is False:
                            absent[other] = seq
                if absent and are_all_seen:
                    resolved.append(replace(blocked, awaited=absent))
            if resolved:
                del graph.uncounted_waits[rank]
                graph.blocked_calls[rank] = resolved

    def _is_seen_waiting(self, rank: int, blocked: BlockedCall) -> bool | None:
        """Whether a stack since a wait began shows that the rank waits as well; None without one."""
        process = self._attempt.processes.get(rank)
        if process is None:
            return None
        since = max(blocked.began_at, process.last_advanced_at)
        return waits_for_communication(get_calling_thread_since(process, since))


def list_old_unfinished(process: Process, before: float) -> list[CallStream]:
    """The streams whose newest call was entered ``before`` then and may be unfinished."""
    streams = [s for s in process.unfinished_streams if s.entered_at <= before and s.entered > 0]
    if process.lifecycle is not Lifecycle.DESTROYED:
        return streams
    # No call on a group that the process has destroyed blocks it any more.
    return [s for s in streams if not (is_of_world(s.group) and process.has_left(s.group))]


def _has_messages(streams: Iterable[CallStream]) -> bool:
    return any(stream.peer is not None for stream in streams)


def find_silent_ranks(attempt: Attempt, now: float, lost_after_s: float) -> dict[int, Silence]:
    """The ranks without a report for ``lost_after_s`` seconds in which they could have reported."""
    before = now - lost_after_s
    if attempt.resumed_at > before:
        return {}
    silent_ranks = attempt.list_unreported(before)
    if not silent_ranks:
        return {}
    processes = attempt.processes
    alive_at_by_agent: dict[str, float] = {}  # the ranks of a node agent share their node
    for rank, at in _find_signs_of_life(attempt, set(silent_ranks)):
        agent = processes[rank].agent
        alive_at_by_agent[agent] = max(at, alive_at_by_agent.get(agent, at))
    silences = {}
    for rank in silent_ranks:
        process = processes[rank]
        began_at = max(process.reports.agent_seen_at, attempt.resumed_at)
        last_alive_at = max(began_at, alive_at_by_agent.get(process.agent, began_at))
        silences[rank] = Silence(
            began_at=began_at,
            last_alive_at=last_alive_at,
            is_proven_alive=last_alive_at - began_at > lost_after_s,
        )
    return silences


def _find_signs_of_life(attempt: Attempt, silent: set[int]) -> Iterator[tuple[int, float]]:
    """The silent ranks that other ranks show to be alive, with the times: all members of a group are when
    others complete its calls, and a rank is when another one receives from it.
    """
    for members in attempt.streams_by_group.values():
        group_ranks = next(iter(members.values())).group.ranks
        silent_members = [rank for rank in group_ranks if rank in silent]
        if not silent_members:
            continue
        advanced_at = [
            stream.advanced_at
            for rank, stream in members.items()
            if rank not in silent and stream.kind is StreamKind.COLLECTIVE
        ]
        alive_at = max(advanced_at, default=-inf)
        for rank in silent_members:
            yield rank, alive_at
    for rank, process in attempt.processes.items():
        if rank in silent:
            continue
        for stream in process.streams.values():
            if stream.kind is StreamKind.RECV and stream.peer in silent:
                yield stream.peer, stream.advanced_at
