"""Puts the server together: the shared state, the parts that work on it, and every route around them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import generate_latest
from pydantic import RootModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from hangwatch import __version__
from hangwatch.protocol.heartbeat import Heartbeat

from .alerting.alerter import Alerter
from .core import limits, problems
from .core.clock import Clock
from .core.memory import find_memory_limit
from .core.peers import PeerConnections
from .core.problems import Problem
from .http import access, api, heartbeats, mcp_endpoint, metrics, ondemand_routes, rendering
from .http.app_state import AppState, State
from .monitor.watch import Watch
from .settings import Settings
from .shared_state import SharedState
from .storage.persistence import PersistenceWorker
from .storage.store import Store
from .web import incident_pages, performance_pages, ranks_page

MAX_VALIDATION_ERRORS = 20  # in one answer

_PROBLEM_RESPONSE = {
    "description": "What is wrong, and the remedy, as an RFC 9457 problem document",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
# All routes have these responses. FastAPI describes no 422 of its own where there is a "4XX".
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": _PROBLEM_RESPONSE,
    "5XX": _PROBLEM_RESPONSE,
}

_operations = APIRouter(tags=["operations"])


def build_app(
    settings: Settings,
    *,
    store: Store,
    base_url: str,
    token: str | None,
    clock: Clock | None = None,
) -> tuple[ASGIApp, AppState]:
    """The application and the state behind it. ``base_url`` is how people reach it."""
    # The parts that diagnose, store and alert.
    memory_mb = settings.memory_mb
    memory_bytes = int(memory_mb * (1 << 20)) if memory_mb else find_memory_limit()
    limits.MEMORY = replace(limits.MEMORY, maximum=memory_bytes)
    shared = SharedState(clock or Clock())
    persistence = PersistenceWorker(
        shared=shared,
        store=store,
        alerter=Alerter(settings.make_alert_channels(), base_url, store.delete_delivery),
        retention_days=settings.retention_days,
        retention_mb=settings.retention_mb,
    )
    watch = Watch(settings, shared, persistence)
    # The parts that answer node agents.
    authenticator = access.Authenticator(
        token, own_name=settings.host, public_url=settings.public_url, clock=shared.clock
    )
    agent_endpoint = heartbeats.AgentEndpoint(watch, authenticator)
    # The routes for people and programs.
    state = AppState(
        settings=settings,
        base_url=base_url,
        token=token,
        shared=shared,
        watch=watch,
        pages=rendering.PageRenderer(settings.path_prefix),
        peers=PeerConnections(shared.counters.refusals_by_limit),
    )
    mcp = mcp_endpoint.McpEndpoint()
    app = FastAPI(
        title="hangwatch",
        version=__version__,
        lifespan=lambda _: _run_tasks(state, mcp),
        docs_url=None,
        redoc_url=None,
        responses=_ERROR_RESPONSES,
    )
    app.state.hangwatch = state
    for kind in (Problem, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    for routes in (
        heartbeats.build_router(agent_endpoint),
        api.routes,
        ondemand_routes.routes,
        incident_pages.routes,
        ranks_page.routes,
        performance_pages.routes,
        access.build_router(state),
        _operations,
    ):
        app.include_router(routes)
    app.mount("/static", StaticFiles(directory=rendering.STATIC_DIR))
    app.router.routes.append(Route(mcp_endpoint.PATH, mcp, include_in_schema=False))
    _complete_openapi(app, token)
    gate = access.RequestGate(app, authenticator, settings.path_prefix)
    return heartbeats.HeartbeatFastPath(gate, agent_endpoint, settings.path_prefix), state


async def _answer_error(request: Request, error: Exception) -> Response:
    """A problem document, or in a browser a page with the same text."""
    state: AppState = request.app.state.hangwatch
    path = request.url.path
    match error:
        case Problem():
            problem = error
            state.shared.counters.refusals_by_limit.update(error.limits)
        case HTTPException():
            detail = {
                404: f"{path} does not exist; /docs lists the API",
                405: f"{path} does not accept {request.method}; /docs lists the methods",
            }.get(error.status_code, str(error.detail))
            problem = Problem(error.status_code, detail, headers=error.headers)
        case RequestValidationError():
            # The input is omitted: it may be large, or secret.
            errors = [
                {"at": ".".join(map(str, found["loc"])), "message": found["msg"]}
                for found in error.errors()[:MAX_VALIDATION_ERRORS]
            ]
            detail = "the request does not match its description in /docs; see errors"
            problem = Problem(422, detail, errors=errors)
        case ClientDisconnect():  # not an error of the server; no one receives the response
            problem = Problem(400, "the connection was closed before the request was complete")
        case _:
            problem = Problem(500, rendering.INTERNAL_ERROR_DETAIL)
    accepts_page = "text/html" in request.headers.get("accept", "")
    if not accepts_page or path.startswith("/api/"):
        return problem.make_response()
    return state.pages.render_page(
        "error.html",
        status_code=problem.status,
        title=http.HTTPStatus(problem.status).phrase,
        detail=problem.detail,
        more=problem.extra_members.get("errors", []),
    )


class HeartbeatBody(RootModel[Heartbeat]):
    """What a node agent reports about its host."""  # this text is part of /openapi.json


def _complete_openapi(app: FastAPI, token: str | None) -> None:
    """Adds to ``/openapi.json`` what FastAPI cannot derive from the routes: the problem documents, the token,
    and the heartbeat, which no FastAPI route parses.
    """
    generate = app.openapi

    @functools.cache
    def build_document() -> dict[str, Any]:
        document = generate()
        heartbeat = HeartbeatBody.model_json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= {
            **heartbeat.pop("$defs"),
            HeartbeatBody.__name__: heartbeat,
            "Problem": problems.PROBLEM_SCHEMA,
        }
        for path in access.PUBLIC_PATHS & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        if token is not None:
            document["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer"}
            }
            document["security"] = [{"token": []}]
        return document

    app.openapi = build_document  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def _run_tasks(state: AppState, mcp: mcp_endpoint.McpEndpoint) -> AsyncIterator[None]:
    """Runs everything that requests do not start."""
    persistence = state.watch.persistence
    job_claims = state.watch.job_claims
    persistence.resume_deliveries(persistence.store.load_deliveries())
    state.tasks.start_task("diagnosis", state.watch.loop.run)
    state.tasks.start_task("storage and alerts", persistence.run)
    state.tasks.start_task("load measurement", state.shared.load.measure_lateness)
    if job_claims is not None:
        state.tasks.start_task("claims to jobs", job_claims.run)
    yield
    await mcp.stop()
    await state.tasks.stop_tasks()
    await persistence.save_changes()
    await asyncio.to_thread(persistence.alerter.close)


@_operations.get(
    "/healthz", summary="Whether the process responds; `down` names parts that do not work"
)
async def healthz(state: State) -> dict[str, str | dict[str, str]]:
    down = state.list_down_parts()
    return {"status": "degraded", "down": down} if down else {"status": "ok"}


@_operations.get("/readyz", summary="Whether the diagnosis runs and incidents can be stored")
async def readyz(state: State) -> dict[str, str]:
    down = state.list_down_parts()
    if down:
        reasons = "; ".join(f"{part}: {reason}" for part, reason in down.items())
        raise Problem(503, f"{reasons}. The server's stderr has the details", down=down)
    return {"status": "ready"}


@_operations.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def prometheus(state: State) -> Response:
    exposition = generate_latest(metrics.StateCollector(state))
    return Response(exposition, media_type="text/plain; version=0.0.4; charset=utf-8")


@_operations.get("/docs", include_in_schema=False)
async def show_docs(state: State, request: Request) -> Response:
    operations = [
        {"method": method.upper(), "path": path, **operation}
        for path, methods in request.app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    return state.pages.render_page("docs.html", operations=operations)
