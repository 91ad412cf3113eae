"""Deadlocks in a wait-for graph: ranks that can never continue, the components of ranks that wait
for each other, and which ranks of a component to name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .graph import BlockedCall, WaitEdge, WaitGraph

_MAX_CYCLE_STARTS = 16  # ranks from which the shortest cycle is searched for


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlockCore:
    """Of a component the ``ranks`` to name, a shortest ``cycle`` of waits among them, and the ranks
    that are on every cycle.
    """

    ranks: set[int]
    cycle: list[WaitEdge]
    common_ranks: set[int]


def find_blocked_ranks(graph: WaitGraph) -> set[int]:
    """The ranks that can never continue, even if every rank that does not wait does what others
    wait for.

    A call needs all awaited ranks, unless any one of them suffices. A rank with several calls may
    wait in any one of them.
    """
    ranks_by_group = graph.get_waiter_group_ranks()
    groups_by_awaited = graph.get_groups_by_awaited()
    missing_counts = _count_missing_ranks(graph)
    blocked = set(graph.blocked_calls)
    freed_ranks: list[int] = []
    freed_groups = [index for index, count in enumerate(missing_counts) if count <= 0]
    while freed_groups or freed_ranks:
        for index in freed_groups:
            newly_freed = ranks_by_group[index] & blocked
            blocked -= newly_freed
            freed_ranks += newly_freed & groups_by_awaited.keys()
        freed_groups = []
        if not freed_ranks:
            break
        for index in groups_by_awaited[freed_ranks.pop()]:
            missing_counts[index] -= 1
            if missing_counts[index] == 0:
                freed_groups.append(index)
    return blocked


def _count_missing_ranks(graph: WaitGraph) -> list[int]:
    """For each waiter group, how many of the ranks it needs are waiting themselves."""
    chain_ends = graph.find_chain_ends()
    counts: list[int] = []
    for group in graph.iter_waiter_groups():
        awaited = group[0].awaited
        needed_count = 1 if group[0].any_suffices else len(awaited)
        counts.append(needed_count - len(awaited.keys() & chain_ends))
    return counts


def find_cycle_components(
    graph: WaitGraph, blocked: set[int]
) -> Iterator[tuple[set[int], set[int]]]:
    """Sets of ranks that wait for each other and for no other rank of ``blocked``, each with the
    ranks that wait for it.
    """
    remaining = set(blocked)
    while remaining:
        component = _find_component(graph, min(remaining), blocked)
        waiters = graph.find_waiters_of(component, blocked)
        yield component, waiters
        remaining -= component | waiters


def _find_component(graph: WaitGraph, rank: int, blocked: set[int]) -> set[int]:
    """The component that the waits of ``rank`` lead to."""
    while True:
        component = _find_awaited_ranks(graph, [rank], blocked)
        outside = component - {rank} - graph.find_waiters_of([rank], blocked)
        if not outside:
            return component
        rank = min(outside)  # the waits lead there, and none leads back


def find_deadlock_core(graph: WaitGraph, component: set[int]) -> DeadlockCore:
    """The ranks that cause the deadlock of a component.

    A rank without which there would be no cycle is one of them. A rank that waits for it is on a
    cycle with it if it waits for all others, as in a barrier; of these, the ranks that have waited
    longest, in the same call, are named as well. If no rank is on all cycles, all are named.
    """
    cycle = _find_shortest_cycle(graph, component)
    common_ranks: set[int] = set()
    for edge in cycle:
        if _is_acyclic(graph, component - {edge.wait.rank}):
            common_ranks.add(edge.wait.rank)
    if not common_ranks:
        return DeadlockCore(ranks=component, cycle=cycle, common_ranks=common_ranks)
    waiter_groups = _list_waiter_groups(graph, common_ranks, component)
    waiter_groups.sort(key=_earliest_wait)
    for waiter_group in ([], *waiter_groups):
        ranks = common_ranks | {blocked.rank for blocked in waiter_group}
        if not _is_acyclic(graph, ranks):
            ranks &= _find_awaited_ranks(graph, common_ranks, ranks)
            return DeadlockCore(
                ranks=ranks, cycle=_find_shortest_cycle(graph, ranks), common_ranks=common_ranks
            )
    return DeadlockCore(ranks=component, cycle=cycle, common_ranks=common_ranks)


def _list_waiter_groups(
    graph: WaitGraph, awaited_ranks: set[int], component: set[int]
) -> list[list[BlockedCall]]:
    """The waiter groups that wait for any of the ranks, with their ranks of the component only."""
    indices: set[int] = set()
    for rank in awaited_ranks:
        indices.update(graph.get_groups_by_awaited().get(rank, ()))
    waiter_groups: list[list[BlockedCall]] = []
    for index in indices:
        group = graph.iter_waiter_groups()[index]
        in_component = [blocked for blocked in group if blocked.rank in component]
        if in_component:
            waiter_groups.append(in_component)
    return waiter_groups


def _earliest_wait(waiter_group: list[BlockedCall]) -> tuple[float, int]:
    first_began_at = min(blocked.began_at for blocked in waiter_group)
    return first_began_at, min(blocked.rank for blocked in waiter_group)


def _find_awaited_ranks(graph: WaitGraph, ranks: Collection[int], within: set[int]) -> set[int]:
    """The ranks that they wait for, directly or through other ranks of ``within``."""
    seen: set[int] = set()
    searched: set[int] = set()  # identities of mappings
    to_search = list(ranks)
    while to_search:
        for blocked in graph.blocked_calls.get(to_search.pop(), ()):
            if id(blocked.awaited) not in searched:
                searched.add(id(blocked.awaited))
                unseen = (blocked.awaited.keys() & within) - seen
                seen |= unseen
                to_search += unseen
    return seen


def _find_shortest_cycle(graph: WaitGraph, component: set[int]) -> list[WaitEdge]:
    """A shortest cycle of waits, starting with its lowest rank."""
    starts = sorted(component)[:_MAX_CYCLE_STARTS]
    cycle = min((_find_cycle_from(graph, start, component) for start in starts), key=len)
    lowest = min(range(len(cycle)), key=lambda index: cycle[index].wait.rank)
    return cycle[lowest:] + cycle[:lowest]


def _find_cycle_from(graph: WaitGraph, start: int, component: set[int]) -> list[WaitEdge]:
    """The shortest path of waits from a rank of a component back to it, by breadth-first search."""
    edge_to: dict[int, WaitEdge] = {}
    searched: set[int] = set()  # identities of mappings
    level = [start]
    while start not in edge_to:
        next_level: list[int] = []
        for rank in level:
            for blocked in graph.blocked_calls[rank]:
                if id(blocked.awaited) in searched:
                    continue
                searched.add(id(blocked.awaited))
                unreached = (blocked.awaited.keys() & component) - edge_to.keys()
                for awaited_rank in sorted(unreached):
                    edge_to[awaited_rank] = blocked.make_edge(awaited_rank)
                    next_level.append(awaited_rank)
        level = next_level
    path = [edge_to[start]]
    while path[-1].wait.rank != start:
        path.append(edge_to[path[-1].wait.rank])
    return path[::-1]


def _is_acyclic(graph: WaitGraph, ranks: set[int]) -> bool:
    """Whether the waits among ``ranks`` have no cycle, by repeated removal of the ranks that wait
    for no remaining rank.

    Ranks that share a mapping of awaited ranks are counted together, by its identity.
    """
    awaited_counts: dict[int, int] = {}  # of each mapping, its ranks that remain
    waiting_ranks: dict[int, list[int]] = {}  # of each mapping
    mappings_by_awaited: dict[int, list[int]] = {}
    for rank in ranks:
        for blocked in graph.blocked_calls[rank]:
            mapping = id(blocked.awaited)
            if mapping not in awaited_counts:
                awaited = blocked.awaited.keys() & ranks
                awaited_counts[mapping] = len(awaited)
                for awaited_rank in awaited:
                    mappings_by_awaited.setdefault(awaited_rank, []).append(mapping)
            if awaited_counts[mapping]:
                waiting_ranks.setdefault(mapping, []).append(rank)
    wait_counts: dict[int, int] = {}  # of each rank, the mappings that it waits for
    for rank in ranks:
        mappings = [id(blocked.awaited) for blocked in graph.blocked_calls[rank]]
        wait_counts[rank] = sum(awaited_counts[mapping] > 0 for mapping in mappings)
    removable = [rank for rank, count in wait_counts.items() if count == 0]
    remaining_count = len(wait_counts)
    while removable:
        remaining_count -= 1
        for mapping in mappings_by_awaited.get(removable.pop(), ()):
            awaited_counts[mapping] -= 1
            if awaited_counts[mapping]:
                continue
            for rank in waiting_ranks[mapping]:
                wait_counts[rank] -= 1
                if wait_counts[rank] == 0:
                    removable.append(rank)
    return remaining_count == 0
