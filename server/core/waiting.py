"""Waits for an event with a timeout, in a task that may be cancelled at any moment."""

from __future__ import annotations

import asyncio


async def wait_for_event(seconds: float, event: asyncio.Event) -> bool:
    """Waits up to ``seconds`` for ``event``. Returns whether it is set.

    Before Python 3.12 `asyncio.wait_for` forgets that its task was cancelled where the event is set
    at the same time (https://github.com/python/cpython/issues/86296): a busy server
    would not stop.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
        return event.is_set()
    finally:
        waiting.cancel()
