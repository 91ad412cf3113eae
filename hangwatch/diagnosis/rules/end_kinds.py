"""The kind of verdict that fits the end of a wait chain: what the rank is doing instead of entering
the call in which others wait.
"""

from __future__ import annotations

from hangwatch.diagnosis.context import DiagnosisContext, get_state_known_until
from hangwatch.diagnosis.graph.progress import (
    find_working_threads,
    is_progressing,
    is_waiting_for_rank,
)
from hangwatch.diagnosis.graph.waits import is_not_initialized
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.tracking.process import Process

from .end_waits import LongestWaits

# Of several ends of one chain, those of the first kind are the cause.
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

    Of ranks any one of which would suffice, only those that are closest to entering the call are
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
    if _never_initialized(process, rank, waits):
        return VerdictKind.STARTUP_STALL
    if is_in_phase(context, process):
        return VerdictKind.SLOW_RANK
    within_slow_limit = context.now - waits.began_at < context.limits.slow_limit_s
    if within_slow_limit and is_working(context, rank, waits.began_at):
        return VerdictKind.SLOW_RANK
    return VerdictKind.MISSING_RANK


def _never_initialized(process: Process, rank: int, waits: LongestWaits) -> bool:
    """Whether ranks wait for its first set-up call, and it has made none."""
    if not any(blocked.awaited[rank] == 1 for blocked in waits.setup_calls):
        return False
    return all(stream.kind is not StreamKind.SETUP for stream in process.streams.values())


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
    """Whether it is in a phase that it declared, within the phase's time limit."""
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
