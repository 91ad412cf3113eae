"""A real job with a straggler and a healthy one, as the API, the command line, the metrics and a
browser show them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hangwatch.agent.node.reporting.calls import PerformanceReporter
from hangwatch.agent.node.reporting.uplink import HeartbeatPost, Uplink
from hangwatch.agent.transport.client import ServerTarget
from hangwatch.protocol import codec, heartbeat
from tests.harness import job, native
from tests.harness.browser import get_text, list_console_errors, open_browser, wait_until_shown
from tests.harness.processes import clean_environment
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).with_name("performance_program.py")
GROUP_NAME = '<img src=x onerror=alert(1)> & "dp"'
NAMED_WITHIN_S = 60.0  # on a machine that does other things as well


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJobs:
    """A server with enough reports of both jobs, which still run."""

    server: Server
    slow_groups: list[dict[str, Any]]
    healthy_groups: list[dict[str, Any]]


@pytest.fixture(scope="module")
def measured_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredJobs]:
    folder = tmp_path_factory.mktemp("performance")
    env = native.recorder_env("native", tmp_path_factory) | {"FINISH": str(folder / "FINISH")}
    with running_server(folder / "server", stall_after_s=60) as server:
        slow_env = env | {"STRAGGLER": "2"}
        with (
            job.running_job(
                PROGRAM,
                3,
                folder / "slow",
                server.url,
                name="slow",
                env=slow_env,
                agent_exit_timeout_s=0,
            ) as slow,
            job.running_job(
                PROGRAM,
                3,
                folder / "well",
                server.url,
                name="well",
                env=env,
                agent_exit_timeout_s=0,
            ) as well,
        ):

            def is_straggler_named() -> bool:
                performance = server.get_items("performance", job="slow")
                return (
                    bool(performance)
                    and performance[0]["straggler"] is not None
                    and len(server.get_items("performance", job="well")) > 1
                )

            def are_calls_compared() -> bool:
                groups = server.get_items("performance", job="well")
                return all(group["arrivals"]["compared"] > 30 for group in groups)

            assert wait_until(is_straggler_named, NAMED_WITHIN_S), (
                f"{server.get_items('performance', job='slow')} {slow.stderr} {well.stderr}"
            )
            assert wait_until(are_calls_compared, NAMED_WITHIN_S)
            yield MeasuredJobs(
                server=server,
                slow_groups=server.get_items("performance", job="slow"),
                healthy_groups=server.get_items("performance", job="well"),
            )
            (folder / "FINISH").touch()
            assert (slow.process.wait(30), well.process.wait(30)) == (0, 0)
    assert server.read_log().count("ERROR") == 0


def test_straggler_is_listed_first(measured_jobs: MeasuredJobs) -> None:
    first = measured_jobs.slow_groups[0]
    assert first["group"]["desc"] == GROUP_NAME
    late = first["straggler"]
    assert late["ranks"] == first["arrivals"]["last"][0]["ranks"] == [2]
    assert late["share"] > 0.75 and 0.04 < late["lag_s"] < 0.12
    assert 0.3 < late["waited_share"] <= 1.0
    (row,) = first["calls"]
    assert (row["op"], row["size_from"]) == ("all_reduce", 16384)
    assert row["bytes"] == pytest.approx(row["calls"] * 16384, abs=16384), (
        "means over ranks, one of which may have reported more"
    )
    assert row["wait"]["p50_s"] > 0.03, "two of three ranks wait"


def test_latency_and_bandwidth_match_calls(measured_jobs: MeasuredJobs) -> None:
    (row,) = measured_jobs.slow_groups[0]["calls"]
    assert row["latency"]["count"] > 0
    assert row["latency"]["p95_s"] > 0.04, "a waiting rank is in the call for that long"
    assert row["transfer"]["p50_s"] < 0.04 < row["latency"]["max_s"], (
        "after the last arrival no rank waits"
    )
    assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 4 / 3, rel=0.01)
    assert row["algbw_gbs"] == pytest.approx(16384 / row["transfer"]["p50_s"] / 1e9, rel=0.02)


def test_healthy_job_has_no_straggler_and_no_incident(measured_jobs: MeasuredJobs) -> None:
    assert [g["straggler"] for g in measured_jobs.healthy_groups] == [None, None]
    assert measured_jobs.server.get_items("incidents") == []


def test_heartbeats_estimate_clocks_within_milliseconds(measured_jobs: MeasuredJobs) -> None:
    """Server and agent share one clock here, so the bounds must contain 0."""
    reporter, uplink = (
        PerformanceReporter(),
        Uplink([ServerTarget.from_url(measured_jobs.server.url)], lambda: None),
    )
    try:
        for number in range(1, 9):
            beat = heartbeat.Heartbeat(host="here", agent="clock", number=number)
            outcome = uplink.execute_order(HeartbeatPost(codec.encode_message(beat)))
            reporter.apply_outcome(outcome)
            assert outcome.reply is not None
            low, high = reporter.clock_offset.bounds or (1.0, 0.0)
            assert low <= 0 <= high
    finally:
        uplink.close()
    assert high - low < 0.03
    assert {group["arrivals"]["uncertainty_s"] for group in measured_jobs.slow_groups} == {0}, (
        "one host, one clock"
    )


def test_performance_history(measured_jobs: MeasuredJobs) -> None:
    points = [p for series in measured_jobs.slow_groups[0]["series"] for p in series["points"]]
    assert sum(p["calls"] for p in points) > 0
    assert max(p["spread_p95_s"] or 0 for p in points) > 0.03


def test_metrics(measured_jobs: MeasuredJobs) -> None:
    metrics_text = httpx.get(f"{measured_jobs.server.url}/metrics", trust_env=False).text
    lines = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in metrics_text.splitlines()
        if not line.startswith("#")
    }
    assert lines['hangwatch_straggler_waited_ratio{training_job="slow"}'] > 0.3
    assert lines['hangwatch_straggler_waited_ratio{training_job="well"}'] == 0
    assert lines['hangwatch_calls_total{op="all_reduce",training_job="slow"}'] > 100
    assert lines['hangwatch_call_seconds_bucket{le="+Inf",op="all_reduce",training_job="slow"}'] > 0


def run_perf(server: Server, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hangwatch")), "perf", "--url", server.url, *more]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, env=clean_environment(), check=False
    )


def test_perf_command(measured_jobs: MeasuredJobs) -> None:
    shown = run_perf(measured_jobs.server, "--job", "slow")
    assert shown.returncode == 0, shown.stderr
    assert "rank 2 comes last in" in shown.stdout.replace("\n  ", " ")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "No rank is a straggler." in run_perf(measured_jobs.server, "--job", "well").stdout
    listed = json.loads(run_perf(measured_jobs.server, "--job", "slow", "--json").stdout)
    assert listed["items"][0]["straggler"]["ranks"] == [2]
    unknown = run_perf(measured_jobs.server, "--job", "unknown")
    assert unknown.returncode == 1 and "known jobs: " in unknown.stderr


def test_performance_page(measured_jobs: MeasuredJobs, tmp_path: Path) -> None:
    with open_browser(tmp_path / "profile") as browser:
        browser.get(f"{measured_jobs.server.url}/ranks?job=slow")
        wait_until_shown(browser, "#verdict .about a", "rank 2 comes last in")
        browser.find_element("css selector", "#verdict .about a").click()
        assert "rank 2 comes last in" in wait_until_shown(browser, "#verdict h1", "rank 2")
        shown = wait_until_shown(browser, "#groups", "Late ranks")
        assert GROUP_NAME in shown, "escaped, not interpreted"
        assert browser.execute_script("return document.querySelectorAll('#groups img').length") == 0
        assert (
            browser.execute_script("return document.querySelectorAll('svg.plot path').length") > 0
        )
        assert wait_until(lambda: get_text(browser, "#groups") != shown, 30.0), (
            "the page updates itself"
        )
        browser.get(f"{measured_jobs.server.url}/performance?job=well")
        wait_until_shown(browser, "#verdict h1", "No stragglers")
        assert list_console_errors(browser) == []
