"""Metrics of a large fleet: their values, and that their number does not grow with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from hangwatch.model.calls import StreamKind
from hangwatch.protocol import heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.http.app_state import AppState
from hangwatch.server.http.metrics import MAX_JOBS_SHOWN, StateCollector
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store


@pytest.fixture
def state(tmp_path: Path) -> AppState:
    store = Store(tmp_path)
    _, state = build_app(
        Settings(data_dir=tmp_path), store=store, base_url="http://here", token=None
    )
    return state


def make_heartbeat(job: str, host: str, ranks: range, world: int) -> heartbeat.Heartbeat:
    identity = heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks=f"0-{world - 1}"
    )
    processes = tuple(
        heartbeat.ProcessUpdate(
            key=f"{rank}-{job}", lifecycle=3, step=7, dropped=1,
            identity=heartbeat.ProcessIdentity(job=job, rank=rank, world_size=world, pid=rank, start_ticks=1),
            streams=(heartbeat.StreamUpdate(uid=1, identity=identity, entered=5, completed=5),),
        )
        for rank in ranks
    )  # fmt: skip
    cost = heartbeat.AgentCost(cpu_s=2.0, memory=30_000_000, dropped=3)
    return heartbeat.Heartbeat(
        host=host, agent=f"{host}-{job}", number=1, full=True, processes=processes, cost=cost
    )


def read_metrics(state: AppState) -> dict[str, float]:
    lines = generate_latest(StateCollector(state)).decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def test_metrics_size_for_16384_ranks(state: AppState) -> None:
    for host in range(2048):
        state.watch.apply_heartbeat(
            make_heartbeat("large", f"n{host}", range(8 * host, 8 * host + 8), 16384)
        )
    began = time.monotonic()
    metrics = read_metrics(state)
    assert time.monotonic() - began < 10
    assert metrics['hangwatch_ranks{state="running",training_job="large"}'] == 16384
    assert metrics['hangwatch_collectives_total{training_job="large"}'] == 5 * 16384
    assert metrics['hangwatch_records_dropped_total{training_job="large"}'] == 16384
    assert metrics['hangwatch_job_step{training_job="large"}'] == 7
    assert metrics['hangwatch_stall_seconds{training_job="large"}'] == 0
    assert 0 <= metrics['hangwatch_heartbeat_age_seconds{training_job="large"}'] < 60
    assert metrics["hangwatch_agents"] == 2048
    assert metrics["hangwatch_agents_cpu_seconds_total"] == 4096
    assert metrics["hangwatch_agent_memory_max_bytes"] == 30_000_000
    assert metrics["hangwatch_agents_answers_dropped"] == 3 * 2048
    assert metrics["process_resident_memory_bytes"] > 0
    assert len(metrics) < 100
    answers = [
        state.watch.apply_heartbeat(
            heartbeat.Heartbeat(host=f"n{host}", agent=f"n{host}-large", number=2)
        )
        for host in range(2048)
    ]
    until = [answer.interval_s for answer in answers]  # each host's own turn: some soon, some late
    assert sum(until) / 2048 > 2.0, "many agents get a longer report interval"
    assert max(until) < 5.05, "but not so seldom that they seem lost"


def test_old_jobs_share_one_label(state: AppState) -> None:
    for number in range(MAX_JOBS_SHOWN + 50):
        state.watch.apply_heartbeat(make_heartbeat(f"job{number}", "n", range(1), 1))
    metrics = read_metrics(state)
    assert metrics['hangwatch_ranks{state="running",training_job="(others)"}'] == 50
    assert (
        sum(name.startswith("hangwatch_ranks{") and 'state="running"' in name for name in metrics)
        == MAX_JOBS_SHOWN + 1
    )
    assert 'hangwatch_job_step{training_job="(others)"}' not in metrics
