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
from ..http.app_state import Live
from ..http.listing import After, Limit, part
from ..http.performance_board import ranked
from ..http.rendering import HERE, linker, page, wants_events, wants_json
from ..incidents.registry import Case
from ..monitor import views
from ..performance.views import stragglers
from .board import board, layout
from .group_table import groups
from .incident_page import evidence
from .rank_table import chosen, row

RANKS, GROUPS, INCIDENTS = 50, 50, 50  # on one page
PERIODS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}

Number = Annotated[int, Query(ge=1, le=1_000_000)]
Text = Annotated[str, Query(max_length=500)]
Sort = Annotated[str, Query(pattern="^-?(rank|state|host|step|waiting|heard)$")]


def router(live: Live) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    _ranks(routes, live)
    _incidents(routes, live)

    @routes.get("/")
    async def home() -> Response:
        return RedirectResponse("/ranks", status_code=307)

    return routes


def shown(
    live: Live, request: Request, template: str, values: Callable[[], Mapping[str, Any]]
) -> Response:
    """The page; or the events that keep it up to date, for a page that asks for these at its own
    address.
    """
    if not wants_events(request):
        return page(template, **values())
    return stream.answer(
        live, stream.follow(live, f"{request.url.path}?{request.url.query}", template, values)
    )


def _ranks(routes: APIRouter, live: Live) -> None:
    @routes.get("/ranks")
    async def ranks(
        request: Request,
        job: str = "",
        attempt: Annotated[int | None, Query(ge=0)] = None,
        state: RankState | Literal[""] = "",
        group: str = "",
        q: Text = "",
        sort: Sort = "rank",
        view: Literal["ranks", "groups"] = "ranks",
        by: Text = "host",
        page: Number = 1,
        limit: Limit = 100,
        after: After = None,
    ) -> Response:
        def ordered(of: Attempt) -> list[int]:
            return chosen(
                board(live, of), live.now(), state=state or None, group=group, query=q, sort=sort
            )

        if wants_json(request):
            found, now = meant(live, job, attempt), live.now()
            if found is None:
                return JSONResponse({"items": [], "next": None})
            states = board(live, found).states
            told = part(
                request,
                ordered(found),
                str,
                lambda r: views.rank(found, r, states[r], now),
                limit,
                after,
            )
            return JSONResponse(told.model_dump(mode="json"))

        told_view = {
            "job": job,
            "state": state,
            "group": group,
            "q": q,
            "sort": sort,
            "view": view,
            "by": by,
            "link": linker(request),
        }

        def values() -> dict[str, Any]:
            found = meant(live, job, attempt)
            if found is None:
                return {
                    **told_view,
                    "board": None,
                    "url": live.base_url,
                    "token": live.token is not None,
                }
            of, now = board(live, found), live.now()
            everything: Sequence[Any] = groups(live, found) if view == "groups" else ordered(found)
            at = paged(len(everything), page, GROUPS if view == "groups" else RANKS)
            inside = everything[at["start"] : at["end"]]
            return {
                **told_view,
                "board": of,
                "jobs": [a.job for a in live.jobs()],
                "straggler": next(iter(stragglers(ranked(live, found))), None),
                "places": {i.id: views.culprit_place(i) for i in of.incidents[:1]},
                "layout": layout(live, found, by),
                "at": at,
                "rows": [row(of, r, now) for r in inside] if view == "ranks" else [],
                "groups": inside if view == "groups" else [],
                "about": {
                    r: i.id for i in reversed(of.incidents) for r in (*i.waiting, *i.culprits)
                }
                if view == "ranks"
                else {},
            }

        return shown(live, request, "ranks.html", values)


def meant(live: Live, job: str, attempt: int | None) -> Attempt | None:
    """Without a name the newest job that hangs, else the newest one. Raises Problem for an unknown
    one.
    """
    found = live.attempts(job or None, attempt)
    troubled = {
        c.incident.job
        for c in live.watch.book.cases.values()
        if c.open and c.incident.severity is Severity.ALERT
    }
    return next(
        (a for a in found if a.job in troubled and not a.is_finished), next(iter(found), None)
    )


def paged(total: int, number: int, size: int) -> dict[str, int]:
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


def _incidents(routes: APIRouter, live: Live) -> None:
    @routes.get("/incidents")
    async def incidents(
        request: Request,
        job: str = "",
        status: Literal["open", "resolved", ""] = "",
        kind: VerdictKind | Literal[""] = "",
        since: Literal["1h", "24h", "7d", "30d", ""] = "",
        rank: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = "",
        page: Number = 1,
        limit: Limit = 100,
        after: After = None,
    ) -> Response:
        def matching() -> list[Case]:
            found = [
                c
                for c in live.incidents(job or None, status or None, int(rank) if rank else None)
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
            told = part(
                request, matching(), lambda c: c.incident.id, lambda c: c.incident, limit, after
            )
            return JSONResponse(told.model_dump(mode="json"))
        link = linker(request)

        def values() -> dict[str, Any]:
            found = matching()
            at = paged(len(found), page, INCIDENTS)
            return {
                "incidents": [c.incident for c in found[at["start"] : at["end"]]],
                "at": at,
                "link": link,
                "names": sorted(
                    {c.incident.job for c in live.watch.book.cases.values()}
                    | {a.job for a in live.jobs()}
                ),
                "kinds": [k.value for k in VerdictKind],
                "periods": list(PERIODS),
                "told": {"job": job, "status": status, "kind": kind, "since": since, "rank": rank},
            }

        return shown(live, request, "incidents.html", values)

    @routes.get("/incidents/{id}")
    async def incident(request: Request, id: str, ranks: Text = "", dump: Text = "") -> Response:
        if wants_json(request):
            return JSONResponse(live.incident(id).incident.model_dump(mode="json"))
        return shown(live, request, "incident.html", lambda: evidence(live, id, ranks, dump))


def docs(app: FastAPI) -> Response:
    """What the API offers, from its own description and without another host's scripts."""
    described = app.openapi()
    operations = [
        {"method": method.upper(), "path": path, **told}
        for path, methods in described["paths"].items()
        for method, told in methods.items()
    ]
    return page("docs.html", operations=operations)


def static(name: str) -> Response | None:
    """A file of the static folder, by its exact name."""
    known = {path.name: path for path in (HERE / "static").iterdir() if path.is_file()}
    return FileResponse(known[name]) if name in known else None
