"""Deadlocks in a wait-for graph: who can never go on, the knots of ranks that wait for one another,
and whom of a knot to name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .graph import Edge, Stop, WaitGraph

_STARTS = 16  # ranks from which a shortest cycle is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """Of a knot the ``ranks`` to name, a shortest ``cycle`` of waits among them, and those whom all
    cycles lead ``through``.
    """

    ranks: set[int]
    cycle: list[Edge]
    through: set[int]


def held(graph: WaitGraph) -> set[int]:
    """The ranks that can never go on, whatever becomes of those who wait for nobody.

    A call needs all whom it waits for, unless any one of them will do. A rank with several calls
    may wait in any one of these.
    """
    crowds, inside, into, free, found = (
        graph.crowds(),
        graph.inside(),
        graph.awaited(),
        graph.ends(),
        set(graph.stops),
    )
    lacking = [
        (1 if crowd[0].any else len(crowd[0].awaited)) - len(crowd[0].awaited.keys() & free)
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


def knots(graph: WaitGraph, held: set[int]) -> Iterator[tuple[set[int], set[int]]]:
    """Sets of ranks that wait for one another, and of which none waits for others of the ``held``:
    each with those who wait for it.
    """
    left = set(held)
    while left:
        rank = min(left)
        while (
            outside := (knot := _ahead(graph, [rank], held)) - {rank} - graph.reaching([rank], held)
        ):
            rank = min(outside)  # it leads further in, and no way leads back
        behind = graph.reaching(knot, held)
        yield knot, behind
        left -= knot | behind


def core(graph: WaitGraph, knot: set[int]) -> Core:
    """Who is at the bottom of it.

    A rank without which there would be no cycle is; whoever waits for it is on a cycle with it if
    it waits for all, as in a barrier, and of these the ones that have waited longest, in one call,
    are named with it. Where no rank is in all cycles, all are named.
    """
    cycle = _shortest(graph, knot)
    through = {edge.wait.rank for edge in cycle if _acyclic(graph, knot - {edge.wait.rank})}
    if not through:
        return Core(ranks=knot, cycle=cycle, through=through)
    crowds = [
        [s for s in graph.crowds()[n] if s.rank in knot]
        for n in {n for rank in through for n in graph.awaited().get(rank, ())}
    ]
    for crowd in ([], *sorted(filter(None, crowds), key=_since)):
        ranks = through | {stop.rank for stop in crowd}
        if not _acyclic(graph, ranks):
            ranks &= _ahead(graph, through, ranks)
            return Core(ranks=ranks, cycle=_shortest(graph, ranks), through=through)
    return Core(ranks=knot, cycle=cycle, through=through)


def _since(crowd: list[Stop]) -> tuple[float, int]:
    return min(stop.since for stop in crowd), min(stop.rank for stop in crowd)


def _ahead(graph: WaitGraph, ranks: Collection[int], within: set[int]) -> set[int]:
    """Whom they wait for, and whom these do."""
    seen: set[int] = set()
    passed: set[int] = set()
    open_ = list(ranks)
    while open_:
        for stop in graph.stops.get(open_.pop(), ()):
            if id(stop.awaited) not in passed:
                passed.add(id(stop.awaited))
                fresh = (stop.awaited.keys() & within) - seen
                seen |= fresh
                open_ += fresh
    return seen


def _shortest(graph: WaitGraph, knot: set[int]) -> list[Edge]:
    """A shortest cycle of waits, from its lowest rank on."""
    cycle = min((_round(graph, start, knot) for start in sorted(knot)[:_STARTS]), key=len)
    lowest = min(range(len(cycle)), key=lambda n: cycle[n].wait.rank)
    return cycle[lowest:] + cycle[:lowest]


def _round(graph: WaitGraph, start: int, knot: set[int]) -> list[Edge]:
    """The shortest way from a rank of a knot back to it."""
    came: dict[int, Edge] = {}
    passed: set[int] = set()
    level = [start]
    while start not in came:
        reached: list[int] = []
        for stop in (
            stop for rank in level for stop in graph.stops[rank] if id(stop.awaited) not in passed
        ):
            passed.add(id(stop.awaited))
            for on in sorted((stop.awaited.keys() & knot) - came.keys()):
                came[on] = stop.edge(on)
                reached.append(on)
        level = reached
    way = [came[start]]
    while way[-1].wait.rank != start:
        way.append(came[way[-1].wait.rank])
    return way[::-1]


def _acyclic(graph: WaitGraph, ranks: set[int]) -> bool:
    """Whether nobody is left once all who wait for none of them have gone, then those who waited
    for these alone, and so on.
    """
    lacking: dict[int, int] = {}  # by crowd, of how many of the ranks it waits
    waiting: dict[int, list[int]] = {}  # the ranks of each crowd
    into: dict[int, list[int]] = {}  # the crowds that wait for each rank
    for rank in ranks:
        for stop in graph.stops[rank]:
            crowd = id(stop.awaited)
            if crowd not in lacking:
                awaited = stop.awaited.keys() & ranks
                lacking[crowd] = len(awaited)
                for on in awaited:
                    into.setdefault(on, []).append(crowd)
            if lacking[crowd]:
                waiting.setdefault(crowd, []).append(rank)
    needs = {
        rank: sum(lacking[id(stop.awaited)] > 0 for stop in graph.stops[rank]) for rank in ranks
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
