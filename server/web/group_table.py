"""The table of process groups: how far the members of each have come in its calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import format_ranks
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from ..http.app_state import AppState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The members of a group that have entered the same number of its calls."""

    entered: int
    op: str  # of the last of these
    ranks: tuple[int, ...]
    behind: int  # calls behind the most advanced member


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    name: str
    desc: str
    backend: str
    ranks: str
    size: int
    positions: tuple[GroupPosition, ...]  # the most advanced first
    unreported_ranks: str  # members that have not reported the group

    @property
    def sort_key(self) -> tuple[bool, int, str, str]:
        """Groups whose members are at different positions come first, then large ones."""
        is_together = len(self.positions) < 2 and not self.unreported_ranks
        return is_together, -self.size, self.desc, self.name


@dataclass(slots=True)
class _GroupStreams:
    """A group's streams by member."""

    group: Group
    streams: dict[int, CallStream] = field(default_factory=dict)


def get_group_rows(live: AppState, attempt: Attempt) -> list[GroupRow]:
    """The process groups, those whose members are at different positions first."""
    return live.cache.get_or_compute(("groups", attempt.key), lambda: build_group_rows(attempt))


def build_group_rows(attempt: Attempt) -> list[GroupRow]:
    rows = [_build_group_row(collected) for collected in _collect_streams(attempt)]
    return sorted(rows, key=lambda row: row.sort_key)


def _collect_streams(attempt: Attempt) -> list[_GroupStreams]:
    candidates: dict[tuple[object, ...], list[_GroupStreams]] = {}
    for rank, process in attempt.processes.items():
        for stream in process.streams.values():
            if stream.kind is StreamKind.COLLECTIVE:
                similar = candidates.setdefault(_get_partial_key(stream.group), [])
                _find_group(similar, stream.group).streams[rank] = stream
    return [collected for similar in candidates.values() for collected in similar]


def _get_partial_key(group: Group) -> tuple[object, ...]:
    """Not `Group.key`: hashing thousands of ranks for each of thousands of members takes seconds."""
    return (
        group.world_size,
        group.generation,
        group.name,
        len(group.ranks),
        group.ranks[:2],
        group.ranks[-1:],
    )


def _find_group(similar: list[_GroupStreams], group: Group) -> _GroupStreams:
    for collected in similar:
        known_ranks = collected.group.ranks
        if known_ranks is group.ranks or known_ranks == group.ranks:
            return collected
    added = _GroupStreams(group)
    similar.append(added)
    return added


def _build_group_row(collected: _GroupStreams) -> GroupRow:
    group, streams = collected.group, collected.streams
    ranks_by_entered: dict[int, list[int]] = {}
    for rank, stream in sorted(streams.items()):
        ranks_by_entered.setdefault(stream.entered, []).append(rank)
    most_advanced = max(ranks_by_entered)
    positions = tuple(
        GroupPosition(
            entered=entered,
            op=streams[ranks[0]].op,
            ranks=tuple(ranks),
            behind=most_advanced - entered,
        )
        for entered, ranks in sorted(ranks_by_entered.items(), reverse=True)
    )
    unreported_ranks = ""
    if len(streams) < len(group.ranks):
        unreported_ranks = format_ranks(set(group.ranks) - streams.keys())
    return GroupRow(
        name=group.name,
        desc=group.desc,
        backend=group.backend,
        ranks=format_ranks(group.ranks),
        size=len(group.ranks),
        positions=positions,
        unreported_ranks=unreported_ranks,
    )
