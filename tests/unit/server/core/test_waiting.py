"""The server's own tasks end when they are cancelled, whatever happens at the same time."""

from __future__ import annotations

import asyncio

import pytest

from hangwatch.server.core.events import wait_for_event


@pytest.mark.parametrize("passes", range(4))
def test_task_cancelled_during_change_ends(passes: int) -> None:
    async def run_scenario() -> None:
        changes = asyncio.Event()

        async def wait_for_changes() -> None:
            while True:
                await wait_for_event(10.0, changes)
                changes.clear()

        task = asyncio.create_task(wait_for_changes())
        await asyncio.sleep(0.01)
        changes.set()
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        assert task.cancelled()

    asyncio.run(run_scenario())


def test_wait_lasts_its_timeout() -> None:
    async def run_scenario() -> None:
        changes = asyncio.Event()
        assert not await wait_for_event(0.01, changes)
        asyncio.get_running_loop().call_later(0.01, changes.set)
        assert await wait_for_event(10.0, changes)
        assert await wait_for_event(0.0, changes), "set before"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing goes on waiting"

    asyncio.run(run_scenario())
