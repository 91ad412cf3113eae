"""The wait-for graph of a job at one moment: which rank waits for which ranks, in its first unfinished
calls. A host, each of its threads and its device may wait for others.

The ends of its chains are causes, a cycle is a deadlock (see `hangwatch.diagnosis.rules.deadlock`),
and all other ranks are victims. The last known state of silent ranks, whose node agents do not
report, is old; what other ranks report may show that they are alive.

Prior art: T. Hilbrich et al., "MPI runtime error detection with MUST" (2012), on wait-for graphs for
MPI.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hangwatch.model.limits import READING_DELAY_S, Limits
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .devices import DeviceGraph, build_device_graph
from .edges import BlockedCall, WaitEdge, WaiterIndex, WaitResolver, group_by_awaited

_FREED_AT_A_TIME = 1000


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
    # The calls in which ranks that use the CPU may wait, by rank: others are behind, and whether they are
    # complete is unknown. A host may spin while it waits for its device, so only a stack shows it.
    unsampled_waits: dict[int, list[BlockedCall]] = field(default_factory=dict)
    # Ranks last seen in a send or a receive whose other end has arrived: they may continue any
    # moment. The newly released have not reported since.
    released_ranks: set[int] = field(default_factory=set)
    newly_released_ranks: set[int] = field(default_factory=set)

    @cached_property
    def devices(self) -> DeviceGraph | None:
        """How far the devices are; None where no backend reports it."""
        return build_device_graph(self.attempt)

    def get_still_devices(self) -> DeviceGraph | None:
        """The graph of the devices, or None while each one is known to have made progress lately: then
        none can be the subject of a verdict. To find that out takes a tenth of the time.
        """
        if not self.attempt.device_groups:
            return None
        limit_s = self.limits.suspicion_delay_s - 2 * READING_DELAY_S
        stills_s = [process.device_still_s for process in self.attempt.processes.values()]
        return self.devices if max(stills_s, default=0.0) >= limit_s else None

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
