"""The pages for a browser. Each page, its JSON twin and its stream of updates have one address."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse, Response

from ..http.app_state import AppState
from ..http.rendering import SERVER_DIR, render_page
from . import incidents_page, ranks_page

STATIC_DIR = SERVER_DIR / "static"


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    routes.include_router(ranks_page.build_router(live))
    routes.include_router(incidents_page.build_router(live))

    @routes.get("/")
    async def redirect_home() -> Response:
        return RedirectResponse("/ranks", status_code=307)

    return routes


def render_docs(app: FastAPI) -> Response:
    """The API's reference, made from the application's own OpenAPI document."""
    document = app.openapi()
    operations = [
        {"method": method.upper(), "path": path, **operation}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return render_page("docs.html", operations=operations)
