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

from hangwatch.agent.node.reporting.performance import Reporter
from hangwatch.agent.node.reporting.uplink import Target, Uplink
from hangwatch.protocol import heartbeat
from tests.harness import job, native
from tests.harness.browser import browsing, complaints, text, until_shown
from tests.harness.processes import environment, eventually
from tests.harness.server import Server, serving

PROGRAM = Path(__file__).with_name("performance_program.py")
NAME = '<img src=x onerror=alert(1)> & "dp"'
NAMED_S = 60.0  # on a machine that does other things as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A server that has heard enough of both jobs, which still run."""

    server: Server
    slow: list[dict[str, Any]]
    well: list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("performance")
    env = native.use("native", tmp_path_factory) | {"FINISH": str(folder / "FINISH")}
    with serving(folder / "server", stall_after=60) as server:
        slow_env = env | {"STRAGGLER": "2"}
        with (
            job.running(
                PROGRAM, 3, folder / "slow", server.url, name="slow", env=slow_env, patience_s=0
            ) as slow,
            job.running(
                PROGRAM, 3, folder / "well", server.url, name="well", env=env, patience_s=0
            ) as well,
        ):

            def named() -> bool:
                found = server.items("performance", job="slow")
                return (
                    bool(found)
                    and found[0]["straggler"] is not None
                    and len(server.items("performance", job="well")) > 1
                )

            def compared() -> bool:
                return (
                    min(g["arrivals"]["compared"] for g in server.items("performance", job="well"))
                    > 30
                )

            assert eventually(named, NAMED_S), (
                f"{server.items('performance', job='slow')} {slow.stderr} {well.stderr}"
            )
            assert eventually(compared, NAMED_S)
            yield Seen(
                server=server,
                slow=server.items("performance", job="slow"),
                well=server.items("performance", job="well"),
            )
            (folder / "FINISH").touch()
            assert (slow.process.wait(30), well.process.wait(30)) == (0, 0)
    assert server.log().count("ERROR") == 0


def test_the_straggler_comes_first(seen: Seen) -> None:
    first = seen.slow[0]
    assert first["group"]["desc"] == NAME
    late = first["straggler"]
    assert late["ranks"] == first["arrivals"]["last"][0]["ranks"] == [2]
    assert late["share"] > 0.75 and 0.04 < late["lag_s"] < 0.12
    assert 0.3 < late["waited_share"] <= 1.0
    (row,) = first["calls"]
    assert (row["op"], row["size_from"]) == ("all_reduce", 16384)
    assert row["bytes"] == pytest.approx(row["calls"] * 16384, abs=16384), (
        "means over ranks, of which one may have told more"
    )
    assert row["wait"]["p50_s"] > 0.03, "two of three ranks wait"


def test_latency_and_bandwidth_are_those_of_the_calls(seen: Seen) -> None:
    (row,) = seen.slow[0]["calls"]
    assert row["latency"]["count"] > 0
    assert row["latency"]["p95_s"] > 0.04, "who waits is in the call so long"
    assert row["transfer"]["p50_s"] < 0.04 < row["latency"]["max_s"], (
        "from the last arrival on nobody is waited for"
    )
    assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 4 / 3, rel=0.01)
    assert row["algbw_gbs"] == pytest.approx(16384 / row["transfer"]["p50_s"] / 1e9, rel=0.02)


def test_a_healthy_job_names_nobody_and_neither_opens_an_incident(seen: Seen) -> None:
    assert [g["straggler"] for g in seen.well] == [None, None]
    assert seen.server.items("incidents") == []


def test_clocks_are_known_by_heartbeats_to_a_few_milliseconds(seen: Seen) -> None:
    """Here they are one and the same: the difference that is bound to be found is none."""
    reporter, uplink = Reporter(), Uplink(Target.parse(seen.server.url), lambda: None)
    try:
        for number in range(1, 9):
            outcome = uplink.send(
                number,
                heartbeat.encode_message(
                    heartbeat.Heartbeat(host="here", agent="clock", number=number)
                ),
            )
            reporter.answered(outcome)
            assert outcome.reply is not None
            low, high = reporter.clock or (1.0, 0.0)
            assert low <= 0 <= high
    finally:
        uplink.close()
    assert high - low < 0.03
    assert {group["arrivals"]["uncertainty_s"] for group in seen.slow} == {0}, "one host, one clock"


def test_the_course_is_told(seen: Seen) -> None:
    points = [p for series in seen.slow[0]["series"] for p in series["points"]]
    assert sum(p["calls"] for p in points) > 0
    assert max(p["spread_p95_s"] or 0 for p in points) > 0.03


def test_metrics(seen: Seen) -> None:
    told = httpx.get(f"{seen.server.url}/metrics", trust_env=False).text
    lines = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in told.splitlines()
        if not line.startswith("#")
    }
    assert lines['hangwatch_straggler_waited_ratio{training_job="slow"}'] > 0.3
    assert lines['hangwatch_straggler_waited_ratio{training_job="well"}'] == 0
    assert lines['hangwatch_calls_total{op="all_reduce",training_job="slow"}'] > 100
    assert lines['hangwatch_call_seconds_bucket{le="+Inf",op="all_reduce",training_job="slow"}'] > 0


def perf(server: Server, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hangwatch")), "perf", "--url", server.url, *more]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, env=environment(), check=False
    )


def test_in_a_terminal(seen: Seen) -> None:
    shown = perf(seen.server, "--job", "slow")
    assert shown.returncode == 0, shown.stderr
    assert "rank 2 comes last in" in shown.stdout.replace("\n  ", " ")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "No rank is a straggler." in perf(seen.server, "--job", "well").stdout
    told = json.loads(perf(seen.server, "--job", "slow", "--json").stdout)
    assert told["items"][0]["straggler"]["ranks"] == [2]
    unknown = perf(seen.server, "--job", "nobody")
    assert unknown.returncode == 1 and "known are: " in unknown.stderr


def test_in_a_browser(seen: Seen, tmp_path: Path) -> None:
    with browsing(tmp_path / "profile") as browser:
        browser.get(f"{seen.server.url}/ranks?job=slow")
        until_shown(browser, "#verdict .about a", "rank 2 comes last in")
        browser.find_element("css selector", "#verdict .about a").click()
        assert "rank 2 comes last in" in until_shown(browser, "#verdict h1", "rank 2")
        shown = until_shown(browser, "#groups", "Who comes last")
        assert NAME in shown, "as it was written"
        assert browser.execute_script("return document.querySelectorAll('#groups img').length") == 0
        assert (
            browser.execute_script("return document.querySelectorAll('svg.plot path').length") > 0
        )
        assert eventually(lambda: text(browser, "#groups") != shown, 30.0), "it is kept up to date"
        browser.get(f"{seen.server.url}/performance?job=well")
        until_shown(browser, "#verdict h1", "No rank is a straggler")
        assert complaints(browser) == []
