"""Estimates when a heartbeat was sent, from the times of the heartbeats before it. Pure."""

from __future__ import annotations

from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import MAX_CLOCK_DRIFT


class ClockGaps:
    """The smallest difference seen between the time of receipt and each agent's clock."""

    __slots__ = ("_smallest_gaps",)

    def __init__(self) -> None:
        # By agent: the smallest gap in seconds, and when it was updated.
        self._smallest_gaps: dict[str, tuple[float, float]] = {}

    def estimate_sent_at(self, beat: heartbeat.Heartbeat, received_at: float) -> float:
        """When a heartbeat was sent, on the server's clock.

        The agent's fastest heartbeat so far is taken to have had no delay; any larger gap between
        the clocks, beyond their possible drift, is the delay of this one.
        """
        if beat.sent_s is None:
            return received_at
        gap = received_at - beat.sent_s
        smallest, updated_at = self._smallest_gaps.get(beat.agent, (gap, received_at))
        smallest = min(gap, smallest + MAX_CLOCK_DRIFT * (received_at - updated_at))
        self._smallest_gaps[beat.agent] = (smallest, received_at)
        return beat.sent_s + smallest

    def forget_agent(self, agent: str) -> None:
        self._smallest_gaps.pop(agent, None)
