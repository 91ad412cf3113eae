"""Serves an application to this process, without connections whose other end could be looked up."""

from __future__ import annotations

import os

from starlette.types import ASGIApp, Receive, Scope, Send

from hangwatch.server.http.access import PEER_UID


def serve_own_user(app: ASGIApp) -> ASGIApp:
    """``app`` for requests of this user."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, PEER_UID: os.geteuid()}, receive, send)

    return served
