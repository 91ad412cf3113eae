"""An incident as one HTML file, for a ticket: it needs no server and makes no request."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from ..http.app_state import AppState
from ..http.rendering import STYLESHEET_PATH, make_attachment, render_parts, render_text
from .incident_page import build_page_values

# The parts of the incident's page that the file has, in this order, with their labels.
SECTIONS = (
    ("verdict", "Verdict"),
    ("graph", "Graph"),
    ("calls", "Calls"),
    ("stacks", "Stacks"),
    ("device", "Devices"),
    ("hardware", "Hardware"),
    ("processes", "Processes"),
    ("timeline", "Timeline"),
)


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/incidents/{id}", tags=["incidents"])

    @routes.get(
        "/report",
        summary="The incident as one HTML file that needs no server",
        response_class=Response,
        responses={200: {"content": {"text/html": {}}}},
    )
    async def download_report(id: str) -> Response:
        incident = live.get_incident(id).incident
        name = f"hangwatch-{incident.id}.html"
        return make_attachment(name, render_report(live, incident.id), "text/html")

    return routes


def render_report(live: AppState, id: str) -> str:
    """The HTML of the file. Raises Problem for an unknown incident."""
    values = build_page_values(live, id, "", "")
    return render_text(
        "report.html",
        **values,
        parts=render_parts("incident.html", **values),
        sections=SECTIONS,
        stylesheet=STYLESHEET_PATH.read_text(encoding="utf-8"),
        made_at=live.watch.clock.date(live.now()),
        address=f"{live.base_url}/incidents/{id}",
    )
