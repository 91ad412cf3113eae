"""How far another host's clock is from one's own, by what is sent there and back. Pure.

A message that leaves at `sent` on one clock and is taken at `there` on the other, and its answer,
which is back at `back`, bound the difference: there - back < difference < there - sent. The best of
many exchanges is kept on either side, as in Cristian, "Probabilistic clock synchronization" (1989)
and in NTP's clock filter (RFC 5905, 10), and loosened by what the clocks may have drifted since.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CLOCK_DRIFT = 2e-4  # of one clock from another's: twice what a bad crystal has


@dataclass(slots=True)
class ClockOffset:
    """By how many seconds the other clock is ahead: between `low` and `high`."""

    low_s: float = 0.0
    high_s: float = 0.0
    updated_at: float | None = None  # the last exchange, on one's own clock

    @property
    def bounds(self) -> tuple[float, float] | None:
        """None before the first exchange."""
        return None if self.updated_at is None else (self.low_s, self.high_s)

    def add_exchange(self, sent_at: float, remote_at: float, returned_at: float) -> None:
        low, high = remote_at - returned_at, remote_at - sent_at
        if self.updated_at is not None:
            loose = MAX_CLOCK_DRIFT * max(0.0, returned_at - self.updated_at)
            kept = max(low, self.low_s - loose), min(high, self.high_s + loose)
            if (
                kept[0] <= kept[1]
                # else it is not the clock that it was: the server runs elsewhere now, or has
                # restarted
            ):
                low, high = kept
        self.low_s, self.high_s, self.updated_at = low, high, returned_at
