"""Background tasks that fail are started again, and readiness reports them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hangwatch.server.core.supervision import FailureLog, TaskSupervisor


def test_failed_task_is_counted_and_started_again() -> None:
    async def run() -> None:
        runs: list[int] = []

        async def fail_twice() -> None:
            runs.append(len(runs))
            if len(runs) <= 2:
                raise OverflowError("too large")
            await asyncio.Event().wait()

        async def run_forever() -> None:
            await asyncio.Event().wait()

        supervisor = TaskSupervisor()
        supervisor.start_task("storage", fail_twice)
        supervisor.start_task("diagnosis", run_forever)
        while len(runs) < 3:
            await asyncio.sleep(0.01)
        assert supervisor.list_down() == ["storage"]
        assert supervisor.count_failures() == {"storage": 2, "diagnosis": 0}
        await supervisor.stop_tasks()

    asyncio.run(asyncio.wait_for(run(), 10.0))


def test_part_is_up_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangwatch.server.core.supervision.RECOVERED_AFTER_S", 0.3)

    async def run() -> None:
        has_failed = False

        async def fail_once() -> None:
            nonlocal has_failed
            if not has_failed:
                has_failed = True
                raise ValueError("once")
            await asyncio.Event().wait()

        supervisor = TaskSupervisor()
        supervisor.start_task("storage", fail_once)
        while not supervisor.list_down():
            await asyncio.sleep(0.01)
        while supervisor.list_down():
            await asyncio.sleep(0.01)
        await supervisor.stop_tasks()

    asyncio.run(asyncio.wait_for(run(), 10.0))


def test_isolated_failures_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    done: list[int] = []
    with caplog.at_level(logging.ERROR, "hangwatch"):
        for item in (0, 1, 0, 2):
            with failures.isolate(f"item {item}"):
                done.append(1 // item)
    assert (done, failures.count) == ([1, 0], 2)
    assert [record.getMessage().partition(" failed")[0] for record in caplog.records] == ["item 0"]
