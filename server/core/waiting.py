"""Waiting for news for a while, in a task that can be ended at any moment."""

from __future__ import annotations

import asyncio


async def within(seconds: float, news: asyncio.Event) -> bool:
    """Whether ``news`` is set, waiting so long for it.

    Before Python 3.12 `asyncio.wait_for` forgets that its task was cancelled where the event is set
    at the same time (https://github.com/python/cpython/issues/86296): a server that hears much
    would not stop.
    """
    waiting = asyncio.ensure_future(news.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
        return news.is_set()
    finally:
        waiting.cancel()
