"""The content of /performance, computed once for all viewers: the groups of an attempt, those
that wait longest for a straggler first, and their plots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hangwatch.performance.stragglers import format_duration
from hangwatch.tracking.attempt import Attempt

from ..performance.period_history import PERIOD_S, PeriodPoint
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPlots:
    """The plots of one operation of a group."""

    op: str
    plots: tuple[Plot, ...]


def build_operation_plots(ranked_group: RankedGroup) -> list[OperationPlots]:
    """The plots of each operation whose calls have latencies or arrival spreads."""
    operations = []
    for op, history in ranked_group.totals.histories.items():
        points = history.list_points()
        plots = [
            plot
            for title, pairs in (
                ("latency", [(p.started_at, p.latency_p50_p95) for p in points]),
                ("arrival spread", [(p.started_at, p.spread_p50_p95) for p in points]),
            )
            if (plot := _build_plot(title, pairs, points)) is not None
        ]
        if plots:
            operations.append(OperationPlots(op=op, plots=tuple(plots)))
    return operations


def _build_plot(
    title: str,
    pairs: Sequence[tuple[float, tuple[float, float] | None]],
    points: Sequence[PeriodPoint],
) -> Plot | None:
    plotted = [(at, pair) for at, pair in pairs if pair is not None]
    if not plotted:
        return None
    begin, end = points[0].started_at, points[-1].started_at
    span = max(PERIOD_S, end - begin)
    longest = max(1e-6, *(p95 for _, (_, p95) in plotted))
    lines = tuple(
        _build_line(
            name,
            [
                (
                    (at - begin) / span * PLOT_WIDTH_PX,
                    TOP_MARGIN_PX
                    + (1 - pair[which] / longest)
                    * (PLOT_HEIGHT_PX - TOP_MARGIN_PX - BOTTOM_MARGIN_PX),
                )
                for at, pair in plotted
            ],
            span,
        )
        for which, name in ((1, "p95"), (0, "p50"))
    )
    return Plot(title=title, max_s=longest, span_s=span, lines=lines)


def _build_line(name: str, points: Sequence[tuple[float, float]], span: float) -> PlotLine:
    """A line that is interrupted at periods without calls."""
    step = 1.5 * PERIOD_S / span * PLOT_WIDTH_PX
    runs: list[list[tuple[float, float]]] = []
    for place in points:
        if runs and place[0] - runs[-1][-1][0] <= step:
            runs[-1].append(place)
        else:
            runs.append([place])
    path = " ".join(
        "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs if len(run) > 1
    )
    return PlotLine(
        name=name,
        path=path,
        dots=tuple((round(run[0][0], 1), round(run[0][1], 1)) for run in runs if len(run) == 1),
    )
