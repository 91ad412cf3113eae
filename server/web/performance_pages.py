"""How calls perform: ``GET /api/v1/performance`` and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from hangwatch.model.ranks import format_ranks
from hangwatch.tracking.attempt import Attempt

from ..core import schema
from ..http.api import JobName
from ..http.app_state import AppState
from ..http.listing import PageCursor, PageLimit, build_page
from ..http.performance_board import (
    PLOT_HEIGHT_PX,
    PLOT_WIDTH_PX,
    build_operation_plots,
    get_ranked_groups,
)
from ..http.rendering import make_linker, wants_json
from ..performance import views as views
from .pages import PageNumber, choose_attempt, compute_page_bounds, serve_page

GROUPS_PER_PAGE = 8  # on one page

GroupQuery = Annotated[
    str, Query(max_length=256, description="only groups of this name or description")
]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter()

    def list_groups(
        request: Request, job: str | None, group: str, limit: int, after: str | None
    ) -> schema.Page[views.GroupPerformance]:
        rows = [
            (attempt, standing)
            for attempt in live.find_attempts(job)
            for standing in get_ranked_groups(live, attempt)
            if _matches_group(standing, group)
        ]
        date = live.watch.clock.date

        def make_cursor(row: tuple[Attempt, views.RankedGroup]) -> str:
            its, (generation, name, ranks, world) = row[0], row[1][0].group.key
            return f"{its.job}/{its.number}/{generation}/{name}/{format_ranks(ranks[:1])}/{world}"

        return build_page(
            request, rows, make_cursor, lambda row: views.describe_group(*row, date), limit, after
        )

    @routes.get(
        "/api/v1/performance",
        tags=["performance"],
        summary=(
            "Calls, latency, bandwidth and arrivals by process group; first those that wait longest"
            " for one rank"
        ),
    )
    async def performance(
        request: Request,
        job: JobName = None,
        group: GroupQuery = "",
        limit: PageLimit = 100,
        after: PageCursor = None,
    ) -> schema.Page[views.GroupPerformance]:
        return list_groups(request, job, group, limit, after)

    @routes.get("/performance", include_in_schema=False)
    async def show_performance(
        request: Request,
        job: str = "",
        group: GroupQuery = "",
        page: PageNumber = 1,
        limit: PageLimit = 100,
        after: PageCursor = None,
    ) -> Response:
        if wants_json(request):
            return JSONResponse(
                list_groups(request, job or None, group, limit, after).model_dump(mode="json")
            )
        link = make_linker(request)
        return serve_page(
            live,
            request,
            "performance.html",
            lambda: {**_build_values(live, job, group, page), "link": link},
        )

    return routes


def _matches_group(ranked_group: views.RankedGroup, group: str) -> bool:
    return not group or group in (ranked_group[0].group.name, ranked_group[0].group.desc)


def _build_values(live: AppState, job: str, group: str, number: int) -> Mapping[str, Any]:
    attempt = choose_attempt(live, job, None)
    if attempt is None:
        return {"job": None}
    all_groups = get_ranked_groups(live, attempt)
    shown_groups = [standing for standing in all_groups if _matches_group(standing, group)]
    bounds = compute_page_bounds(len(shown_groups), number, GROUPS_PER_PAGE)
    date = live.watch.clock.date
    return {
        "job": attempt.job,
        "attempt": attempt.number,
        "jobs": [a.job for a in live.list_latest_attempts()],
        "stragglers": views.list_stragglers(all_groups),
        "compared": sum(s[0].compared for s in all_groups),
        "left_out": live.watch.performance.of(attempt).left_out,
        "only": group,
        "at": bounds,
        "groups": [
            (views.describe_group(attempt, s, date), build_operation_plots(s))
            for s in shown_groups[bounds["start"] : bounds["end"]]
        ],
        "size": (PLOT_WIDTH_PX, PLOT_HEIGHT_PX),
    }
