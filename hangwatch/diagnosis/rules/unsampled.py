"""Requests the stacks that show whether a busy rank waits for its device, in which its host may spin."""

from __future__ import annotations

from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_state_known_until,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.model.limits import MIN_WAIT_S


def sample_busy_ranks(context: DiagnosisContext) -> None:
    """Requests a stack of some of the ranks that may have waited for longer than the suspicion delay, or
    may wait for a rank that has left or is frozen.

    Makes no verdict. A rank whose stack shows that it waits is part of the next wait-for graph.
    """
    delay_s = get_suspicion_delay_s(context.limits)
    graph = context.graph
    overdue = {
        rank: began_at
        for rank, began_at in graph.unsampled_ranks.items()
        if rank not in context.explained_ranks
        and get_state_known_until(context, rank) - began_at
        >= (MIN_WAIT_S if rank in graph.unable_waiters else delay_s)
    }
    if overdue:
        request_stacks(context, (), overdue, min(overdue.values()))
