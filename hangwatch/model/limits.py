"""The times, in seconds, that decide when a wait becomes a verdict."""

from __future__ import annotations

from dataclasses import dataclass

# Shared by node agents and the server.
MIN_WAIT_S = 1.0  # shorter waits are normal
FROZEN_AFTER_S = 3.0  # a process that runs no Python for this long is frozen

# Training rounds in a row with an overflow, after which it counts as persistent under loss scaling. Each
# of them halves the initial scale of 2**16, so that it has reached 2**-8 by then.
PERSISTENT_ROUNDS = 24

LATE_BY_S = 5.0  # the most that a heartbeat of a host that reports rarely may be late

# Process states in /proc: stopped, and all in which a thread does not run.
STOPPED_STATES = frozenset("Tt")
NOT_RUNNING_STATES = STOPPED_STATES | {"D"}


@dataclass(slots=True, kw_only=True)
class Limits:
    """The time limits, in seconds, that the server's settings and the diagnosis share."""

    stall_after_s: float = 60.0
    slow_limit_s: float = 360.0
    startup_after_s: float = 300.0  # how long ranks may take to start before it is an alert
    # After a first death, the last reports of other ranks may be in transit for this long.
    settle_s: float = 1.5
    # The time between two heartbeats of a host. It grows with the number of hosts, to bound the
    # server's load.
    report_interval_s: float = 0.5

    @property
    def lost_after_s(self) -> float:
        """The time without a heartbeat after which a node agent's last report is outdated."""
        late_at_s = self.report_interval_s + min(self.report_interval_s, LATE_BY_S)
        return max(min(10.0, self.stall_after_s / 2), late_at_s)
