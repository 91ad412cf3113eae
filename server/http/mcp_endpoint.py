"""``/mcp`` for coding agents: the Model Context Protocol over streamable HTTP, with the token.

The first request starts the service, which takes seconds and 20 MB: most servers get none.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch.mcp.tools import TOOLS, ApiError
from hangwatch.report.text import Document

from ..core.problems import Problem

PATH = "/mcp"
_MAX_BODY_BYTES = 1 << 20


class McpEndpoint:
    """An ASGI application that calls the API's routes: who may call this one may call those."""

    def __init__(self) -> None:
        self._started: asyncio.Future[Any] | None = None  # the session manager, once it runs
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started is None:  # nothing is awaited before it is set, so one request starts it
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(scope["app"], self._started))
        try:
            manager = await asyncio.shield(self._started)
        except ImportError as error:
            problem = Problem(
                501,
                "the Model Context Protocol needs the `mcp` package on the server"
                f" ({error}): pip install 'hangwatch[mcp]'",
            )
            return await problem.make_response()(scope, receive, send)
        await manager.asgi_app(scope, receive, send)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _build_manager(self, api: ASGIApp) -> Any:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        from hangwatch.mcp.service import build_service

        # No request leaves a session behind, and each reply is one document.
        return StreamableHTTPSessionManager(
            build_service(TOOLS, functools.partial(_fetch, api)),
            json_response=True,
            stateless=True,
            max_request_body_size=_MAX_BODY_BYTES,
        )

    async def _run(self, api: ASGIApp, started: asyncio.Future[Any]) -> None:
        try:
            manager = await asyncio.to_thread(self._build_manager, api)
        except Exception as error:  # each request reports it
            started.set_exception(error)
            return
        async with manager.run():
            started.set_result(manager)
            await asyncio.Event().wait()


async def _fetch(api: ASGIApp, path: str, query: Mapping[str, object]) -> Document:
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    params = {name: str(value) for name, value in query.items() if value is not None}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get(f"/api/v1/{path}", params=params)
    document: Document = response.json()
    if not response.is_success:
        detail = document.get("detail") or f"the API answers {response.status_code}"
        raise ApiError(str(detail))
    return document
