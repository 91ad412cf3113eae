"""The stream of events that pages follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hangwatch.server.core.events import EventLog


def test_stream_resumes_or_resets() -> None:
    async def read_events(events: EventLog, last: str | None, count: int) -> list[str]:
        stream: AsyncIterator[str] = events.stream_events(last)
        return [await asyncio.wait_for(anext(stream), 5.0) for _ in range(count)]

    async def run_streams() -> None:
        events = EventLog(run_id="R")
        for n in range(3):
            events.publish_event("rank", {"rank": n})
        assert await read_events(events, "R-2", 2) == [
            "retry: 2000\n\n",
            'id: R-3\nevent: rank\ndata: {"rank":2}\n\n',
        ]
        assert "event: reset" in (await read_events(events, "Q-2", 2))[1]
        assert "event: reset" in (await read_events(events, "R-9", 2))[1]
        stream = events.stream_events(None)
        await anext(stream)
        events.publish_event("job", {})
        assert "event: job" in await asyncio.wait_for(anext(stream), 5.0)
        events.close()
        assert [part async for part in events.stream_events("R-4")] == ["retry: 2000\n\n"]

    asyncio.run(run_streams())
