"""The table of process groups: how far the members of each have come in its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hangwatch.model.groups import Group
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from ..http.app_state import AppState
from ..monitor import views


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The members of a group that have entered the same number of its calls."""

    entered: int
    op: str  # of the last of these
    ranks: tuple[int, ...]
    behind: int  # calls behind the most advanced member


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    group: Group
    positions: tuple[GroupPosition, ...]  # the most advanced first
    unreported_ranks: frozenset[int]  # members that have not reported the group

    @property
    def sort_key(self) -> tuple[bool, int, str, str]:
        """Groups whose members are at different positions come first, then large ones."""
        is_together = len(self.positions) < 2 and not self.unreported_ranks
        return is_together, -len(self.group.ranks), self.group.desc, self.group.name


def get_group_rows(live: AppState, attempt: Attempt) -> list[GroupRow]:
    """The process groups, those whose members are at different positions first."""
    return live.cache.get_or_compute(("groups", attempt.key), lambda: _build_group_rows(attempt))


def _build_group_rows(attempt: Attempt) -> list[GroupRow]:
    rows = [_build_group_row(group, streams) for group, streams in list_group_streams(attempt)]
    return sorted(rows, key=lambda row: row.sort_key)


def list_group_streams(attempt: Attempt) -> list[tuple[Group, Mapping[int, CallStream]]]:
    """Each process group, and its streams by member."""
    listed = [attempt.streams_by_group[key] for key in views.list_groups(attempt)]
    return [(next(iter(streams.values())).group, streams) for streams in listed]


def _build_group_row(group: Group, streams: Mapping[int, CallStream]) -> GroupRow:
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
    unreported_ranks = frozenset(group.ranks).difference(streams)
    return GroupRow(group=group, positions=positions, unreported_ranks=unreported_ranks)
