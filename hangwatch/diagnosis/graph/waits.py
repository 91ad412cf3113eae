"""Builds the wait-for graph from counts of calls, and from what is known about each rank's threads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.stacks.frames import waits_for_communication
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState
from hangwatch.tracking.process import IDLE_AFTER_S, Process

from .awaited import WaitResolver, may_be_released, receives_from_any
from .graph import BlockedCall, WaitGraph
from .queued_calls import QueuedCalls
from .silence import find_silent_ranks
from .thread_waits import (
    get_calling_thread_since,
    is_process_waiting,
)
from .unfinished import (
    find_blocked_streams,
    is_waiting_on_channel,
    list_old_unfinished,
)


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
        is_further = reports.last_progress_at > reports.last_seen_at  # than its streams show
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
    silent_groups: set[int]  # with silent members, by the identities of their states

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
        return not self.queued_calls.may_be_held(rank, process.open_calls.unfinished_streams)

    def _has_arrived_with_others(self, stream: CallStream) -> bool:
        """Whether all members of its group, or its peer, have entered its newest call and report."""
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
        """Records that a stack is needed to see whether it waits for its device."""
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
        """Where counts do not show whom a call waits for, stacks may: the ranks that are in code of
        their own, if all others for which it may wait are seen to wait.
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
