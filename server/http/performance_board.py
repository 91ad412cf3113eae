"""The content of /performance, computed once for all viewers: the groups of an attempt, those
that wait longest for a straggler first, and their plots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hangwatch.performance.stragglers import format_duration
from hangwatch.tracking.attempt import Attempt

from ..performance.totals import PERIOD_S, PeriodPoint
from ..performance.views import RankedGroup, rank_groups
from .app_state import AppState

PLOT_WIDTH_PX, PLOT_HEIGHT_PX = 360, 84
TOP_MARGIN_PX, BOTTOM_MARGIN_PX = 6, 4  # above and below the lines


def get_ranked_groups(live: AppState, attempt: Attempt) -> list[RankedGroup]:
    return live.cache.get_or_compute(
        ("performance", attempt.key),
        lambda: rank_groups(live.watch.performance.get_job(attempt)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    name: str
    path: str
    dots: tuple[tuple[float, float], ...]  # points without a neighbour


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A duration over time: from 0 to ``max_s`` seconds, over the last ``span_s`` seconds."""

    op: str
    title: str
    max_s: float
    span_s: float
    lines: tuple[PlotLine, ...]

    @property
    def summary(self) -> str:
        """The alternative text for screen readers."""
        return (
            f"{self.title} over the last {format_duration(self.span_s)}, up to"
            f" {format_duration(self.max_s)}"
        )


def build_plots(ranked_group: RankedGroup) -> list[Plot]:
    """The latencies and the arrival spreads of each operation that has some."""
    plots: list[Plot] = []
    for op, history in ranked_group.totals.histories.items():
        points = history.list_points()
        for title, quantiles in (
            ("latency", [point.latency_p50_p95 for point in points]),
            ("arrival spread", [point.spread_p50_p95 for point in points]),
        ):
            if any(quantiles):
                plots.append(_build_plot(op, title, points, quantiles))
    return plots


def _build_plot(
    op: str,
    title: str,
    points: Sequence[PeriodPoint],
    quantiles: Sequence[tuple[float, float] | None],
) -> Plot:
    """``quantiles`` are the p50 and p95 of each point, of at least one of them."""
    begin = points[0].started_at
    span_s = max(PERIOD_S, points[-1].started_at - begin)
    max_s = max(1e-6, *(pair[1] for pair in quantiles if pair is not None))
    height = PLOT_HEIGHT_PX - TOP_MARGIN_PX - BOTTOM_MARGIN_PX

    def build_line(name: str, index: int) -> PlotLine:
        places = [
            (
                (point.started_at - begin) / span_s * PLOT_WIDTH_PX,
                TOP_MARGIN_PX + (1 - pair[index] / max_s) * height,
            )
            for point, pair in zip(points, quantiles, strict=True)
            if pair is not None
        ]
        return _connect_places(name, places, max_gap=1.5 * PERIOD_S / span_s * PLOT_WIDTH_PX)

    lines = (build_line("p95", 1), build_line("p50", 0))
    return Plot(op=op, title=title, max_s=max_s, span_s=span_s, lines=lines)


def _connect_places(name: str, places: Sequence[tuple[float, float]], max_gap: float) -> PlotLine:
    """A line that is interrupted at periods without calls."""
    runs: list[list[tuple[float, float]]] = []
    for place in places:
        if runs and place[0] - runs[-1][-1][0] <= max_gap:
            runs[-1].append(place)
        else:
            runs.append([place])
    path = " ".join(
        "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs if len(run) > 1
    )
    dots = tuple((round(run[0][0], 1), round(run[0][1], 1)) for run in runs if len(run) == 1)
    return PlotLine(name=name, path=path, dots=dots)
