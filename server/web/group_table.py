"""The view by process group: who has entered which call."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import format_ranks
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from ..http.app_state import AppState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The members of a group that have entered equally many of its calls."""

    entered: int
    op: str
    ranks: tuple[int, ...]
    behind: int  # calls, of the furthest


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    name: str
    desc: str
    backend: str
    ranks: str
    size: int
    positions: tuple[GroupPosition, ...]  # the furthest first
    absent: str  # members that have not told of it


def get_group_rows(live: AppState, attempt: Attempt) -> list[GroupRow]:
    """Process groups: those whose members are apart first, then by size."""
    return live.cache.get_or_compute(
        ("groups", attempt.job, attempt.number), lambda: build_group_rows(attempt)
    )


def build_group_rows(attempt: Attempt) -> list[GroupRow]:
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
    rows = [_build_group_row(members) for alike in found.values() for _, members in alike]
    return sorted(
        rows, key=lambda g: (len(g.positions) < 2 and not g.absent, -g.size, g.desc, g.name)
    )


def _build_group_row(members: dict[int, CallStream]) -> GroupRow:
    group = next(iter(members.values())).group
    ranks_by_entered: dict[int, list[int]] = {}
    for rank, sequence in sorted(members.items()):
        ranks_by_entered.setdefault(sequence.entered, []).append(rank)
    furthest = max(ranks_by_entered)
    return GroupRow(
        name=group.name,
        desc=group.desc,
        backend=group.backend,
        ranks=format_ranks(group.ranks),
        size=len(group.ranks),
        positions=tuple(
            GroupPosition(
                entered=entered,
                op=members[ranks[0]].op,
                ranks=tuple(ranks),
                behind=furthest - entered,
            )
            for entered, ranks in sorted(ranks_by_entered.items(), reverse=True)
        ),
        absent=format_ranks(set(group.ranks) - members.keys())
        if len(members) < len(group.ranks)
        else "",
    )
