"""How calls perform: ``GET /api/v1/performance``, and the page ``/performance`` with its plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ..http.api import JobName, Page, PageOf100, make_group_cursor
from ..http.app_state import AppState, State
from ..http.rendering import wants_json
from ..performance import views
from ..performance.totals import PERIOD_S, PeriodPoint
from .serving import PageNumber, choose_shown_attempt, serve_page, slice_page

GROUPS_PER_PAGE = 8
PLOT_WIDTH_PX, PLOT_HEIGHT_PX = 360, 84
TOP_MARGIN_PX, BOTTOM_MARGIN_PX = 6, 4  # the margins around the lines of a plot

GroupQuery = Annotated[
    str, Query(max_length=256, description="only groups with this name or description")
]


routes = APIRouter()


@routes.get(
    "/api/v1/performance",
    name="performance",
    tags=["performance"],
    summary=(
        "Calls, latency, bandwidth and arrivals by process group; first the groups that wait"
        " longest for a straggler"
    ),
    response_model=Page[views.GroupPerformance],
)
async def get_performance(
    state: State, listed: PageOf100, job: JobName = None, group: GroupQuery = ""
) -> Response:
    rows = [
        (attempt, ranked)
        for attempt in state.find_attempts(job)
        for ranked in state.get_ranked_groups(attempt)
        if _matches_group(ranked, group)
    ]
    to_date = state.shared.clock.date
    return listed.make_response(
        rows,
        lambda row: make_group_cursor(row[0], row[1].totals.group),
        lambda row: views.describe_group_performance(*row, to_date).model_dump(mode="json"),
    )


@routes.get("/performance", include_in_schema=False)
async def show_performance(
    state: State,
    request: Request,
    listed: PageOf100,
    job: str = "",
    group: GroupQuery = "",
    page: PageNumber = 1,
) -> Response:
    if wants_json(request):
        return await get_performance(state, listed, job or None, group)
    return serve_page(
        state, request, "performance.html", lambda: _build_page_values(state, job, group, page)
    )


def _matches_group(ranked: views.RankedGroup, group: str) -> bool:
    return not group or group in (ranked.totals.group.name, ranked.totals.group.desc)


def _build_page_values(state: AppState, job: str, group: str, page: int) -> Mapping[str, Any]:
    attempt = choose_shown_attempt(state, job, None)
    if attempt is None:
        return {"job": None}
    all_groups = state.get_ranked_groups(attempt)
    matching = [ranked for ranked in all_groups if _matches_group(ranked, group)]
    shown = slice_page(matching, page, GROUPS_PER_PAGE)
    to_date = state.shared.clock.date
    return {
        "job": attempt.job,
        "attempt": attempt.number,
        "jobs": [a.job for a in state.list_latest_attempts()],
        "stragglers": views.list_stragglers(all_groups),
        "compared": sum(ranked.totals.arrivals.compared_calls for ranked in all_groups),
        "ignored_reports": state.shared.performance.get_job(attempt).ignored_reports,
        "group_filter": group,
        "shown": shown,
        "groups": [
            (views.describe_group_performance(attempt, ranked, to_date), build_plots(ranked))
            for ranked in shown.rows
        ],
        "plot_width": PLOT_WIDTH_PX,
        "plot_height": PLOT_HEIGHT_PX,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A duration over time: from 0 to ``max_s`` seconds, over the last ``span_s`` seconds."""

    op: str
    title: str
    max_s: float
    span_s: float
    lines: Mapping[str, str]  # SVG paths by their names


def build_plots(ranked_group: views.RankedGroup) -> list[Plot]:
    """The latencies and the arrival spreads of each operation that has some."""
    plots = []
    for op, history in ranked_group.totals.histories.items():
        points = history.list_points()
        latencies = [point.latency_p50_p95 for point in points]
        if any(latencies):
            plots.append(_build_plot(op, "latency", points, latencies))
        spreads = [point.spread_p50_p95 for point in points]
        if any(spreads):
            plots.append(_build_plot(op, "arrival spread", points, spreads))
    return plots


def _build_plot(
    op: str,
    title: str,
    points: Sequence[PeriodPoint],
    quantiles: Sequence[tuple[float, float] | None],
) -> Plot:
    """``quantiles`` are the p50 and p95 of each point; at least one point has them."""
    begin = points[0].started_at
    span_s = max(PERIOD_S, points[-1].started_at - begin)
    max_s = max(1e-6, *(pair[1] for pair in quantiles if pair is not None))
    height = PLOT_HEIGHT_PX - TOP_MARGIN_PX - BOTTOM_MARGIN_PX
    max_gap = 1.5 * PERIOD_S / span_s * PLOT_WIDTH_PX
    lines = {"p95": "", "p50": ""}
    last_x = -math.inf
    for point, pair in zip(points, quantiles, strict=True):
        if pair is None:
            continue
        x = (point.started_at - begin) / span_s * PLOT_WIDTH_PX
        for name, quantile in zip(("p50", "p95"), pair, strict=True):
            y = TOP_MARGIN_PX + (1 - quantile / max_s) * height
            if x - last_x > max_gap:  # a period without calls interrupts the line
                lines[name] += f"M{x:.1f} {y:.1f}h0"  # a dot, if no line follows
            else:
                lines[name] += f"L{x:.1f} {y:.1f}"
        last_x = x
    return Plot(op=op, title=title, max_s=max_s, span_s=span_s, lines=lines)
