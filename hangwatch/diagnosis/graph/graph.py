"""The wait-for graph of a job: which rank waits for which ranks, in its first unfinished calls.

The ends of its chains are causes, a cycle is a deadlock (see `hangwatch.diagnosis.rules.deadlock`),
and all other ranks are victims. The last known state of silent ranks, whose node agents do not
report, is old; what other ranks report may show that they are alive.

Prior art: T. Hilbrich et al., "MPI runtime error detection with MUST" (2012), on wait-for graphs for
MPI.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Wait
from hangwatch.stacks.frames import waits_for_work
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState
from hangwatch.tracking.process import Process

from .progress import has_continuing_caller, is_wholly_blocked

_FREED_AT_A_TIME = 1000
_FULL_MESH_BACKEND = "gloo"  # a group exists only once all its members are connected


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
    """A rank waits in its newest call of ``stream`` for the ranks of ``awaited``, each with the
    number of the call that it has not entered. Ranks that wait for the same ranks share one mapping.
    """

    rank: int
    stream: CallStream
    began_at: float
    awaited: Mapping[int, int]
    any_suffices: bool  # any one of the awaited ranks can end the wait

    def make_edge(self, on_rank: int) -> WaitEdge:
        wait = Wait(
            rank=self.rank, on_rank=on_rank, group=self.stream.group.name, seq=self.awaited[on_rank]
        )
        return WaitEdge(wait=wait, stream=self.stream)


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
        seen, to_search = set(target_ranks), list(target_ranks)
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
    groups: defaultdict[int, list[BlockedCall]] = defaultdict(list)
    for blocked_calls in waits:
        for blocked in blocked_calls:
            groups[id(blocked.awaited)].append(blocked)
    return list(groups.values())


@dataclass(slots=True)
class WaitGraph:
    """The waits of an attempt at one moment.

    Ranks that wait for the same ranks form one waiter group, so the graph grows linearly with the
    number of ranks. The state of silent ranks is unknown, so that here they wait for no rank.
    """

    # The calls that block a rank, by rank.
    blocked_calls: dict[int, list[BlockedCall]] = field(default_factory=dict)
    # The calls that block one thread of a rank while another thread makes calls, by rank.
    thread_waits: dict[int, list[BlockedCall]] = field(default_factory=dict)
    # The calls that do not complete although every rank that they need has entered them, by rank.
    stuck_streams: dict[int, CallStream] = field(default_factory=dict)
    # The blocking calls whose awaited ranks counts do not show, because calls are not completely
    # recorded, by rank. ``awaited`` are the ranks for which they may wait.
    uncounted_waits: dict[int, list[BlockedCall]] = field(default_factory=dict)
    # The ranks whose stack shows that they wait in a call that is not recorded, and since when.
    unrecorded_waits: dict[int, float] = field(default_factory=dict)
    # Ranks that may or may not wait.
    uncertain_ranks: set[int] = field(default_factory=set)
    # Ranks that only wait for devices which cannot come to a call that their hosts have made.
    held_up_ranks: set[int] = field(default_factory=set)
    # Ranks that use the CPU while others are behind in a call whose completion is unknown, and since
    # when. A host may spin while it waits for its device, so only a stack shows whether it waits.
    unsampled_ranks: dict[int, float] = field(default_factory=dict)
    # The unsampled ranks that may wait for a rank that will make no call, or does not report.
    unable_waiters: set[int] = field(default_factory=set)
    silent_ranks: dict[int, Silence] = field(default_factory=dict)
    # Ranks last seen in a send or a receive whose other end has arrived: they may continue any
    # moment. The newly released have not reported since.
    released_ranks: set[int] = field(default_factory=set)
    newly_released_ranks: set[int] = field(default_factory=set)
    _waiter_groups: list[list[BlockedCall]] | None = None
    _index: WaiterIndex = field(default_factory=lambda: WaiterIndex(()))

    def iter_waiter_groups(self) -> list[list[BlockedCall]]:
        """All blocked calls, in groups that wait for the same ranks."""
        if self._waiter_groups is None:
            self._waiter_groups = group_by_awaited(self.blocked_calls.values())
            self._index = WaiterIndex(
                ({blocked.rank for blocked in group}, group[0].awaited)
                for group in self._waiter_groups
            )
        return self._waiter_groups

    @property
    def index(self) -> WaiterIndex:
        """The ranks of each waiter group, and the waiter groups that wait for a rank."""
        self.iter_waiter_groups()
        return self._index

    def free_waits(self) -> None:
        """Ends the use of the graph. The waits of 100,000 ranks are freed in parts: all in one go would block the
        other threads for a tenth of a second.
        """
        by_awaited = self._index.groups_by_awaited
        by_rank = [*self.blocked_calls.values(), *by_awaited.values()]
        self.blocked_calls.clear()
        by_awaited.clear()
        for waits in (*(self._waiter_groups or ()), by_rank):
            while waits:
                del waits[-_FREED_AT_A_TIME:]

    def get_waiting_ranks(self) -> set[int]:
        return {
            *self.blocked_calls,
            *self.stuck_streams,
            *self.uncounted_waits,
            *self.unrecorded_waits,
        }

    def iter_edges(self, rank: int) -> Iterator[WaitEdge]:
        for blocked in self.blocked_calls.get(rank, ()):
            for awaited_rank in blocked.awaited:
                yield blocked.make_edge(awaited_rank)

    def find_chain_ends(self) -> set[int]:
        """Ranks that others wait for and that wait for no rank."""
        # A difference of the keys would take a look-up for each waiting rank.
        return {rank for rank in self.index.groups_by_awaited if rank not in self.blocked_calls}

    def iter_waits_for(self, rank: int) -> Iterator[BlockedCall]:
        """The waits for a rank, one of each waiter group: all of a group are in the same call."""
        groups = self.iter_waiter_groups()
        return (groups[index][0] for index in self._index.groups_by_awaited.get(rank, ()))

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
        end_by_rank = dict(zip(sets_by_end, sets_by_end, strict=True))
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
                        other_end = end_by_rank.get(rank)
                        if other_end is None:
                            end_by_rank[rank] = end
                            to_search.append(rank)
                        else:
                            _merge_sets(sets_by_end, end, other_end)
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


def find_silent_ranks(attempt: Attempt, now: float, lost_after_s: float) -> dict[int, Silence]:
    """The ranks without a report for ``lost_after_s`` seconds in which they could have reported."""
    before, resumed_at = now - lost_after_s, attempt.resumed_at
    if resumed_at > before:
        return {}
    silent_since = {
        rank: max(attempt.processes[rank].reports.agent_seen_at, resumed_at)
        for rank in attempt.list_unreported(before)
    }
    if not silent_since:
        return {}
    alive_at_by_agent: dict[str, float] = {}  # the ranks of a node agent share their node
    signs = [
        *_find_collective_signs(attempt.streams_by_group, silent_since),
        *_find_receive_signs(attempt, silent_since),
    ]
    for rank, at in signs:
        agent = attempt.processes[rank].agent
        alive_at_by_agent[agent] = max(at, alive_at_by_agent.get(agent, at))
    silences: dict[int, Silence] = {}
    for rank, began_at in silent_since.items():
        alive_at = alive_at_by_agent.get(attempt.processes[rank].agent, began_at)
        last_alive_at = max(began_at, alive_at)
        silences[rank] = Silence(
            began_at=began_at,
            last_alive_at=last_alive_at,
            is_proven_alive=last_alive_at - began_at > lost_after_s,
        )
    return silences


def _find_collective_signs(
    streams_by_group: Mapping[GroupKey, Mapping[int, CallStream]], silent: Mapping[int, float]
) -> Iterator[tuple[int, float]]:
    """All members of a group are alive at the time when other members complete its calls."""
    for members in streams_by_group.values():
        group_ranks = next(iter(members.values())).group.ranks
        if silent.keys().isdisjoint(group_ranks):
            continue
        advanced_at = [
            stream.advanced_at
            for rank, stream in members.items()
            if rank not in silent and stream.kind is StreamKind.COLLECTIVE
        ]
        if not advanced_at:
            continue
        last_advanced_at = max(advanced_at)
        for rank in group_ranks:
            if rank in silent:
                yield rank, last_advanced_at


def _find_receive_signs(
    attempt: Attempt, silent: Mapping[int, float]
) -> Iterator[tuple[int, float]]:
    """A rank is alive when another rank receives from it."""
    for rank, process in attempt.processes.items():
        if rank in silent:
            continue
        for stream in process.streams.values():
            if stream.kind is StreamKind.RECV and stream.peer is not None and stream.peer in silent:
                yield stream.peer, stream.advanced_at


def can_communicate(process: Process) -> bool:
    """Whether a process may still make calls: it is alive and has not destroyed its groups."""
    return process.is_alive and process.lifecycle < Lifecycle.DESTROYED


def list_old_unfinished(process: Process, before: float) -> list[CallStream]:
    """The streams whose newest call was entered ``before`` then and may be unfinished."""
    return [
        s for s in process.open_calls.unfinished_streams if s.entered_at <= before and s.entered > 0
    ]


def is_waiting_on_channel(process: Process, stream: CallStream) -> bool:
    """Whether a rank's stack shows that it waits. The completion of many sends is never reported, so
    only a stack shows that a rank waits for a send that its peer received.

    A message received from any source may be the one that this call was to receive.
    """
    samples = [s for s in process.samples if s.taken_at >= stream.entered_at and s.threads]
    if not samples or not waits_for_work(samples[-1].calling_thread):
        return False
    return all(other.peer != -1 for other in process.streams.values())


def find_blocked_streams(process: Process, before: float) -> Collection[CallStream]:
    """The calls in which the whole process is blocked, and not one thread while others continue."""
    blocked = [s for s in process.open_calls.blocked_streams if s.entered_at <= before]
    if not blocked:
        return blocked
    since = max([stream.entered_at for stream in blocked])
    if process.newest_call_at > since + MIN_WAIT_S:
        # Another thread made calls since; it may wait for this one now.
        return blocked if is_wholly_blocked(process, blocked) else []
    return [] if has_continuing_caller(process, blocked, since) else blocked


def shows_all_members(attempt: Attempt, group_state: GroupState) -> bool:
    """Whether the members of a group that report show that the others exist: all took part in a
    collective, or had to connect before any of them could continue.
    """
    return has_completed_calls(group_state) or any(
        _FULL_MESH_BACKEND in stream.group.backend
        and stream.kind is StreamKind.COLLECTIVE
        and attempt.processes[member].lifecycle is Lifecycle.INITIALISED
        and not stream.group.foreign
        for member, stream in group_state.members.items()
    )


def has_completed_calls(group_state: GroupState) -> bool:
    """Whether a collective of the group is complete: all members took part in it."""
    for stream in group_state.members.values():
        if stream.kind is StreamKind.COLLECTIVE:
            counter = stream if stream.device is None else stream.device
            if (counter.completed or 0) > 0:
                return True
    return False


def get_op_name(stream: CallStream, seq: int | None = None) -> str:
    """The operation of call ``seq``, or of the newest call."""
    call = stream.calls.get(stream.entered if seq is None else seq)
    return call.signature.op if call is not None else stream.op or "a collective"
