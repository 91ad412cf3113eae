"""The view by process group: who has entered which call."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import format_ranks
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from ..http.app_state import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The members of a group that have entered equally many of its calls."""

    entered: int
    op: str
    ranks: tuple[int, ...]
    behind: int  # calls, of the furthest


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    name: str
    desc: str
    backend: str
    ranks: str
    size: int
    positions: tuple[Position, ...]  # the furthest first
    absent: str  # members that have not told of it


def groups(live: Live, attempt: Attempt) -> list[Group]:
    """Process groups: those whose members are apart first, then by size."""
    return live.memo.get(("groups", attempt.job, attempt.number), lambda: positions(attempt))


def positions(attempt: Attempt) -> list[Group]:
    found: dict[tuple[object, ...], list[tuple[tuple[int, ...], dict[int, CallStream]]]] = {}
    for rank, process in attempt.processes.items():
        for sequence in process.streams.values():
            group = sequence.group
            if sequence.kind is not StreamKind.COLLECTIVE:
                continue
            # Not by Group.key: to hash thousands of ranks for each of thousands of members would
            # take seconds.
            alike = found.setdefault(
                (
                    group.world_size,
                    group.generation,
                    group.name,
                    len(group.ranks),
                    group.ranks[:2],
                    group.ranks[-1:],
                ),
                [],
            )
            members = next(
                (m for ranks, m in alike if ranks is group.ranks or ranks == group.ranks), None
            )
            if members is None:
                alike.append((group.ranks, members := {}))
            members[rank] = sequence
    made = [_group(members) for alike in found.values() for _, members in alike]
    return sorted(
        made, key=lambda g: (len(g.positions) < 2 and not g.absent, -g.size, g.desc, g.name)
    )


def _group(members: dict[int, CallStream]) -> Group:
    group = next(iter(members.values())).group
    places: dict[int, list[int]] = {}
    for rank, sequence in sorted(members.items()):
        places.setdefault(sequence.entered, []).append(rank)
    furthest = max(places)
    return Group(
        name=group.name,
        desc=group.desc,
        backend=group.backend,
        ranks=format_ranks(group.ranks),
        size=len(group.ranks),
        positions=tuple(
            Position(
                entered=entered,
                op=members[ranks[0]].op,
                ranks=tuple(ranks),
                behind=furthest - entered,
            )
            for entered, ranks in sorted(places.items(), reverse=True)
        ),
        absent=format_ranks(set(group.ranks) - members.keys())
        if len(members) < len(group.ranks)
        else "",
    )
