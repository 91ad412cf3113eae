"""Requests the stacks that show whether a busy rank waits for its device, in which its host may spin."""

from __future__ import annotations

from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_suspicion_delay_s,
    request_stacks,
)


def sample_busy_ranks(context: DiagnosisContext) -> None:
    """Requests a stack of some of the ranks that may have waited for longer than the suspicion delay.

    Makes no verdict. A rank whose stack shows that it waits is part of the next wait-for graph.
    """
    delay_s = get_suspicion_delay_s(context.limits)
    unsampled = context.graph.unsampled_ranks
    overdue = {
        rank: began_at for rank, began_at in unsampled.items() if context.now - began_at >= delay_s
    }
    if overdue:
        request_stacks(context, (), overdue, min(overdue.values()))
