"""The edges of the wait-for graph: calls in which ranks wait for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from hangwatch.model.groups import Group
from hangwatch.model.verdicts import Wait
from hangwatch.tracking.call_stream import CallStream

from .waits import receives_from_any


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

    @property
    def any_suffices(self) -> bool:
        """Whether any one of the awaited ranks can end the wait."""
        return receives_from_any(self.stream)

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


def get_op_name(stream: CallStream, seq: int | None = None) -> str:
    """The operation of call ``seq``, or of the newest call."""
    call = stream.calls.get(stream.entered if seq is None else seq)
    return call.signature.op if call is not None else stream.op or "a collective"
