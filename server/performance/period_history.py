"""How one operation of a group performed over time, in periods of equal length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
class PeriodHistory:
    """The last periods of one operation in a group. Call `close_period` before adding to it."""

    closed_points: deque[PeriodPoint] = field(default_factory=lambda: deque(maxlen=MAX_PERIODS))
    _started_at: float = 0.0
    _calls: int = 0
    _latency: DurationHistogram = field(default_factory=DurationHistogram)
    _spread: DurationHistogram = field(default_factory=DurationHistogram)

    def close_period(self, now: float) -> None:
        """Closes the current period if it has ended."""
        started_at = now - now % PERIOD_S
        if started_at <= self._started_at:
            return
        point = self._build_current_point()
        if point is not None:
            self.closed_points.append(point)
        self._started_at = started_at
        self._calls = 0
        self._latency = DurationHistogram()
        self._spread = DurationHistogram()

    def add_calls(self, calls: int, latency: Sequence[tuple[int, int]], longest_us: float) -> None:
        self._calls += calls
        self._latency.merge_counts(latency, longest_us)

    def add_spread(self, spread_s: float) -> None:
        self._spread.add_duration(spread_s * 1e6)

    def list_points(self) -> list[PeriodPoint]:
        """The periods in order, including the current one."""
        points = list(self.closed_points)
        current = self._build_current_point()
        if current is not None:
            points.append(current)
        return points

    def _build_current_point(self) -> PeriodPoint | None:
        if not self._calls and not self._spread.total_count:
            return None
        return PeriodPoint(
            started_at=self._started_at,
            calls=self._calls,
            latency_p50_p95=_compute_quantiles(self._latency),
            spread_p50_p95=_compute_quantiles(self._spread),
        )


def _compute_quantiles(durations: DurationHistogram) -> tuple[float, float] | None:
    p50, p95 = durations.quantile(0.5), durations.quantile(0.95)
    return None if p50 is None or p95 is None else (p50, p95)
