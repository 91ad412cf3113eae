"""Keeps pages up to date: their parts are sent as server-sent events when they change.

A stream starts with all parts, so that a reader that reconnects needs no earlier state. Parts are
rendered and encoded once for all viewers of a URL; sse-starlette would encode them for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi.responses import StreamingResponse

from ..core.events import encode_event
from ..core.problems import Problem
from .app_state import AppState

POLL_INTERVAL_S = 0.5  # the time between two checks, which are simultaneous for all viewers
ALIVE_INTERVAL_S = 2.0  # the time without changes after which an ``alive`` event is sent
RETRY_MS = 1000
MAX_READERS = 256  # the readers of all streams together


def make_stream_response(state: AppState, events: AsyncIterator[str]) -> StreamingResponse:
    """Sends events until the reader disconnects. Raises Problem if there are too many readers."""
    readers = state.shared.events.readers
    if len(readers) >= MAX_READERS:
        raise Problem(
            503,
            f"{MAX_READERS} clients already read event streams of this server: close some",
            headers={"Retry-After": "30"},
        )

    async def track_reader() -> AsyncIterator[str]:
        reader = object()
        readers.add(reader)
        try:
            async for part in events:
                yield part
        finally:
            readers.discard(reader)

    return StreamingResponse(
        track_reader(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


async def follow_page(
    state: AppState, key: str, template: str, values: Callable[[], Mapping[str, object]]
) -> AsyncIterator[str]:
    """A viewer's events of page ``key``: ``part`` with id and HTML, ``alive``, at last ``gone``."""

    def encode_parts() -> dict[str, str]:
        parts = state.pages.render_parts(template, **values()).items()
        return {name: encode_event("part", {"id": name, "html": html}) for name, html in parts}

    loop = asyncio.get_running_loop()
    sent: dict[str, str] = {}
    last_sent_at = loop.time()
    yield f"retry: {RETRY_MS}\n\n"
    while not state.shared.events.is_closed:
        try:
            now = state.cache.get_or_compute(("page", key), encode_parts)
        except Problem as problem:  # the page's subject no longer exists
            yield encode_event("gone", {"detail": problem.detail})
            return
        changed_events = [text for name, text in now.items() if sent.get(name) != text]
        if not changed_events and loop.time() - last_sent_at >= ALIVE_INTERVAL_S:
            changed_events = [encode_event("alive", {})]
        if changed_events:
            last_sent_at = loop.time()
            yield "".join(changed_events)
        sent = now
        await asyncio.sleep(POLL_INTERVAL_S - loop.time() % POLL_INTERVAL_S)
