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
from ..http.app_state import Live
from ..http.listing import After, Limit, part
from ..http.performance_board import HEIGHT, WIDTH, pictures, ranked
from ..http.rendering import linker, wants_json
from ..performance import views as views
from .pages import Number, meant, paged, shown

GROUPS = 8  # on one page

Wanted = Annotated[
    str, Query(max_length=256, description="only groups of this name or description")
]


def router(live: Live) -> APIRouter:
    routes = APIRouter()

    def listed(
        request: Request, job: str | None, group: str, limit: int, after: str | None
    ) -> schema.Page[views.Group]:
        rows = [
            (attempt, standing)
            for attempt in live.attempts(job)
            for standing in ranked(live, attempt)
            if _is(standing, group)
        ]
        date = live.watch.clock.date

        def name(row: tuple[Attempt, views.Standing]) -> str:
            its, (generation, name, ranks, world) = row[0], row[1][0].group.key
            return f"{its.job}/{its.number}/{generation}/{name}/{format_ranks(ranks[:1])}/{world}"

        return part(request, rows, name, lambda row: views.group(*row, date), limit, after)

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
        group: Wanted = "",
        limit: Limit = 100,
        after: After = None,
    ) -> schema.Page[views.Group]:
        return listed(request, job, group, limit, after)

    @routes.get("/performance", include_in_schema=False)
    async def page(
        request: Request,
        job: str = "",
        group: Wanted = "",
        page: Number = 1,
        limit: Limit = 100,
        after: After = None,
    ) -> Response:
        if wants_json(request):
            return JSONResponse(
                listed(request, job or None, group, limit, after).model_dump(mode="json")
            )
        link = linker(request)
        return shown(
            live,
            request,
            "performance.html",
            lambda: {**_values(live, job, group, page), "link": link},
        )

    return routes


def _is(standing: views.Standing, wanted: str) -> bool:
    return not wanted or wanted in (standing[0].group.name, standing[0].group.desc)


def _values(live: Live, job: str, group: str, number: int) -> Mapping[str, Any]:
    attempt = meant(live, job, None)
    if attempt is None:
        return {"job": None}
    everything = ranked(live, attempt)
    mine = [standing for standing in everything if _is(standing, group)]
    at = paged(len(mine), number, GROUPS)
    date = live.watch.clock.date
    return {
        "job": attempt.job,
        "attempt": attempt.number,
        "jobs": [a.job for a in live.jobs()],
        "stragglers": views.stragglers(everything),
        "compared": sum(s[0].compared for s in everything),
        "left_out": live.watch.performance.of(attempt).left_out,
        "only": group,
        "at": at,
        "groups": [
            (views.group(attempt, s, date), pictures(s)) for s in mine[at["start"] : at["end"]]
        ],
        "size": (WIDTH, HEIGHT),
    }
