"""Decides whether an attempt needs a diagnosis at all, from what heartbeats changed, without a loop
over all ranks.
"""

from __future__ import annotations

from hangwatch.tracking.attempt import Attempt


def is_quiet(attempt: Attempt) -> bool:
    """Whether a full diagnosis would find nothing due and request no evidence."""
    return (
        not attempt.suspects
        and not attempt.diverged_groups
        and attempt.checks.is_quiet
        and not attempt.list_outside_waits()
    )
