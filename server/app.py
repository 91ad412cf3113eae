"""The application: the watch, and every route around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangwatch import __version__

from . import access, api, ingest, metrics, pages, problems
from .alerts import Alerter
from .clock import Clock, ulid
from .events import Events
from .live import Live
from .problems import Problem
from .rendering import HEADERS
from .settings import Settings
from .store import Store
from .watch import Watch

STUCK_AFTER = 10.0  # seconds without a round of diagnosis after which the server is not ready


def build(settings: Settings, *, store: Store, base_url: str, token: str | None, clock: Clock | None = None) -> tuple[FastAPI, Live]:
    """The application and the live state behind it. ``base_url`` is how people reach it."""
    clock = clock or Clock()
    watch = Watch(
        limits=settings.limits,
        clock=clock,
        store=store,
        alerter=Alerter(settings.alert, lambda id: f"{base_url}/incidents/{id}"),
        events=Events(run=ulid(clock.wall())),
    )
    live = Live(settings=settings, base_url=base_url, token=token, watch=watch)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(watch.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # it is what was asked for
            await task
        await watch.alerter.close()
        await watch.save(at_once=True)

    app = FastAPI(title="hangwatch", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    problems.install(app)
    for router in (ingest.router(live), api.router(live), pages.router(live), access.router(live)):
        app.include_router(router)
    _operations(app, live)
    # The last one added is the outermost: its headers are on refusals too.
    app.add_middleware(access.Access, token=token)
    app.add_middleware(_SecurityHeaders)
    return app, live


def _operations(app: FastAPI, live: Live) -> None:
    @app.get("/healthz", tags=["operations"], summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", tags=["operations"], summary="It watches, and can keep what it finds")
    async def readyz() -> dict[str, str]:
        watch = live.watch
        if live.now() - watch.ticked_at > STUCK_AFTER:
            raise Problem(503, "the diagnosis does not run; the server's stderr says why")
        if not watch.saved:
            raise Problem(503, "incidents cannot be written: see to the disk of the data folder")
        return {"status": "ready"}

    @app.get("/metrics", tags=["operations"], summary="Metrics for Prometheus")
    async def prometheus() -> Response:
        return Response(metrics.exposition(live), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return pages.docs(app)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        found = pages.static(name)
        if found is None:
            raise HTTPException(404)
        return found


class _SecurityHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, sending)
