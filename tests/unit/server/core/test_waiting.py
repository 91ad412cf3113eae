"""The server's own tasks end when they are told to, whatever comes at the same time."""

from __future__ import annotations

import asyncio

import pytest

from hangwatch.server.core.waiting import within


@pytest.mark.parametrize("passes", range(4))
def test_a_task_ends_that_is_cancelled_as_its_news_come(passes: int) -> None:
    async def scene() -> None:
        news = asyncio.Event()

        async def watch() -> None:
            while True:
                await within(10.0, news)
                news.clear()

        task = asyncio.create_task(watch())
        await asyncio.sleep(0.01)
        news.set()
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        assert task.cancelled()

    asyncio.run(scene())


def test_it_waits_as_long_as_it_should() -> None:
    async def scene() -> None:
        news = asyncio.Event()
        assert not await within(0.01, news)
        asyncio.get_running_loop().call_later(0.01, news.set)
        assert await within(10.0, news)
        assert await within(0.0, news), "set before"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing goes on waiting"

    asyncio.run(scene())
