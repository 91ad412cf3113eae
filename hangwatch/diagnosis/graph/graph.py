"""The wait-for graph of a job: who waits for whom, through the first unfinished calls.

The ends of its chains are causes, a cycle is a deadlock (see `cycles`), and everybody else is a
victim. Prior art: T. Hilbrich et al., "MPI runtime error detection with MUST" (2012), on wait-for
graphs for MPI.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from hangwatch.model.verdicts import Wait
from hangwatch.tracking.call_stream import CallStream

from .silence import Silence


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A wait, and the sequence of the rank that waits."""

    wait: Wait
    sequence: CallStream


@dataclass(
    slots=True, eq=False
)  # a frozen one takes three times as long to make, and there is one for each rank
class Stop:
    """A rank waits in a call. Those whom it waits for, each with the call of it that is missing,
    all who wait for the same ones share.
    """

    rank: int
    sequence: CallStream
    since: float
    awaited: Mapping[int, int]
    any: bool  # any one of them will do

    def edge(self, on: int) -> Edge:
        wait = Wait(
            rank=self.rank, on_rank=on, group=self.sequence.group.name, seq=self.awaited[on]
        )
        return Edge(wait=wait, sequence=self.sequence)


@dataclass(slots=True)
class WaitGraph:
    """``stops`` by waiting rank; ``stuck`` are blocked in a call that all others entered;
    ``doubtful`` may or may not wait.

    The ``released`` were last seen in a send or a receive for which the other end is there now:
    they go on at any moment; of these the ``freed`` were not heard since it came. What the
    ``silent`` do is not known, so that they wait for nobody here. Whoever waits for the same ranks
    does so by one crowd: the graph grows with the ranks, and not with their square.
    """

    stops: dict[int, list[Stop]] = field(default_factory=dict)
    stuck: dict[int, CallStream] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)
    silent: dict[int, Silence] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    _crowds: list[list[Stop]] | None = None
    _inside: list[set[int]] = field(default_factory=list)  # the ranks of each crowd
    _into: dict[int, list[int]] = field(default_factory=dict)

    def crowds(self) -> list[list[Stop]]:
        """All stops, those together that wait for the same ranks."""
        if self._crowds is None:
            by: defaultdict[int, list[Stop]] = defaultdict(list)
            for stops in self.stops.values():
                for stop in stops:
                    by[id(stop.awaited)].append(stop)
            self._crowds = list(by.values())
            self._inside = [{stop.rank for stop in crowd} for crowd in self._crowds]
            for n, crowd in enumerate(self._crowds):
                for on in crowd[0].awaited:
                    self._into.setdefault(on, []).append(n)
        return self._crowds

    def inside(self) -> list[set[int]]:
        """The ranks of each crowd."""
        self.crowds()
        return self._inside

    def waiting(self) -> set[int]:
        return {*self.stops, *self.stuck}

    def edges(self, rank: int) -> Iterator[Edge]:
        return (stop.edge(on) for stop in self.stops.get(rank, ()) for on in stop.awaited)

    def ends(self) -> set[int]:
        """Ranks that others wait for and that wait for nobody."""
        return self.awaited().keys() - self.stops.keys()

    def awaited(self) -> Mapping[int, list[int]]:
        """The ranks that others wait for, each with the crowds that do, by their places in
        `crowds`.
        """
        self.crowds()
        return self._into

    def into(self, rank: int) -> Iterator[Stop]:
        """The waits for it, one of each crowd: all of that are in the same call."""
        crowds = self.crowds()
        return (crowds[n][0] for n in self._into.get(rank, ()))

    def reaching(self, targets: Iterable[int], within: Set[int] | None = None) -> set[int]:
        """The ranks from which a chain of waits leads to any of ``targets``, without these;
        ``within`` some ranks alone.
        """
        inside, goals = self.inside(), set(targets)
        seen, open_ = set(goals), list(goals)
        passed: set[int] = set()
        while open_:
            for n in self._into.get(open_.pop(), ()):
                if n not in passed:
                    passed.add(n)
                    fresh = inside[n] - seen
                    if within is not None:
                        fresh &= within
                    seen |= fresh
                    open_ += fresh
        return seen - goals

    def together(self, ends: Iterable[int]) -> list[set[int]]:
        """``ends`` in sets of those that hold up some rank in common."""
        crowds = self.crowds()
        found = {end: {end} for end in sorted(ends)}
        if len(found) == 1:
            return list(found.values())
        owner: dict[int, int] = dict(
            zip(found, found, strict=True)
        )  # of a rank, or of a crowd as -1 - its number
        for end in list(found):
            open_ = [end]
            while open_:
                for n in self._into.get(open_.pop(), ()):
                    if (held := owner.get(-1 - n)) is None:
                        for stop in crowds[n]:
                            if (other := owner.get(stop.rank)) is None:
                                owner[stop.rank] = end
                                open_.append(stop.rank)
                            else:
                                _unite(found, end, other)
                        owner[-1 - n] = end
                    else:
                        _unite(found, end, held)
        return list({id(joined): joined for joined in found.values()}.values())


def _unite(sets: dict[int, set[int]], one: int, other: int) -> None:
    """Joins the sets of two members; every member of a set leads to the same object."""
    small, large = sorted((sets[one], sets[other]), key=len)
    if small is not large:
        large |= small
        sets.update(dict.fromkeys(small, large))
