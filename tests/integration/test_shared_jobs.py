"""Two servers share a database and the jobs of real node agents; one of them is killed, or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.transport.client import order_targets, parse_targets
from tests.harness import job
from tests.harness.postgres import clear_database
from tests.harness.server import Server, run_server
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).parents[1] / "zoo" / "leaves_for_own_code" / "program.py"
JOB = "job"
TAKEOVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Pair:
    """``first`` is the one that the job's node agents report to while it answers."""

    first: Server
    second: Server

    @property
    def url(self) -> str:
        return f"{self.second.url},{self.first.url}"


@pytest.fixture
def pair(tmp_path: Path, postgres: str) -> Iterator[Pair]:
    clear_database(postgres)
    flags = ("--host", "127.0.0.1", "--stall-after", "3", "--database", postgres)
    with (
        run_server(tmp_path / "one", *flags, "--name", "one") as one,
        run_server(tmp_path / "two", *flags, "--name", "two") as two,
    ):
        servers = {server.url: server for server in (one, two)}
        order = order_targets(parse_targets(",".join(servers)), JOB)
        yield Pair(*(servers[target.base_url] for target in order))


def list_incidents(server: Server) -> list[dict[str, Any]]:
    return server.get_items("incidents", job=JOB)


def watches_job(server: Server) -> bool:
    ranks = server.get_items("ranks", job=JOB)
    return len(ranks) == 2 and all((r["last_seen_s"] or 99.0) < 3.0 for r in ranks)


def wait_for_alert(server: Server) -> dict[str, Any]:
    assert wait_until(lambda: "ALERT job job" in server.read_log(), 90.0), server.read_log()
    [opened] = list_incidents(server)
    return opened


def check_taken_over(server: Server, opened: dict[str, Any]) -> None:
    """The incident is the same, and is not announced again."""
    [taken] = list_incidents(server)
    assert (taken["id"], taken["status"], taken["culprits"]) == (opened["id"], "open", [1])
    assert "ALERT" not in server.read_log()


def test_killed_server_is_replaced(tmp_path: Path, pair: Pair) -> None:
    first, second = pair.first, pair.second
    with job.running_job(PROGRAM, 2, tmp_path / "job", pair.url, agent_exit_timeout_s=40.0):
        assert wait_until(lambda: watches_job(first), 60.0), first.read_log()
        assert not watches_job(second)
        first.stop(signal.SIGKILL)
        opened = wait_for_alert(second)
        assert (opened["kind"], opened["culprits"]) == ("missing_rank", [1])
        # It comes back, and leaves the job where it is.
        first.start()
        assert not wait_until(lambda: watches_job(first), 3.0)
        assert [incident["id"] for incident in list_incidents(first)] == [opened["id"]]
        second.stop(signal.SIGKILL)
        assert wait_until(lambda: watches_job(first), TAKEOVER_S), first.read_log()
        time.sleep(5.0)  # another incident would have been opened by then
        check_taken_over(first, opened)


def test_stopped_server_gives_the_job_up(tmp_path: Path, pair: Pair) -> None:
    with job.running_job(PROGRAM, 2, tmp_path / "job", pair.url, agent_exit_timeout_s=40.0):
        opened = wait_for_alert(pair.first)
        os.kill(pair.first.pid, signal.SIGSTOP)
        try:
            assert wait_until(lambda: watches_job(pair.second), 3 * TAKEOVER_S)
            check_taken_over(pair.second, opened)
        finally:
            os.kill(pair.first.pid, signal.SIGCONT)
        assert wait_until(lambda: "has taken job job over" in pair.first.read_log(), TAKEOVER_S)
        time.sleep(3.0)
        assert watches_job(pair.second) and not watches_job(pair.first)
        check_taken_over(pair.second, opened)
