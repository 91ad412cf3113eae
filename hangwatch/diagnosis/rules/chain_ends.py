"""The kind of verdict that fits the end of a wait chain, by what the rank is doing instead of entering
the call in which others wait; and how long they have waited for it, as far as is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, REPORT_JITTER_S
from hangwatch.tracking.process import Process

from ..context import DiagnosisContext, get_state_known_until
from ..graph.edges import BlockedCall, WaitEdge
from ..graph.progress import find_working_threads, is_progressing, is_waiting_for_rank
from ..graph.waits import is_not_initialized

# If one chain has several ends, those of the first kind in this order are the cause.
KIND_PRECEDENCE = (
    VerdictKind.EXITED_RANK,
    VerdictKind.FROZEN_RANK,
    VerdictKind.LOST_NODE,
    VerdictKind.STARTUP_STALL,
    VerdictKind.MISSING_RANK,
    VerdictKind.SLOW_RANK,
)
_ABSENT_KINDS = (VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK)


def classify_ends(
    context: DiagnosisContext, ranks: list[int], waits_by_end: dict[int, LongestWaits]
) -> dict[int, VerdictKind]:
    """The kind of each rank.

    Where any one of several ranks would suffice, only those that are closest to entering the call are
    kept: only they delay the waiting ranks.
    """
    kinds = {rank: _classify_end(context, rank, waits_by_end[rank]) for rank in ranks}
    alternatives = {
        rank
        for rank in ranks
        if all(blocked.any_suffices for blocked in waits_by_end[rank].blocked_calls)
    }
    precedences = [KIND_PRECEDENCE.index(kinds[rank]) for rank in alternatives]
    closest = max(precedences, default=0)
    return {
        rank: kind
        for rank, kind in kinds.items()
        if rank not in alternatives or KIND_PRECEDENCE.index(kind) == closest
    }


def _classify_end(context: DiagnosisContext, rank: int, waits: LongestWaits) -> VerdictKind:
    process = context.attempt.processes.get(rank)
    unable_kind = get_unable_kind(context, rank)
    if unable_kind is not None:
        return unable_kind
    if rank in context.graph.silent_ranks:
        return VerdictKind.LOST_NODE
    # Declared calls need no init_process_group, and a rank of another world can still make them.
    if process is None or (is_not_initialized(process) and not waits.all_declared):
        return VerdictKind.STARTUP_STALL
    is_first_setup_awaited = any(blocked.awaited[rank] == 1 for blocked in waits.setup_calls)
    if is_first_setup_awaited and not any(
        stream.kind is StreamKind.SETUP for stream in process.streams.values()
    ):
        return VerdictKind.STARTUP_STALL
    if is_in_phase(context, process):
        return VerdictKind.SLOW_RANK
    within_slow_limit = context.now - waits.began_at < context.limits.slow_limit_s
    if within_slow_limit and is_working(context, rank, waits.began_at):
        return VerdictKind.SLOW_RANK
    return VerdictKind.MISSING_RANK


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


def select_absent(kinds: dict[int, VerdictKind]) -> set[int]:
    """The ranks that are alive in their own code."""
    return {rank for rank, kind in kinds.items() if kind in _ABSENT_KINDS}


def find_possible_victims(
    context: DiagnosisContext,
    kinds: dict[int, VerdictKind],
    waits_by_end: dict[int, LongestWaits],
) -> set[int]:
    """The absent ranks whose stack shows a wait that another rank may end: while one of the absent
    ranks works, these may be its victims.

    Only some of many ranks are sampled. If there are such waits among these, ranks without a sample
    that do not work may be victims as well.
    """
    absent = select_absent(kinds)
    waits_for_rank: dict[int, bool | None] = {}
    for rank in absent:
        process = context.attempt.processes[rank]
        if process.samples and not is_in_phase(context, process):
            waits_for_rank[rank] = is_waiting_for_rank(process, waits_by_end[rank].began_at)
    if True not in waits_for_rank.values():
        return set()
    victims = set()
    for rank in absent:
        waits = waits_for_rank.get(rank)
        if waits is None:
            waits = not is_working(context, rank, waits_by_end[rank].began_at)
        if waits:
            victims.add(rank)
    return victims


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


def get_wait_age_s(
    context: DiagnosisContext, rank: int, waits: LongestWaits, freed_at: float
) -> float:
    """How long other ranks are known to have waited for ``rank`` since ``freed_at``, without the
    time in which it was, or may have been, blocked itself.
    """
    process = context.attempt.processes.get(rank)
    if rank in context.graph.newly_released_ranks:
        return 0.0
    if process is not None and _has_stale_completions(context, process):
        return 0.0
    if rank in context.graph.silent_ranks:
        known_until = context.now
    else:
        known_until = get_state_known_until(context, rank)
    if known_until <= waits.began_at:
        return 0.0
    earliest = get_accountable_since(context, rank, freed_at)
    blocked_from, blocked_until = process.blocked_interval if process is not None else (0.0, 0.0)
    longest_s = 0.0
    for wait_known_until, began_at in waits.known_intervals:
        first = max(earliest, began_at)
        last = min(known_until, wait_known_until)
        blocked_s = max(0.0, min(blocked_until, last) - max(blocked_from, first))
        longest_s = max(longest_s, last - first - blocked_s)
    return longest_s


def get_last_entered_at(context: DiagnosisContext, rank: int, waits: LongestWaits) -> float:
    """When the last rank entered a call in which others wait for ``rank``. It may only just have, and
    not count as waiting yet.
    """
    last_entered_at = waits.last_began_at
    for blocked in waits.blocked_calls:
        members = context.streams_by_group.get(blocked.stream.group.key, {})
        for stream in members.values():
            if stream.entered == blocked.stream.entered:
                last_entered_at = max(last_entered_at, stream.entered_at)
    return last_entered_at


def get_accountable_since(context: DiagnosisContext, rank: int, began_at: float) -> float:
    """The time since which a wait that began at ``began_at`` can be attributed to ``rank``."""
    silence = context.graph.silent_ranks.get(rank)
    if silence is not None:
        return max(began_at, silence.last_alive_at)
    if rank in context.attempt.processes:
        return began_at
    return max(began_at, context.attempt.opened_at)


def _has_stale_completions(context: DiagnosisContext, process: Process) -> bool:
    """Whether completions of calls made long ago were reported just now, as after a time without
    heartbeats from its host.

    Then it is not known when it completed them, nor yet whether it is blocked in its newest call.
    """
    made_long_ago = context.now - process.newest_call_at >= context.limits.stall_after_s / 2
    return made_long_ago and any(
        context.now - stream.last_completion_at < MIN_WAIT_S for stream in process.streams.values()
    )
