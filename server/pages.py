"""The pages for a browser, each with its JSON twin at the same address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response

from hangwatch.state import Attempt
from hangwatch.types import RankState

from . import schema, views
from .listing import After, Limit, part
from .live import Live
from .rendering import HERE, page, wants_json

ROWS = 500  # on one page
CONCERN = {state: order for order, state in enumerate(RankState)}
COMPARED = ("op", "shapes", "dtype", "reduce_op", "root", "peer", "splits", "detail")
Sort = Literal["rank", "state", "waiting", "step"]


def router(live: Live) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def home() -> Response:
        return RedirectResponse("/ranks", status_code=307)

    @routes.get("/ranks")
    async def ranks(
        request: Request,
        job: str | None = None,
        attempt: Annotated[int | None, Query(ge=0)] = None,
        state: RankState | None = None,
        group: str | None = None,
        sort: Sort = "rank",
        limit: Limit = ROWS,
        after: After = None,
    ) -> Response:
        found = next(iter(live.attempts(job, attempt)), None)
        if found is None:
            if wants_json(request):
                return JSONResponse({"items": [], "next": None})
            return page("empty.html", url=live.base_url, token=live.token is not None)
        rows = _rows(live, found, state, group, sort)
        shown = part(request, rows, lambda r: str(r.rank), lambda r: r, limit, after)
        if wants_json(request):
            return JSONResponse(shown.model_dump(mode="json"))
        chosen = state.value if state else ""
        return _ranks_page(live, found, shown, {"state": chosen, "group": group or "", "sort": sort, "total": len(rows)})

    @routes.get("/incidents")
    async def incidents(
        request: Request,
        job: str | None = None,
        status: Literal["open", "resolved"] | None = None,
        rank: Annotated[int | None, Query(ge=0)] = None,
        limit: Limit = 100,
        after: After = None,
    ) -> Response:
        rows = live.incidents(job, status, rank)
        shown = part(request, rows, lambda c: c.incident.id, lambda c: c.incident, limit, after)
        if wants_json(request):
            return JSONResponse(shown.model_dump(mode="json"))
        return page("incidents.html", incidents=shown.items, next=shown.next, job=job, status=status, rank=rank)

    @routes.get("/incidents/{id}")
    async def incident(request: Request, id: str) -> Response:
        found = live.incident(id).incident
        if wants_json(request):
            return JSONResponse(found.model_dump(mode="json"))
        return page("incident.html", incident=found, differing=differing(found), compared=COMPARED)

    return routes


def _rows(live: Live, attempt: Attempt, state: RankState | None, group: str | None, sort: Sort) -> list[schema.Rank]:
    now = live.now()
    rows = [views.rank(attempt, n, s, now) for n, s in live.states(attempt).items() if state is None or s is state]
    if group is not None:
        rows = [r for r in rows if any(g.name == group for g in r.groups)]
    order: dict[str, Any] = {
        "state": lambda r: (-CONCERN[r.state], r.rank),
        "waiting": lambda r: (-(r.waiting_s or 0.0), r.rank),
        "step": lambda r: (r.step if r.step is not None else -1, r.rank),
    }
    return sorted(rows, key=order[sort]) if sort in order else rows


def _ranks_page(live: Live, attempt: Attempt, shown: schema.Page[schema.Rank], view: dict[str, Any]) -> Response:
    job, states = live.job(attempt), live.states(attempt)
    counts = Counter(states.values())
    return page(
        "ranks.html",
        job=job,
        jobs=[a.job for a in live.jobs()],
        incidents=[c.incident for c in live.watch.book.of(attempt)],
        culprits={rank for c in live.watch.book.of(attempt) for rank in c.incident.culprits},
        sentence=views.sentence(attempt, job, states, live.settings.stall_after),
        ranks=shown.items,
        next=shown.next,
        counts=[(s.value, counts[s]) for s in sorted(counts, key=lambda s: -CONCERN[s])],
        doing={r.rank: doing(r) for r in shown.items},
        **view,
    )


def doing(rank: schema.Rank) -> str:
    """The call a rank is in, or its last one."""
    pending = [g for g in rank.groups if g.completed is not None and g.completed < g.entered]
    newest = max(pending or rank.groups, key=lambda g: g.entered, default=None)
    if newest is None or not newest.op:
        return "–"
    number = newest.completed + 1 if pending and newest.completed is not None else newest.entered
    return f"{newest.op} · call {number} of {newest.desc or newest.name}"


def differing(incident: schema.Incident) -> frozenset[str]:
    """Which columns of the calls, put side by side, are not the same in all."""
    calls: Iterable[schema.CallClass] = incident.calls
    return frozenset(name for name in COMPARED if len({repr(getattr(c, name)) for c in calls}) > 1)


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
