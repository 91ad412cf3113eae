"""``/ranks``: the verdict, the map of all ranks, and the table of ranks or process groups."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ..http.app_state import AppState
from ..http.listing import PageOf100, PageRequest
from ..http.performance_board import get_ranked_groups
from ..http.rendering import make_json_response, wants_json
from ..monitor import views
from ..performance.views import list_stragglers
from .group_table import get_group_rows
from .overview import AttemptOverview, get_map_layout, get_overview
from .paging import slice_page
from .rank_columns import RANK_COLUMNS, RankRow
from .rank_selection import RanksQuery, select_ranks
from .serving import choose_attempt, serve_page

RANKS_PER_PAGE = 50
GROUPS_PER_PAGE = 50


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/ranks")
    async def show_ranks(
        request: Request, listed: PageOf100, query: Annotated[RanksQuery, Query()]
    ) -> Response:
        if wants_json(request):
            return _list_ranks(live, listed, query)
        return serve_page(live, request, "ranks.html", lambda: _build_page_values(live, query))

    return routes


def _list_ranks(live: AppState, listed: PageRequest, query: RanksQuery) -> Response:
    attempt, now = choose_attempt(live, query.job, query.attempt), live.now()
    if attempt is None:
        return make_json_response({"items": [], "next": None})
    overview = get_overview(live, attempt)
    return listed.make_response(
        select_ranks(overview, now, query),
        str,
        lambda rank: views.describe_rank(attempt, rank, overview.states[rank], now),
    )


def _build_page_values(live: AppState, query: RanksQuery) -> dict[str, Any]:
    values = query.model_dump(mode="json")
    attempt = choose_attempt(live, query.job, query.attempt)
    if attempt is None:
        start_values = {"overview": None, "url": live.base_url, "token": live.token is not None}
        return values | start_values
    overview = get_overview(live, attempt)
    stragglers = list_stragglers(get_ranked_groups(live, attempt))
    values |= {
        "overview": overview,
        "jobs": [a.job for a in live.list_latest_attempts()],
        "straggler": stragglers[0] if stragglers else None,
        "culprit_frames": {i.id: views.find_culprit_frame(i) for i in overview.incidents[:1]},
        "layout": get_map_layout(live, attempt, query.by),
    }
    if query.view == "groups":
        rows = get_group_rows(live, attempt)
        return values | {"shown": slice_page(rows, query.page, GROUPS_PER_PAGE)}
    return values | _build_rank_table(live, overview, query)


def _build_rank_table(
    live: AppState, overview: AttemptOverview, query: RanksQuery
) -> dict[str, Any]:
    now = live.now()
    shown = slice_page(select_ranks(overview, now, query), query.page, RANKS_PER_PAGE)
    return {
        "columns": RANK_COLUMNS,
        "shown": shown,
        "rows": [RankRow(overview, rank, now) for rank in shown.rows],
        "incident_ids": _map_ranks_to_incidents(overview),
    }


def _map_ranks_to_incidents(overview: AttemptOverview) -> dict[int, str]:
    """The id of the most severe incident that involves a rank."""
    ids: dict[int, str] = {}
    for incident in reversed(overview.incidents):
        ids.update(dict.fromkeys(incident.waiting, incident.id))
        ids.update(dict.fromkeys(incident.culprits, incident.id))
    return ids
