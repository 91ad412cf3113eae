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
class WaitEdge:
    """A wait, and the sequence of the rank that waits."""

    wait: Wait
    stream: CallStream


@dataclass(
    slots=True, eq=False
)  # a frozen one takes three times as long to make, and there is one for each rank
class BlockedCall:
    """A rank waits in a call. Those whom it waits for, each with the call of it that is missing,
    all who wait for the same ones share.
    """

    rank: int
    stream: CallStream
    began_at: float
    awaited: Mapping[int, int]
    any_suffices: bool  # any one of them will do

    def make_edge(self, on_rank: int) -> WaitEdge:
        wait = Wait(
            rank=self.rank, on_rank=on_rank, group=self.stream.group.name, seq=self.awaited[on_rank]
        )
        return WaitEdge(wait=wait, stream=self.stream)


@dataclass(slots=True)
class WaitGraph:
    """``stops`` by waiting rank; ``stuck`` are blocked in a call that all others entered;
    ``doubtful`` may or may not wait.

    The ``released`` were last seen in a send or a receive for which the other end is there now:
    they go on at any moment; of these the ``freed`` were not heard since it came. What the
    ``silent`` do is not known, so that they wait for nobody here. Whoever waits for the same ranks
    does so by one crowd: the graph grows with the ranks, and not with their square.
    """

    blocked_calls: dict[int, list[BlockedCall]] = field(default_factory=dict)
    stuck_streams: dict[int, CallStream] = field(default_factory=dict)
    uncertain_ranks: set[int] = field(default_factory=set)
    silent_ranks: dict[int, Silence] = field(default_factory=dict)
    released_ranks: set[int] = field(default_factory=set)
    newly_released_ranks: set[int] = field(default_factory=set)
    _waiter_groups: list[list[BlockedCall]] | None = None
    _waiter_group_ranks: list[set[int]] = field(default_factory=list)  # the ranks of each crowd
    _groups_by_awaited: dict[int, list[int]] = field(default_factory=dict)

    def iter_waiter_groups(self) -> list[list[BlockedCall]]:
        """All stops, those together that wait for the same ranks."""
        if self._waiter_groups is None:
            by: defaultdict[int, list[BlockedCall]] = defaultdict(list)
            for stops in self.blocked_calls.values():
                for stop in stops:
                    by[id(stop.awaited)].append(stop)
            self._waiter_groups = list(by.values())
            self._waiter_group_ranks = [
                {stop.rank for stop in crowd} for crowd in self._waiter_groups
            ]
            for n, crowd in enumerate(self._waiter_groups):
                for on in crowd[0].awaited:
                    self._groups_by_awaited.setdefault(on, []).append(n)
        return self._waiter_groups

    def get_waiter_group_ranks(self) -> list[set[int]]:
        """The ranks of each crowd."""
        self.iter_waiter_groups()
        return self._waiter_group_ranks

    def get_waiting_ranks(self) -> set[int]:
        return {*self.blocked_calls, *self.stuck_streams}

    def iter_edges(self, rank: int) -> Iterator[WaitEdge]:
        return (
            stop.make_edge(on) for stop in self.blocked_calls.get(rank, ()) for on in stop.awaited
        )

    def find_chain_ends(self) -> set[int]:
        """Ranks that others wait for and that wait for nobody."""
        return self.get_groups_by_awaited().keys() - self.blocked_calls.keys()

    def get_groups_by_awaited(self) -> Mapping[int, list[int]]:
        """The ranks that others wait for, each with the crowds that do, by their places in
        `crowds`.
        """
        self.iter_waiter_groups()
        return self._groups_by_awaited

    def iter_waits_for(self, rank: int) -> Iterator[BlockedCall]:
        """The waits for it, one of each crowd: all of that are in the same call."""
        crowds = self.iter_waiter_groups()
        return (crowds[n][0] for n in self._groups_by_awaited.get(rank, ()))

    def find_waiters_of(self, targets: Iterable[int], within: Set[int] | None = None) -> set[int]:
        """The ranks from which a chain of waits leads to any of ``targets``, without these;
        ``within`` some ranks alone.
        """
        inside, goals = self.get_waiter_group_ranks(), set(targets)
        seen, open_ = set(goals), list(goals)
        passed: set[int] = set()
        while open_:
            for n in self._groups_by_awaited.get(open_.pop(), ()):
                if n not in passed:
                    passed.add(n)
                    fresh = inside[n] - seen
                    if within is not None:
                        fresh &= within
                    seen |= fresh
                    open_ += fresh
        return seen - goals

    def group_chain_ends(self, chain_ends: Iterable[int]) -> list[set[int]]:
        """``ends`` in sets of those that hold up some rank in common."""
        crowds = self.iter_waiter_groups()
        found = {end: {end} for end in sorted(chain_ends)}
        if len(found) == 1:
            return list(found.values())
        owner: dict[int, int] = dict(
            zip(found, found, strict=True)
        )  # of a rank, or of a crowd as -1 - its number
        for end in list(found):
            open_ = [end]
            while open_:
                for n in self._groups_by_awaited.get(open_.pop(), ()):
                    if (held := owner.get(-1 - n)) is None:
                        for stop in crowds[n]:
                            if (other := owner.get(stop.rank)) is None:
                                owner[stop.rank] = end
                                open_.append(stop.rank)
                            else:
                                _merge_sets(found, end, other)
                        owner[-1 - n] = end
                    else:
                        _merge_sets(found, end, held)
        return list({id(joined): joined for joined in found.values()}.values())


def _merge_sets(sets: dict[int, set[int]], one: int, other: int) -> None:
    """Joins the sets of two members; every member of a set leads to the same object."""
    small, large = sorted((sets[one], sets[other]), key=len)
    if small is not large:
        large |= small
        sets.update(dict.fromkeys(small, large))
