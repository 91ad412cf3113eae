"""`hangwatch report` on a job of 1,024 ranks: one file that a browser shows without any request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.model.calls import Site
from hangwatch.model.ranks import ExceptionInfo
from tests.harness.browser import (
    get_text,
    list_accessibility_violations,
    list_console_errors,
    open_browser,
    wait_until_shown,
)
from tests.harness.processes import clean_environment
from tests.harness.server import Server, running_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedJob
from tests.simulation.waiting import wait_for_value

RANKS = 1024
MAX_BYTES = 1_000_000
HOSTILE_NAME = '<script>document.title = "run"</script>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an incident in which 1,023 ranks wait."""
    with running_server(tmp_path_factory.mktemp("server")) as running:
        job = SimulatedJob(ranks=RANKS, name=HOSTILE_NAME)
        reporter = JobReporter.connect(running.url, job)
        with reporter.reporting():
            wait_for_value(lambda: running.get_items("jobs"), "the job", 30.0)
            job.hang_ranks(77)

            def is_complete() -> bool:
                items = running.get_items("incidents", job=job.name)
                incidents = [running.get(f"incidents/{item['id']}") for item in items]
                return any(i["stacks"] and len(i["waiting"]) == RANKS - 1 for i in incidents)

            wait_for_value(is_complete, "an incident with stacks, in which all others wait", 60.0)
            yield running


def run_report(server: Server, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "hangwatch.agent.cli", "report", "--url", server.url, *arguments],
        env=clean_environment(),
        cwd=cwd,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_report_is_shown_without_any_request(server: Server, tmp_path: Path) -> None:
    done = run_report(server, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / done.stdout.decode().strip()
    assert path.stat().st_size < MAX_BYTES
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and "@import" not in text
    with open_browser(tmp_path / "profile") as browser:
        browser.get(path.as_uri())
        verdict = wait_until_shown(browser, "#verdict h1", "rank 77 has not entered all_reduce")
        assert "1023 ranks wait" in verdict
        assert "load_batch" in get_text(browser, "#stacks")
        assert HOSTILE_NAME in get_text(browser, "#verdict dl"), "a job's name is text"
        requested = browser.execute_script(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        assert requested == []
        assert list_accessibility_violations(browser) == []
        assert list_console_errors(browser) == []


def test_report_to_stdout_and_to_a_folder(server: Server, tmp_path: Path) -> None:
    (item,) = server.get_items("incidents")
    prefix = item["id"][:20]
    to_stdout = run_report(server, prefix, "--out", "-", cwd=tmp_path)
    assert to_stdout.stdout.startswith(b"<!doctype html>")
    assert list(tmp_path.iterdir()) == []
    to_folder = run_report(server, prefix, "--out", str(tmp_path), "--json", cwd=tmp_path)
    assert to_folder.returncode == 0
    (path,) = tmp_path.iterdir()
    assert path.name == f"hangwatch-{item['id']}.html"
    assert path.name.encode() in to_folder.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOSUCH"], "no incident has an id that begins with 'NOSUCH'"),
        (["--out", "no/such/folder/report.html"], "cannot write no/such/folder/report.html"),
    ],
)
def test_errors_teach(server: Server, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run_report(server, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.decode()


def test_report_of_an_exception(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server:
        job = SimulatedJob(
            ranks=4,
            exception=ExceptionInfo(
                type="ValueError",
                message="no such shard",
                site=Site(file="/u/train.py", line=44, function="load_batch"),
            ),
        )
        with JobReporter.connect(server.url, job).reporting():
            wait_for_value(lambda: server.get_items("jobs"), "the job", 30.0)
            job.hang_ranks(2)
            wait_for_value(lambda: server.get_items("incidents"), "an incident", 60.0)
            done = run_report(server, "--out", "-", cwd=tmp_path)
    assert b"no such shard" in done.stdout
