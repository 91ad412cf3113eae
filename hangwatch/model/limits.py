"""When a wait becomes a verdict, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

# Node agents and the server go by the same.
MIN_WAIT_S = 1.0  # seconds: a younger wait is everyday life


STOPPED_STATES = frozenset("Tt")


NOT_RUNNING_STATES = STOPPED_STATES | {"D"}  # states in which a thread runs nothing


FROZEN_AFTER_S = 3.0  # seconds


@dataclass(slots=True, kw_only=True)
class Limits:
    """When a wait becomes a verdict, in seconds. One place for what the server's settings and the
    diagnosis share.
    """

    stall_after_s: float = 60.0
    slow_limit_s: float = 360.0
    settle_s: float = 1.5  # after a first death, others' last words may still be on their way
    # of a host; the more of them there are the longer, so that one server can hear them all
    report_interval_s: float = 0.5

    @property
    def lost_after_s(self) -> float:
        """Without a word from a node agent, when what it said before is no longer taken for the
        present.
        """
        return max(min(10.0, self.stall_after_s / 2), 2 * self.report_interval_s)
