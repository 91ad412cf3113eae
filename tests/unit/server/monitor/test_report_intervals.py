"""How often hosts report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.model.limits import Limits
from hangwatch.protocol import heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core.load import Load
from hangwatch.server.http.app_state import AppState
from hangwatch.server.ingest.agent_registry import AgentRegistry
from hangwatch.server.monitor.report_scheduler import ReportIntervals
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store


def make_intervals(stall_after_s: float, agent_count: int = 1) -> ReportIntervals:
    agents = AgentRegistry()
    for number in range(agent_count):
        beat = heartbeat.Heartbeat(host=f"n{number}", agent=f"a{number}", number=1)
        agents.record_heartbeat(beat, 0.0)
    limits = Limits(stall_after_s=stall_after_s)
    return ReportIntervals(configured_limits=limits, load=Load(), agents=agents)


@pytest.mark.parametrize(
    ("stall_after_s", "agent_count", "expected_s"),
    [(60.0, 1, 2.0), (4.0, 1, 1.0), (2.0, 1, None), (60.0, 800, 2.0), (60.0, 5000, None)],
)
def test_steady_hosts_report_less_often(
    stall_after_s: float, agent_count: int, expected_s: float | None
) -> None:
    intervals = make_intervals(stall_after_s, agent_count)
    assert intervals.steady_s == expected_s
    if expected_s is not None:
        assert 2 * expected_s <= intervals.lost_after_s


@pytest.fixture
def live(tmp_path: Path) -> Iterator[AppState]:
    store = Store(tmp_path)
    yield build_app(Settings(data_dir=tmp_path), store=store, base_url="http://here", token=None)[1]
    store.close()


def test_host_of_a_suspect_is_not_told_to_report_less_often(live: AppState) -> None:
    beat = heartbeat.Heartbeat(host="n0", agent="a0", number=1)
    assert live.watch.heartbeats.apply_heartbeat(beat).steady_s == 2.0
    live.watch.heartbeats.report_scheduler.suspect_agents(["a0"], time.monotonic())
    assert live.watch.heartbeats.apply_heartbeat(beat).steady_s is None
