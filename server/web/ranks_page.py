"""``/ranks``: the verdict, the map of all ranks, and the table of ranks or process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from hangwatch.model.ranks import RankState
from hangwatch.tracking.attempt import Attempt

from ..http.app_state import AppState
from ..http.json_responses import make_json_response
from ..http.listing import PageOf100, PageRequest
from ..http.performance_board import get_ranked_groups
from ..http.rendering import make_linker, wants_json
from ..monitor import views
from ..performance.views import list_stragglers
from .group_table import get_group_rows
from .overview import AttemptOverview, get_map_layout, get_overview
from .paging import PageNumber, compute_page_bounds
from .rank_columns import RANK_COLUMNS, SORT_PATTERN, RankRow
from .rank_selection import RankFilter, select_ranks
from .serving import TextQuery, choose_attempt, serve_page

RANKS_PER_PAGE = 50
GROUPS_PER_PAGE = 50

SortQuery = Annotated[str, Query(pattern=SORT_PATTERN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """The state of the view, as the address gives it."""

    job: str
    attempt: int | None
    rank_filter: RankFilter
    table: Literal["ranks", "groups"]
    map_by: str  # what the map is divided by
    page: int


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/ranks")
    async def show_ranks(
        request: Request,
        listed: PageOf100,
        job: str = "",
        attempt: Annotated[int | None, Query(ge=0)] = None,
        state: RankState | Literal[""] = "",
        group: str = "",
        q: TextQuery = "",
        sort: SortQuery = "rank",
        view: Literal["ranks", "groups"] = "ranks",
        by: TextQuery = "host",
        page: PageNumber = 1,
    ) -> Response:
        rank_filter = RankFilter(state=state or None, group=group, query=q, sort=sort)
        shown = RanksView(
            job=job, attempt=attempt, rank_filter=rank_filter, table=view, map_by=by, page=page
        )
        if wants_json(request):
            return _list_ranks(live, listed, shown)
        link = make_linker(request)

        def build_values() -> dict[str, Any]:
            return {**_build_page_values(live, shown), "link": link}

        return serve_page(live, request, "ranks.html", build_values)

    return routes


def _list_ranks(live: AppState, listed: PageRequest, shown: RanksView) -> Response:
    attempt, now = choose_attempt(live, shown.job, shown.attempt), live.now()
    if attempt is None:
        return make_json_response({"items": [], "next": None})
    overview = get_overview(live, attempt)
    return listed.make_response(
        select_ranks(overview, now, shown.rank_filter),
        str,
        lambda rank: views.describe_rank(attempt, rank, overview.states[rank], now),
    )


def _build_page_values(live: AppState, shown: RanksView) -> dict[str, Any]:
    values: dict[str, Any] = {
        "job": shown.job,
        "state": shown.rank_filter.state.value if shown.rank_filter.state else "",
        "group": shown.rank_filter.group,
        "q": shown.rank_filter.query,
        "sort": shown.rank_filter.sort,
        "view": shown.table,
        "by": shown.map_by,
    }
    attempt = choose_attempt(live, shown.job, shown.attempt)
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
        "layout": get_map_layout(live, attempt, shown.map_by),
    }
    if shown.table == "groups":
        return values | _build_group_table(live, attempt, shown.page)
    return values | _build_rank_table(live, overview, shown)


def _build_rank_table(
    live: AppState, overview: AttemptOverview, shown: RanksView
) -> dict[str, Any]:
    now = live.now()
    ranks = select_ranks(overview, now, shown.rank_filter)
    bounds = compute_page_bounds(len(ranks), shown.page, RANKS_PER_PAGE)
    return {
        "columns": RANK_COLUMNS,
        "bounds": bounds,
        "rows": [RankRow(overview, rank, now) for rank in bounds.slice_rows(ranks)],
        "incident_ids": _map_ranks_to_incidents(overview),
    }


def _map_ranks_to_incidents(overview: AttemptOverview) -> dict[int, str]:
    """The id of the most severe incident that involves a rank."""
    ids: dict[int, str] = {}
    for incident in reversed(overview.incidents):
        ids.update(dict.fromkeys(incident.waiting, incident.id))
        ids.update(dict.fromkeys(incident.culprits, incident.id))
    return ids


def _build_group_table(live: AppState, attempt: Attempt, page: int) -> dict[str, Any]:
    groups = get_group_rows(live, attempt)
    bounds = compute_page_bounds(len(groups), page, GROUPS_PER_PAGE)
    return {"bounds": bounds, "groups": bounds.slice_rows(groups)}
