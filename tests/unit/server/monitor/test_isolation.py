"""What fails for one job, incident or row does not stop the others, and readiness reports it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hangwatch.diagnosis import Diagnosis, diagnose
from hangwatch.protocol import heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.http.app_state import AppState
from hangwatch.server.monitor import diagnoser
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from hangwatch.tracking.fleet import ReportingAgent
from tests.simulation.simulated_job import make_hung_job
from tests.simulation.waiting import wait_until


@pytest.fixture
def state(tmp_path: Path) -> Iterator[AppState]:
    store = Store(tmp_path)
    settings = Settings(data_dir=tmp_path, stall_after=1.0)
    yield build_app(settings, store=store, base_url="http://here", token=None)[1]
    store.close()


def report_hung_job(state: AppState, name: str) -> None:
    job = make_hung_job()
    job.name, job.host = name, f"host-{name}"
    beat = heartbeat.Heartbeat(
        host=job.host,
        agent=name,
        number=1,
        full=True,
        processes=job.make_process_updates(0, full=True),
    )
    state.watch.apply_heartbeat(beat)


def test_failed_diagnosis_of_one_job_does_not_stop_the_others(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_one(attempt: Any, *more: Any) -> Diagnosis:
        if attempt.job == "bad":
            raise OverflowError("date value out of range")
        return diagnose(attempt, *more)

    monkeypatch.setattr(diagnoser, "diagnose", fail_for_one)
    for name in ("bad", "good"):
        report_hung_job(state, name)
    asyncio.run(state.watch.loop.run_round())
    assert {record.incident.job for record in state.shared.incidents.records.values()} == {"good"}
    assert state.shared.failures.count == 1
    assert "diagnosis" not in state.list_down_parts(), "the round itself was completed"
    (bad,) = state.find_attempts("bad")
    assert state.describe_job(bad).summary.startswith("Unknown: the diagnosis of this job fails")
    monkeypatch.setattr(diagnoser, "diagnose", diagnose)
    state.shared.has_changes.set()

    def is_diagnosed() -> bool:
        asyncio.run(state.watch.loop.run_round())
        return not state.watch.diagnoser.attempts[bad.key].has_failed

    assert wait_until(is_diagnosed, 30.0)
    assert {record.incident.job for record in state.shared.incidents.records.values()} == {
        "good",
        "bad",
    }


def test_slow_diagnosis_of_one_job_hides_no_other(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job reports all the time, which nobody reads while the slow one is diagnosed."""

    def diagnose_slowly(attempt: Any, *more: Any) -> Diagnosis:
        if attempt.job == "slow":
            time.sleep(1.5)
        return diagnose(attempt, *more)

    monkeypatch.setattr(diagnoser, "diagnose", diagnose_slowly)
    job = make_hung_job(hung_for_s=60.0, name="other", host="other")

    async def report() -> None:
        for number in itertools.count(1):
            updates = job.make_process_updates(0, full=number == 1)
            beat = heartbeat.Heartbeat(host="other", agent="o", number=number, processes=updates)
            state.watch.apply_heartbeat(beat)
            await asyncio.sleep(0.01)

    async def run() -> None:
        report_hung_job(state, "slow")
        reporting = asyncio.create_task(report())
        await asyncio.sleep(0.05)
        await state.watch.loop.run_round()
        reporting.cancel()

    asyncio.run(run())
    assert "other" in {record.incident.job for record in state.shared.incidents.records.values()}


def test_jump_of_an_agents_clock_stops_nothing(state: AppState) -> None:
    job = make_hung_job()
    for number, sent_s in enumerate((10.0, 9e8, 10.5, -9e8, 11.0), start=1):
        beat = heartbeat.Heartbeat(
            host="n",
            agent="a",
            number=number,
            full=True,
            sent_s=sent_s,
            processes=job.make_process_updates(0, full=True),
        )
        state.watch.apply_heartbeat(beat)
        asyncio.run(state.watch.loop.run_round())
    assert state.shared.failures.count == 0


def test_heartbeat_after_a_clock_jump_counts_as_just_sent() -> None:
    agent = ReportingAgent()

    def estimate_delay(sent_s: float, received_at: float) -> float:
        beat = heartbeat.Heartbeat(host="n", agent="a", number=1, sent_s=sent_s)
        return received_at - agent.estimate_sent_at(beat, received_at)

    assert estimate_delay(10.0, 100.0) == 0.0
    assert estimate_delay(11.0, 106.0) == pytest.approx(5.0, abs=0.1), "it was under way for long"
    assert estimate_delay(9e8, 107.0) == 0.0
    assert estimate_delay(12.0, 108.0) == 0.0
    assert estimate_delay(13.0, 112.0) == pytest.approx(3.0, abs=0.1)


def test_row_that_the_database_refuses_is_dropped_alone(state: AppState) -> None:
    for name in ("bad", "good"):
        report_hung_job(state, name)
    (bad,) = state.find_attempts("bad")
    bad.restart = 1 << 63  # SQLite's integers have 64 bits with the sign
    asyncio.run(state.watch.loop.run_round())
    asyncio.run(state.watch.persistence.save_changes())
    assert [attempt.job for attempt in state.watch.persistence.store.load_attempts()] == ["good"]
    assert {record.incident.job for record in state.watch.persistence.store.load_incidents()} == {
        "bad",
        "good",
    }
    assert state.shared.failures.count == 1
    assert state.watch.persistence.is_saved


def test_readiness_reports_a_part_that_fails(tmp_path: Path) -> None:
    store = Store(tmp_path)
    app, state = build_app(
        Settings(data_dir=tmp_path), store=store, base_url="http://here", token="secret"
    )

    async def fail() -> None:
        raise RuntimeError("of a job: secret")

    async def request_states() -> tuple[httpx.Response, httpx.Response]:
        state.watch.loop.last_round_at = state.now()
        state.tasks.start_task("storage and alerts", fail)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            while not state.tasks.list_down():
                await asyncio.sleep(0.01)
            answers = await client.get("/readyz"), await client.get("/healthz")
        await state.tasks.stop_tasks()
        return answers

    ready, health = asyncio.run(request_states())
    store.close()
    assert ready.status_code == 503
    assert "storage and alerts" in ready.json()["detail"]
    assert "secret" not in ready.text
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert list(health.json()["down"]) == ["storage and alerts"]
