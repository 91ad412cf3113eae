"""The pages for a browser. Each has its JSON twin, and the events that keep it up to date, at the
same address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response

from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import RankState
from hangwatch.tracking.attempt import Attempt

from ..http import stream
from ..http.app_state import AppState
from ..http.listing import PageCursor, PageLimit, build_page
from ..http.performance_board import get_ranked_groups
from ..http.rendering import SERVER_DIR, make_linker, render_page, wants_events, wants_json
from ..incidents.registry import IncidentRecord
from ..monitor import views
from ..performance.views import list_stragglers
from .board import get_map_layout, get_overview
from .group_table import get_group_rows
from .incident_page import build_page_values
from .rank_table import build_row, select_ranks

RANKS_PER_PAGE, GROUPS_PER_PAGE, INCIDENTS_PER_PAGE = 50, 50, 50  # on one page
PERIODS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}

PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
TextQuery = Annotated[str, Query(max_length=500)]
SortQuery = Annotated[str, Query(pattern="^-?(rank|state|host|step|waiting|heard)$")]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    _add_rank_routes(routes, live)
    _add_incident_routes(routes, live)

    @routes.get("/")
    async def redirect_home() -> Response:
        return RedirectResponse("/ranks", status_code=307)

    return routes


def serve_page(
    live: AppState, request: Request, template: str, values: Callable[[], Mapping[str, Any]]
) -> Response:
    """The page; or the events that keep it up to date, for a page that asks for these at its own
    address.
    """
    if not wants_events(request):
        return render_page(template, **values())
    return stream.make_stream_response(
        live, stream.follow_page(live, f"{request.url.path}?{request.url.query}", template, values)
    )


def _add_rank_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get("/ranks")
    async def show_ranks(
        request: Request,
        job: str = "",
        attempt: Annotated[int | None, Query(ge=0)] = None,
        state: RankState | Literal[""] = "",
        group: str = "",
        q: TextQuery = "",
        sort: SortQuery = "rank",
        view: Literal["ranks", "groups"] = "ranks",
        by: TextQuery = "host",
        page: PageNumber = 1,
        limit: PageLimit = 100,
        after: PageCursor = None,
    ) -> Response:
        def select_shown_ranks(attempt_shown: Attempt) -> list[int]:
            return select_ranks(
                get_overview(live, attempt_shown),
                live.now(),
                state=state or None,
                group=group,
                query=q,
                sort=sort,
            )

        if wants_json(request):
            found, now = choose_attempt(live, job, attempt), live.now()
            if found is None:
                return JSONResponse({"items": [], "next": None})
            states = get_overview(live, found).states
            result_page = build_page(
                request,
                select_shown_ranks(found),
                str,
                lambda r: views.describe_rank(found, r, states[r], now),
                limit,
                after,
            )
            return JSONResponse(result_page.model_dump(mode="json"))

        view_parameters = {
            "job": job,
            "state": state,
            "group": group,
            "q": q,
            "sort": sort,
            "view": view,
            "by": by,
            "link": make_linker(request),
        }

        def build_values() -> dict[str, Any]:
            found = choose_attempt(live, job, attempt)
            if found is None:
                return {
                    **view_parameters,
                    "board": None,
                    "url": live.base_url,
                    "token": live.token is not None,
                }
            overview, now = get_overview(live, found), live.now()
            all_rows: Sequence[Any] = (
                get_group_rows(live, found) if view == "groups" else select_shown_ranks(found)
            )
            bounds = compute_page_bounds(
                len(all_rows), page, GROUPS_PER_PAGE if view == "groups" else RANKS_PER_PAGE
            )
            shown_rows = all_rows[bounds["start"] : bounds["end"]]
            return {
                **view_parameters,
                "board": overview,
                "jobs": [a.job for a in live.list_latest_attempts()],
                "straggler": next(iter(list_stragglers(get_ranked_groups(live, found))), None),
                "places": {i.id: views.find_culprit_frame(i) for i in overview.incidents[:1]},
                "layout": get_map_layout(live, found, by),
                "at": bounds,
                "rows": [build_row(overview, r, now) for r in shown_rows]
                if view == "ranks"
                else [],
                "groups": shown_rows if view == "groups" else [],
                "about": {
                    r: i.id for i in reversed(overview.incidents) for r in (*i.waiting, *i.culprits)
                }
                if view == "ranks"
                else {},
            }

        return serve_page(live, request, "ranks.html", build_values)


def choose_attempt(live: AppState, job: str, attempt: int | None) -> Attempt | None:
    """Without a name the newest job that hangs, else the newest one. Raises Problem for an unknown
    one.
    """
    found = live.find_attempts(job or None, attempt)
    alerted_jobs = {
        c.incident.job
        for c in live.watch.book.cases.values()
        if c.open and c.incident.severity is Severity.ALERT
    }
    return next(
        (a for a in found if a.job in alerted_jobs and not a.is_finished), next(iter(found), None)
    )


def compute_page_bounds(total: int, number: int, size: int) -> dict[str, int]:
    """Where page `number` begins and ends, kept within what there is.

    >>> paged(230, 9, 100)
    {'number': 3, 'pages': 3, 'start': 200, 'end': 230, 'total': 230}
    """
    pages = max(1, -(-total // size))
    number = min(number, pages)
    return {
        "number": number,
        "pages": pages,
        "start": (number - 1) * size,
        "end": min(total, number * size),
        "total": total,
    }


def _add_incident_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get("/incidents")
    async def show_incidents(
        request: Request,
        job: str = "",
        status: Literal["open", "resolved", ""] = "",
        kind: VerdictKind | Literal[""] = "",
        since: Literal["1h", "24h", "7d", "30d", ""] = "",
        rank: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = "",
        page: PageNumber = 1,
        limit: PageLimit = 100,
        after: PageCursor = None,
    ) -> Response:
        def find_matching_cases() -> list[IncidentRecord]:
            found = [
                c
                for c in live.find_incidents(
                    job or None, status or None, int(rank) if rank else None
                )
                if kind in ("", c.incident.kind)
            ]
            if since:
                earliest = live.watch.clock.date(live.now()) - PERIODS[since]
                found = [
                    c
                    for c in found
                    if c.open or (c.incident.resolved_at or c.incident.opened_at) >= earliest
                ]
            return found

        if wants_json(request):
            result_page = build_page(
                request,
                find_matching_cases(),
                lambda c: c.incident.id,
                lambda c: c.incident,
                limit,
                after,
            )
            return JSONResponse(result_page.model_dump(mode="json"))
        link = make_linker(request)

        def build_values() -> dict[str, Any]:
            found = find_matching_cases()
            bounds = compute_page_bounds(len(found), page, INCIDENTS_PER_PAGE)
            return {
                "incidents": [c.incident for c in found[bounds["start"] : bounds["end"]]],
                "at": bounds,
                "link": link,
                "names": sorted(
                    {c.incident.job for c in live.watch.book.cases.values()}
                    | {a.job for a in live.list_latest_attempts()}
                ),
                "kinds": [k.value for k in VerdictKind],
                "periods": list(PERIODS),
                "told": {"job": job, "status": status, "kind": kind, "since": since, "rank": rank},
            }

        return serve_page(live, request, "incidents.html", build_values)

    @routes.get("/incidents/{id}")
    async def show_incident(
        request: Request, id: str, ranks: TextQuery = "", dump: TextQuery = ""
    ) -> Response:
        if wants_json(request):
            return JSONResponse(live.get_incident(id).incident.model_dump(mode="json"))
        return serve_page(
            live, request, "incident.html", lambda: build_page_values(live, id, ranks, dump)
        )


def render_docs(app: FastAPI) -> Response:
    """What the API offers, from its own description and without another host's scripts."""
    document = app.openapi()
    operations = [
        {"method": method.upper(), "path": path, **told}
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]
    return render_page("docs.html", operations=operations)


def find_static_file(name: str) -> Response | None:
    """A file of the static folder, by its exact name."""
    known = {path.name: path for path in (SERVER_DIR / "static").iterdir() if path.is_file()}
    return FileResponse(known[name]) if name in known else None
