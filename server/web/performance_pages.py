"""How calls perform: ``GET /api/v1/performance`` and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ..http.api import JobName, Page, PageOf100, PageRequest, make_group_cursor
from ..http.app_state import AppState
from ..http.performance_board import (
    PLOT_HEIGHT_PX,
    PLOT_WIDTH_PX,
    build_plots,
    get_ranked_groups,
)
from ..http.rendering import wants_json
from ..performance.views import (
    GroupPerformance,
    RankedGroup,
    describe_group_performance,
    list_stragglers,
)
from .serving import PageNumber, choose_attempt, serve_page, slice_page

GROUPS_PER_PAGE = 8

GroupQuery = Annotated[
    str, Query(max_length=256, description="only groups with this name or description")
]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter()

    @routes.get(
        "/api/v1/performance",
        name="performance",
        tags=["performance"],
        summary=(
            "Calls, latency, bandwidth and arrivals by process group; first the groups that wait"
            " longest for a straggler"
        ),
        response_model=Page[GroupPerformance],
    )
    async def get_performance(
        listed: PageOf100, job: JobName = None, group: GroupQuery = ""
    ) -> Response:
        return _list_groups(live, listed, job, group)

    @routes.get("/performance", include_in_schema=False)
    async def show_performance(
        request: Request,
        listed: PageOf100,
        job: str = "",
        group: GroupQuery = "",
        page: PageNumber = 1,
    ) -> Response:
        if wants_json(request):
            return _list_groups(live, listed, job or None, group)
        return serve_page(
            live, request, "performance.html", lambda: _build_page_values(live, job, group, page)
        )

    return routes


def _list_groups(live: AppState, listed: PageRequest, job: str | None, group: str) -> Response:
    rows = [
        (attempt, ranked)
        for attempt in live.find_attempts(job)
        for ranked in get_ranked_groups(live, attempt)
        if _matches_group(ranked, group)
    ]
    to_date = live.watch.clock.date
    return listed.make_response(
        rows,
        lambda row: make_group_cursor(row[0], row[1].totals.group.key),
        lambda row: describe_group_performance(*row, to_date).model_dump(mode="json"),
    )


def _matches_group(ranked: RankedGroup, group: str) -> bool:
    return not group or group in (ranked.totals.group.name, ranked.totals.group.desc)


def _build_page_values(live: AppState, job: str, group: str, page: int) -> Mapping[str, Any]:
    attempt = choose_attempt(live, job, None)
    if attempt is None:
        return {"job": None}
    all_groups = get_ranked_groups(live, attempt)
    matching = [ranked for ranked in all_groups if _matches_group(ranked, group)]
    shown = slice_page(matching, page, GROUPS_PER_PAGE)
    to_date = live.watch.clock.date
    return {
        "job": attempt.job,
        "attempt": attempt.number,
        "jobs": [a.job for a in live.list_latest_attempts()],
        "stragglers": list_stragglers(all_groups),
        "compared": sum(ranked.totals.arrivals.compared_calls for ranked in all_groups),
        "ignored_reports": live.watch.performance.get_job(attempt).ignored_reports,
        "group_filter": group,
        "shown": shown,
        "groups": [
            (describe_group_performance(attempt, ranked, to_date), build_plots(ranked))
            for ranked in shown.rows
        ],
        "plot_width": PLOT_WIDTH_PX,
        "plot_height": PLOT_HEIGHT_PX,
    }
