"""When a wait becomes a verdict, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

# Node agents and the server go by the same.
STANDING = 1.0  # seconds: a younger wait is everyday life


STOPPED = frozenset("Tt")


STILL = STOPPED | {"D"}  # states in which a thread runs nothing


FROZEN_AFTER = 3.0  # seconds


@dataclass(slots=True, kw_only=True)
class Limits:
    """When a wait becomes a verdict, in seconds. One place for what the server's settings and the diagnosis share."""

    stall_after: float = 60.0
    slow_limit: float = 360.0
    settle: float = 1.5  # after a first death, others' last words may still be on their way
    heard_every: float = 0.5  # of a host; the more of them there are the longer, so that one server can hear them all

    @property
    def lost_after(self) -> float:
        """Without a word from a node agent, when what it said before is no longer taken for the present."""
        return max(min(10.0, self.stall_after / 2), 2 * self.heard_every)
