"""Deadlocks in a wait-for graph: who can never go on, the knots of ranks that wait for one another,
and whom of a knot to name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .graph import BlockedCall, WaitEdge, WaitGraph

_MAX_CYCLE_STARTS = 16  # ranks from which a shortest cycle is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlockCore:
    """Of a knot the ``ranks`` to name, a shortest ``cycle`` of waits among them, and those whom all
    cycles lead ``through``.
    """

    ranks: set[int]
    cycle: list[WaitEdge]
    common_ranks: set[int]


def find_blocked_ranks(graph: WaitGraph) -> set[int]:
    """The ranks that can never go on, whatever becomes of those who wait for nobody.

    A call needs all whom it waits for, unless any one of them will do. A rank with several calls
    may wait in any one of these.
    """
    crowds, inside, into, free, found = (
        graph.iter_waiter_groups(),
        graph.get_waiter_group_ranks(),
        graph.get_groups_by_awaited(),
        graph.find_chain_ends(),
        set(graph.blocked_calls),
    )
    lacking = [
        (1 if crowd[0].any_suffices else len(crowd[0].awaited))
        - len(crowd[0].awaited.keys() & free)
        for crowd in crowds
    ]
    open_: list[int] = []
    going = [n for n, count in enumerate(lacking) if count <= 0]
    while going or open_:
        for n in going:
            fresh = inside[n] & found
            found -= fresh
            open_ += fresh & into.keys()
        going = []
        for n in into[open_.pop()] if open_ else ():
            lacking[n] -= 1
            if lacking[n] == 0:
                going.append(n)
    return found


def find_cycle_components(
    graph: WaitGraph, blocked: set[int]
) -> Iterator[tuple[set[int], set[int]]]:
    """Sets of ranks that wait for one another, and of which none waits for others of the ``held``:
    each with those who wait for it.
    """
    left = set(blocked)
    while left:
        rank = min(left)
        while (
            outside := (knot := _find_awaited_ranks(graph, [rank], blocked))
            - {rank}
            - graph.find_waiters_of([rank], blocked)
        ):
            rank = min(outside)  # it leads further in, and no way leads back
        behind = graph.find_waiters_of(knot, blocked)
        yield knot, behind
        left -= knot | behind


def find_deadlock_core(graph: WaitGraph, component: set[int]) -> DeadlockCore:
    """Who is at the bottom of it.

    A rank without which there would be no cycle is; whoever waits for it is on a cycle with it if
    it waits for all, as in a barrier, and of these the ones that have waited longest, in one call,
    are named with it. Where no rank is in all cycles, all are named.
    """
    cycle = _find_shortest_cycle(graph, component)
    through = {edge.wait.rank for edge in cycle if _is_acyclic(graph, component - {edge.wait.rank})}
    if not through:
        return DeadlockCore(ranks=component, cycle=cycle, common_ranks=through)
    crowds = [
        [s for s in graph.iter_waiter_groups()[n] if s.rank in component]
        for n in {n for rank in through for n in graph.get_groups_by_awaited().get(rank, ())}
    ]
    for crowd in ([], *sorted(filter(None, crowds), key=_earliest_wait)):
        ranks = through | {stop.rank for stop in crowd}
        if not _is_acyclic(graph, ranks):
            ranks &= _find_awaited_ranks(graph, through, ranks)
            return DeadlockCore(
                ranks=ranks, cycle=_find_shortest_cycle(graph, ranks), common_ranks=through
            )
    return DeadlockCore(ranks=component, cycle=cycle, common_ranks=through)


def _earliest_wait(waiter_group: list[BlockedCall]) -> tuple[float, int]:
    return min(stop.began_at for stop in waiter_group), min(stop.rank for stop in waiter_group)


def _find_awaited_ranks(graph: WaitGraph, ranks: Collection[int], within: set[int]) -> set[int]:
    """Whom they wait for, and whom these do."""
    seen: set[int] = set()
    passed: set[int] = set()
    open_ = list(ranks)
    while open_:
        for stop in graph.blocked_calls.get(open_.pop(), ()):
            if id(stop.awaited) not in passed:
                passed.add(id(stop.awaited))
                fresh = (stop.awaited.keys() & within) - seen
                seen |= fresh
                open_ += fresh
    return seen


def _find_shortest_cycle(graph: WaitGraph, component: set[int]) -> list[WaitEdge]:
    """A shortest cycle of waits, from its lowest rank on."""
    cycle = min(
        (
            _find_cycle_from(graph, start, component)
            for start in sorted(component)[:_MAX_CYCLE_STARTS]
        ),
        key=len,
    )
    lowest = min(range(len(cycle)), key=lambda n: cycle[n].wait.rank)
    return cycle[lowest:] + cycle[:lowest]


def _find_cycle_from(graph: WaitGraph, start: int, component: set[int]) -> list[WaitEdge]:
    """The shortest way from a rank of a knot back to it."""
    came: dict[int, WaitEdge] = {}
    passed: set[int] = set()
    level = [start]
    while start not in came:
        reached: list[int] = []
        for stop in (
            stop
            for rank in level
            for stop in graph.blocked_calls[rank]
            if id(stop.awaited) not in passed
        ):
            passed.add(id(stop.awaited))
            for on in sorted((stop.awaited.keys() & component) - came.keys()):
                came[on] = stop.make_edge(on)
                reached.append(on)
        level = reached
    way = [came[start]]
    while way[-1].wait.rank != start:
        way.append(came[way[-1].wait.rank])
    return way[::-1]


def _is_acyclic(graph: WaitGraph, ranks: set[int]) -> bool:
    """Whether nobody is left once all who wait for none of them have gone, then those who waited
    for these alone, and so on.
    """
    lacking: dict[int, int] = {}  # by crowd, of how many of the ranks it waits
    waiting: dict[int, list[int]] = {}  # the ranks of each crowd
    into: dict[int, list[int]] = {}  # the crowds that wait for each rank
    for rank in ranks:
        for stop in graph.blocked_calls[rank]:
            crowd = id(stop.awaited)
            if crowd not in lacking:
                awaited = stop.awaited.keys() & ranks
                lacking[crowd] = len(awaited)
                for on in awaited:
                    into.setdefault(on, []).append(crowd)
            if lacking[crowd]:
                waiting.setdefault(crowd, []).append(rank)
    needs = {
        rank: sum(lacking[id(stop.awaited)] > 0 for stop in graph.blocked_calls[rank])
        for rank in ranks
    }
    free = [rank for rank, count in needs.items() if count == 0]
    left = len(needs)
    while free:
        left -= 1
        for crowd in into.get(free.pop(), ()):
            lacking[crowd] -= 1
            for rank in waiting[crowd] if lacking[crowd] == 0 else ():
                needs[rank] -= 1
                if needs[rank] == 0:
                    free.append(rank)
    return left == 0
