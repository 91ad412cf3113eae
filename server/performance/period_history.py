"""How one operation of a group performed over time, in periods of equal length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hangwatch.performance.distributions import DurationHistogram

PERIOD_S = 10.0
MAX_PERIODS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodPoint:
    """One period. Quantiles are in seconds, and None where nothing was measured."""

    started_at: float
    calls: int
    latency_p50_p95: tuple[float, float] | None
    spread_p50_p95: tuple[float, float] | None


@dataclass(slots=True)
class PeriodTotals:
    """The calls and arrival spreads of one period."""

    started_at: float = 0.0
    calls: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)
    spread: DurationHistogram = field(default_factory=DurationHistogram)

    def list_points(self) -> list[PeriodPoint]:
        """Its point; none if nothing was measured."""
        if not self.calls and not self.spread.total_count:
            return []
        return [
            PeriodPoint(
                started_at=self.started_at,
                calls=self.calls,
                latency_p50_p95=compute_p50_p95(self.latency),
                spread_p50_p95=compute_p50_p95(self.spread),
            )
        ]


@dataclass(slots=True)
class PeriodHistory:
    """The last periods of one operation in a group."""

    closed_points: deque[PeriodPoint] = field(default_factory=lambda: deque(maxlen=MAX_PERIODS))
    _current: PeriodTotals = field(default_factory=PeriodTotals)

    def get_current(self, now: float) -> PeriodTotals:
        """The current period: a new one if the last one has ended."""
        started_at = now - now % PERIOD_S
        if started_at > self._current.started_at:
            self.closed_points += self._current.list_points()
            self._current = PeriodTotals(started_at)
        return self._current

    def list_points(self) -> list[PeriodPoint]:
        """The periods in order, including the current one."""
        return [*self.closed_points, *self._current.list_points()]


def compute_p50_p95(durations: DurationHistogram) -> tuple[float, float] | None:
    """In seconds; None for an empty histogram."""
    p50, p95 = durations.quantile(0.5), durations.quantile(0.95)
    return None if p50 is None or p95 is None else (p50, p95)
