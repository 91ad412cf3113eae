"""What the ranks at the ends of wait chains are doing instead of entering the call in which others wait,
and the longest of these waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import REPORT_JITTER_S
from hangwatch.tracking.process import Process

from ..context import DiagnosisContext, get_state_known_until
from ..graph.edges import BlockedCall, WaitEdge
from ..graph.progress import find_working_threads, is_progressing

# If one chain has several ends, those of the first kind in this order are the cause.
KIND_PRECEDENCE = (
    VerdictKind.EXITED_RANK,
    VerdictKind.FROZEN_RANK,
    VerdictKind.LOST_NODE,
    VerdictKind.STARTUP_STALL,
    VerdictKind.MISSING_RANK,
    VerdictKind.SLOW_RANK,
)


def get_unable_kind(context: DiagnosisContext, rank: int) -> VerdictKind | None:
    """The kind for a rank that cannot enter the call, because it has left or is frozen; else None."""
    if rank not in context.attempt.unable_ranks:
        return None
    process = context.attempt.processes[rank]
    for blocked in context.graph.iter_waits_for(rank):
        if process.has_left(blocked.stream.group):
            return VerdictKind.EXITED_RANK
    return VerdictKind.FROZEN_RANK if process.freeze_reason(context.now) is not None else None


def is_working(context: DiagnosisContext, rank: int, since: float) -> bool:
    """Whether the rank, or what it waits for on its host, makes progress."""
    process = context.attempt.processes[rank]
    # A rank that makes calls elsewhere is not stuck before it has been in its own code as long.
    unchanged_s = get_state_known_until(context, rank) - process.last_advanced_at
    return (
        rank in context.graph.released_ranks
        or unchanged_s < context.limits.stall_after_s
        or is_progressing(process, since)
        or bool(find_working_threads(process, since))
        or is_in_phase(context, process)
    )


def is_in_phase(context: DiagnosisContext, process: Process) -> bool:
    """Whether a rank is in a phase that it declared, within the phase's time limit."""
    if process.phase is None:
        return False
    limit_s = process.phase.limit_s or context.limits.slow_limit_s
    return context.now - process.phase.began_at < limit_s


@dataclass(slots=True, eq=False)
class LongestWaits:
    """The longest waits for one rank. Ranks with the same waiters share one object."""

    blocked_calls: list[BlockedCall]
    began_at: float
    last_began_at: float  # when the last of all waiting ranks entered its call
    # Whether all waits are in calls that a process makes without init_process_group as well: calls
    # declared by `hangwatch.collective`, or of groups that the world does not number.
    all_declared: bool
    setup_calls: list[BlockedCall]  # the waits in the creation of a group
    # The time until which each wait is known to last, and when it began.
    known_intervals: list[tuple[float, float]]
    longest_s: float  # the longest known duration

    @classmethod
    def from_blocked_calls(
        cls, context: DiagnosisContext, blocked_calls: list[BlockedCall], last_began_at: float
    ) -> LongestWaits:
        known_intervals = [
            (get_state_known_until(context, blocked.rank), blocked.began_at)
            for blocked in blocked_calls
        ]
        return cls(
            blocked_calls=blocked_calls,
            began_at=min(blocked.began_at for blocked in blocked_calls),
            last_began_at=last_began_at,
            all_declared=all(
                blocked.stream.group.is_declared or blocked.stream.group.foreign != ""
                for blocked in blocked_calls
            ),
            setup_calls=[b for b in blocked_calls if b.stream.kind is StreamKind.SETUP],
            known_intervals=known_intervals,
            longest_s=max(until - began_at for until, began_at in known_intervals),
        )

    def make_first_edge(self, awaited: int) -> WaitEdge:
        """The wait for rank ``awaited`` that began first. If several waits of its group began within the
        error of the reported times, it is the one in the call with the lowest number: the later calls
        are missing for the same reason.
        """
        first = min(self.blocked_calls, key=lambda blocked: blocked.began_at)
        simultaneous = [
            blocked
            for blocked in self.blocked_calls
            if blocked.began_at - first.began_at <= REPORT_JITTER_S
            and blocked.stream.group is first.stream.group
        ]
        oldest = min(simultaneous, key=lambda b: (b.awaited[awaited], b.began_at))
        return oldest.make_edge(awaited)


def collect_longest_waits(
    context: DiagnosisContext, chain_ends: set[int]
) -> dict[int, LongestWaits]:
    """The longest waits for each chain end; chain ends that only deadlocked ranks wait for are
    omitted.
    """
    # The longest waits of each waiter group, and when the last of all its waits began.
    waiter_groups: list[tuple[list[BlockedCall], float]] = []
    groups_by_end: dict[int, list[int]] = {}  # indices in `waiter_groups`
    for blocked_calls in context.graph.iter_waiter_groups():
        awaited_ends = chain_ends.intersection(blocked_calls[0].awaited)
        if not awaited_ends:
            continue
        waiter_group = _select_longest(context, blocked_calls)
        if waiter_group is None:
            continue
        for rank in awaited_ends:
            groups_by_end.setdefault(rank, []).append(len(waiter_groups))
        waiter_groups.append(waiter_group)
    waits_by_indices: dict[tuple[int, ...], LongestWaits] = {}
    waits_by_end: dict[int, LongestWaits] = {}
    for rank, indices in groups_by_end.items():
        key = tuple(indices)
        if key not in waits_by_indices:
            selected = [waiter_groups[index] for index in indices]
            waits_by_indices[key] = LongestWaits.from_blocked_calls(
                context,
                [blocked for longest, _ in selected for blocked in longest],
                max(last_began_at for _, last_began_at in selected),
            )
        waits_by_end[rank] = waits_by_indices[key]
    return waits_by_end


def _select_longest(
    context: DiagnosisContext, blocked_calls: Iterable[BlockedCall]
) -> tuple[list[BlockedCall], float] | None:
    """The waits that may be the longest: each other one began later and is known for no longer. With it,
    when the last of all waits began. None if all of the ranks are deadlocked.
    """
    # The waits by when they began: sorting 100,000 pairs would block all threads for too long.
    longest_by_start: dict[float, tuple[float, BlockedCall]] = {}
    for blocked in blocked_calls:
        if blocked.rank in context.deadlocked_ranks:
            continue
        known_until = get_state_known_until(context, blocked.rank)
        former = longest_by_start.get(blocked.began_at)
        if former is None or known_until > former[0]:
            longest_by_start[blocked.began_at] = known_until, blocked
    longest: list[BlockedCall] = []
    latest_known_until = float("-inf")
    for began_at in sorted(longest_by_start):
        known_until, blocked = longest_by_start[began_at]
        if known_until > latest_known_until:
            longest.append(blocked)
            latest_known_until = known_until
    return (longest, max(longest_by_start)) if longest else None
