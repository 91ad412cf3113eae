"""``/incidents``: the list of incidents, filtered by the address."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from hangwatch.model.kinds import VerdictKind
from hangwatch.report.documents import build_document

from ..http.api import PageOf100, make_incidents_response
from ..http.app_state import AppState
from ..http.rendering import make_json_response, wants_json
from ..incidents.registry import IncidentRecord
from .incident_page import build_page_values
from .serving import PageNumber, TextQuery, serve_page, slice_page

INCIDENTS_PER_PAGE = 50
PERIODS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}


class IncidentsQuery(BaseModel):
    """Empty values select everything."""

    job: str = ""
    status: Literal["open", "resolved", ""] = ""
    kind: VerdictKind | Literal[""] = ""
    since: Literal["1h", "24h", "7d", "30d", ""] = ""
    rank: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = ""
    page: PageNumber = 1

    @property
    def is_active(self) -> bool:
        return any((self.job, self.status, self.kind, self.since, self.rank))


def build_router(state: AppState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/incidents")
    async def show_incidents(
        request: Request, listed: PageOf100, query: Annotated[IncidentsQuery, Query()]
    ) -> Response:
        if wants_json(request):
            return make_incidents_response(listed, _find_matching_records(state, query))
        return serve_page(state, request, "incidents.html", lambda: _build_values(state, query))

    @routes.get("/incidents/{id}")
    async def show_incident(
        request: Request, id: str, ranks: TextQuery = "", dump: TextQuery = ""
    ) -> Response:
        if wants_json(request):
            return make_json_response(build_document(state.get_incident(id).incident))
        return serve_page(
            state, request, "incident.html", lambda: build_page_values(state, id, ranks, dump)
        )

    return routes


def _find_matching_records(state: AppState, query: IncidentsQuery) -> list[IncidentRecord]:
    """The matching incidents, the newest first."""
    rank = int(query.rank) if query.rank else None
    records = state.find_incidents(query.job or None, query.status or None, rank)
    if query.kind:
        records = [record for record in records if record.incident.kind is query.kind]
    if query.since:
        earliest = state.shared.clock.date(state.now()) - PERIODS[query.since]
        records = [
            record
            for record in records
            if record.is_open
            or (record.incident.resolved_at or record.incident.opened_at) >= earliest
        ]
    return list(records)


def _build_values(state: AppState, query: IncidentsQuery) -> dict[str, Any]:
    records = _find_matching_records(state, query)
    past_jobs = {record.incident.job for record in state.shared.incidents.records.values()}
    current_jobs = {attempt.job for attempt in state.list_latest_attempts()}
    return {
        "shown": slice_page(records, query.page, INCIDENTS_PER_PAGE),
        "jobs": sorted(past_jobs | current_jobs),
        "kinds": [kind.value for kind in VerdictKind],
        "periods": list(PERIODS),
        "filter": query,
    }
