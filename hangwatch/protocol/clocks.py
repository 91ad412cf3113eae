"""Estimates the offset between the local clock and that of another host. Pure.

A message is sent at ``sent_at`` on the local clock and received at ``remote_at`` on the remote one;
its reply arrives at ``returned_at`` on the local clock. Then the offset lies between
``remote_at - returned_at`` and ``remote_at - sent_at``. The tightest bounds of many exchanges are
kept, as in Cristian, "Probabilistic clock synchronization" (1989) and in NTP's clock filter (RFC
5905, 10), and widened by the clocks' possible drift since.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds per second between two clocks: twice the error of a bad crystal.
MAX_CLOCK_DRIFT = 2e-4


@dataclass(slots=True)
class ClockOffset:
    """Bounds on how many seconds the remote clock is ahead of the local one."""

    low_s: float = 0.0
    high_s: float = 0.0
    updated_at: float | None = None  # the last exchange, on the local clock

    @property
    def bounds(self) -> tuple[float, float] | None:
        """(low, high) in seconds; None before the first exchange."""
        return None if self.updated_at is None else (self.low_s, self.high_s)

    def add_exchange(self, sent_at: float, remote_at: float, returned_at: float) -> None:
        """Tightens the bounds by one exchange; see the module for the arguments."""
        low, high = remote_at - returned_at, remote_at - sent_at
        if self.updated_at is not None:
            drift = MAX_CLOCK_DRIFT * max(0.0, returned_at - self.updated_at)
            combined_low = max(low, self.low_s - drift)
            combined_high = min(high, self.high_s + drift)
            # Disjoint bounds mean a different clock: the server moved or its host rebooted.
            if combined_low <= combined_high:
                low, high = combined_low, combined_high
        self.low_s, self.high_s, self.updated_at = low, high, returned_at
