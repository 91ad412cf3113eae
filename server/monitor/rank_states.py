"""The state of each rank, as the pages and the API show it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hangwatch.diagnosis.graph.thread_waits import is_process_waiting
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import KINDS
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Lifecycle, RankState
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..incidents.matching import is_hang
from ..incidents.records import IncidentRecord

WAITING_AFTER_S = 1.0  # in an unfinished call
LOST_AFTER_S = Limits().lost_after_s
MAX_RANKS_SHOWN = 1 << 20  # whatever world size was reported


def list_expected_ranks(attempt: Attempt) -> list[int]:
    """Every rank of the world, and others that have reported, ascending."""
    world = range(min(attempt.world_size, MAX_RANKS_SHOWN))
    return [*world, *sorted(rank for rank in attempt.processes if rank not in world)]


def compute_states(
    attempt: Attempt,
    cases: Iterable[IncidentRecord],
    now: float,
    lost_after_s: float = LOST_AFTER_S,
) -> dict[int, RankState]:
    """The state of each expected rank. ``cases`` are the attempt's open incidents; a rank is lost
    after ``lost_after_s`` without a heartbeat.
    """
    states = dict.fromkeys(list_expected_ranks(attempt), RankState.MISSING)
    return states | _compute_reported_states(attempt, cases, now, lost_after_s)


def count_states(
    attempt: Attempt,
    cases: Iterable[IncidentRecord],
    now: float,
    lost_after_s: float = LOST_AFTER_S,
) -> Counter[RankState]:
    """How many of the expected ranks are in each state. Takes time only for reported ranks."""
    counts = Counter(_compute_reported_states(attempt, cases, now, lost_after_s).values())
    reported = sum(rank < attempt.world_size for rank in attempt.processes)
    missing = min(attempt.world_size, MAX_RANKS_SHOWN) - reported
    if missing:
        counts[RankState.MISSING] = missing
    return counts


def _compute_reported_states(
    attempt: Attempt, cases: Iterable[IncidentRecord], now: float, lost_after_s: float
) -> dict[int, RankState]:
    stalled: set[int] = set()
    slow: set[int] = set()
    frozen: set[int] = set()
    for case in cases:
        incident = case.incident
        culprit_state = KINDS[incident.kind].culprit_state
        if culprit_state is RankState.FROZEN:
            frozen.update(incident.culprits)
        if incident.severity is Severity.ALERT and is_hang(incident):
            stalled.update(incident.culprits, incident.waiting)
        elif culprit_state is RankState.SLOW:
            slow.update(incident.culprits)
    states = {
        **dict.fromkeys(slow, RankState.SLOW),
        **dict.fromkeys(stalled, RankState.STALLED),
        **dict.fromkeys(frozen, RankState.FROZEN),
    }
    for rank in attempt.unable_ranks:
        state = _find_unable_state(attempt.processes[rank], now)
        if state is not None:
            states[rank] = state
    states.update(dict.fromkeys(attempt.list_unreported(now - lost_after_s), RankState.LOST))
    return {
        rank: states.get(rank) or _compute_usual_state(process, now)
        for rank, process in attempt.processes.items()
    }


def _find_unable_state(process: Process, now: float) -> RankState | None:
    """The state of a process that has exited or is frozen; None for others."""
    if process.exit is not None:
        exited_cleanly = process.exit.exit_status == 0 or process.lifecycle >= Lifecycle.DESTROYED
        return (
            RankState.EXITED if exited_cleanly and not process.exit.has_failed else RankState.DEAD
        )
    return RankState.FROZEN if process.freeze_reason(now) is not None else None


def _compute_usual_state(process: Process, now: float) -> RankState:
    if process.lifecycle < Lifecycle.INITIALISED:
        return RankState.STARTING
    waiting_s = compute_waiting_s(process, now) or 0.0
    return RankState.WAITING if waiting_s > WAITING_AFTER_S else RankState.RUNNING


def compute_waiting_s(process: Process, now: float) -> float | None:
    """Seconds since the process entered its oldest unfinished call, or its newest one if none is
    known to block it. None if all are finished, or if it is busy with other work and no call blocks
    it.
    """
    unfinished = process.open_calls.unfinished_streams
    if not unfinished or process.exit is not None:
        return None
    if process.reports.last_progress_at > process.reports.last_seen_at:
        return None
    oldest_at: float | None = None
    for stream in unfinished:  # of thousands of ranks, four times a second
        pending_at = stream.pending_at
        if pending_at is not None and (oldest_at is None or pending_at < oldest_at):
            oldest_at = pending_at
    if oldest_at is None:
        return None
    if _is_free_to_continue(process):
        if is_process_waiting(process) is False:
            return None
        oldest_at = max(oldest_at, process.newest_call_at)  # until then it did continue
    return max(0.0, now - oldest_at)


def _is_free_to_continue(process: Process) -> bool:
    """Whether its unfinished calls are known, and none is known to block it. An ``isend`` stays
    unfinished unless the program waits for it.
    """
    oldest = (
        stream.calls.get(stream.first_unfinished)
        for stream in process.open_calls.unfinished_streams
        if stream.pending_at is not None
    )
    return all(call is not None and call.blocking is not True for call in oldest)
