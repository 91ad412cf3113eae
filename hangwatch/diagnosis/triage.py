"""Whether there is anything to diagnose at all: known from what heartbeats changed, at no cost for
all the ranks that are well.
"""

from __future__ import annotations

from hangwatch.tracking.attempt import Attempt


def is_quiet(attempt: Attempt) -> bool:
    """A full diagnosis would find nothing that is due, and ask for nothing: by everybody's last
    word, all is well.
    """
    return not attempt.suspects and not attempt.diverged_groups and attempt.checks.is_quiet
