"""A page that stays up to date: its parts as server-sent events, each sent when it has changed.

Every viewer of one address gets the same parts, rendered once. A stream begins with all of them, so
that one that was cut needs no memory of where it was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi.responses import StreamingResponse

from ..core.problems import Problem
from .app_state import Live
from .rendering import parts

BEAT = 0.5  # seconds between two looks, at the same moments for all viewers
ALIVE = 2.0  # seconds of silence after which the viewer is told that the server is there
RETRY_MS = 1000
READERS_MAX = 256  # of any stream, at a time


def answer(live: Live, events: AsyncIterator[str]) -> StreamingResponse:
    """Server-sent events, for as long as the reader stays. Raises Problem where there are too many
    readers.
    """
    readers = live.watch.events.readers
    if len(readers) >= READERS_MAX:
        raise Problem(
            503,
            f"{READERS_MAX} readers follow this server already: close some",
            headers={"Retry-After": "30"},
        )

    async def counted() -> AsyncIterator[str]:
        reader = object()
        readers.add(reader)
        try:
            async for part in events:
                yield part
        finally:
            readers.discard(reader)

    return StreamingResponse(
        counted(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


async def follow(
    live: Live, key: str, template: str, values: Callable[[], Mapping[str, object]]
) -> AsyncIterator[str]:
    """The events of one viewer of the page at ``key``: ``part`` with an id and HTML, ``alive``, or
    ``gone`` at the end.
    """
    loop = asyncio.get_running_loop()
    sent: dict[str, str] = {}
    said_at = loop.time()
    yield f"retry: {RETRY_MS}\n\n"
    while not live.watch.events.closed:
        try:
            now = live.memo.get(("page", key), lambda: _encoded(parts(template, **values())))
        except Problem as problem:  # what it shows is no longer known
            yield _event("gone", {"detail": problem.detail})
            return
        fresh = [text for name, text in now.items() if sent.get(name) != text]
        if not fresh and loop.time() - said_at >= ALIVE:
            fresh = [_event("alive", {})]
        if fresh:
            said_at = loop.time()
            yield "".join(fresh)
        sent = now
        await asyncio.sleep(BEAT - loop.time() % BEAT)


def _encoded(made: Mapping[str, str]) -> dict[str, str]:
    return {name: _event("part", {"id": name, "html": html}) for name, html in made.items()}


def _event(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
