"""What is known of a node agent. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import MAX_CLOCK_DRIFT

from .tracked_process import TrackedProcess

# A node agent gives a heartbeat up much earlier, so a larger gap is a jump of its clock.
MAX_DELAY_S = 120.0

ProcessLocation = tuple[str, str]  # (host, process key)


@dataclass(slots=True)
class ReportingAgent:
    """A node agent with the processes that it reports."""

    processes: dict[ProcessLocation, TrackedProcess] = field(default_factory=dict)
    last_number: int = 0  # of its heartbeats
    # The smallest difference seen between the time of receipt and the agent's clock, and when.
    _smallest_gap: tuple[float, float] | None = None

    def estimate_sent_at(self, beat: heartbeat.Heartbeat, received_at: float) -> float:
        """When a heartbeat was sent, on the server's clock.

        The agent's fastest heartbeat so far is taken to have had no delay; any larger gap between
        the clocks, beyond their possible drift, is the delay of this one. After a jump of the agent's
        clock, as when its machine was suspended, this starts again.
        """
        if beat.sent_s is None:
            return received_at
        gap = received_at - beat.sent_s
        smallest, updated_at = self._smallest_gap or (gap, received_at)
        if abs(gap - smallest) > MAX_DELAY_S:
            smallest = gap
        smallest = min(gap, smallest + MAX_CLOCK_DRIFT * (received_at - updated_at))
        self._smallest_gap = smallest, received_at
        return beat.sent_s + smallest
