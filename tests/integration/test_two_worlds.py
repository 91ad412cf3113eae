"""A trainer and an engine under one HANGWATCH_JOB: each has a world of its own, and a group between
them carries the weights.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.depth import choose_seed, draw_recorder
from tests.harness.job import LaunchedJob, launch_job
from tests.harness.processes import clean_up_job
from tests.harness.server import Server, run_server
from tests.simulation.waiting import wait_for_value

PROGRAM = Path(__file__).with_name("worlds_program.py")
PLANTED_LINE = next(
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("# PLANTED")
)


@contextlib.contextmanager
def launch_worlds(
    folder: Path, server: Server, behaviour: str, recorder: str, *, launches: int
) -> Iterator[list[LaunchedJob]]:
    """Both worlds in one launch, or each in its own, on one host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    roles: list[list[str]] = [[]] if launches == 1 else [["trainer"], ["engine"]]
    jobs: list[LaunchedJob] = []
    try:
        for role in roles:
            jobs.append(
                launch_job(
                    PROGRAM,
                    4 // launches,
                    folder / "-".join(["launch", *role]),
                    server.url,
                    name="run7",
                    env={
                        "HANGWATCH_RECORDER": recorder,
                        "HANGWATCH_ON_HANG": "abort",
                        "HANGWATCH_RUN_DIR": str(folder / "run"),
                    },
                    args=[behaviour, port, *role],
                )
            )
        yield jobs
    finally:
        (folder / "run").mkdir(exist_ok=True)
        clean_up_job(folder / "run", 15.0)
        for job in jobs:
            job.process.kill()
            job.process.wait()


def list_ranks(server: Server) -> dict[tuple[str, int], dict[str, Any]]:
    items = server.get_items("ranks", job="run7")
    return {(item["job"], item["rank"]): item for item in items if item.get("pid")}


def are_two_pairs(ranks: Collection[tuple[str, int]]) -> bool:
    """Whether two worlds of two ranks each have reported."""
    return sorted(rank for _, rank in ranks) == [0, 0, 1, 1]


@pytest.mark.parametrize("launches", [1, 2])
def test_healthy_worlds_are_shown_and_left_alone(tmp_path: Path, launches: int) -> None:
    recorder = draw_recorder(f"{launches} launches", choose_seed())
    with (
        run_server(tmp_path / "server", "--stall-after", "8", "--on-hang", "abort") as server,
        launch_worlds(tmp_path, server, "healthy", recorder, launches=launches) as jobs,
    ):
        # Until a process joins its world, it has the rank that its launcher gave it.
        ranks = wait_for_value(
            lambda: found if are_two_pairs(found := list_ranks(server)) else None,
            "the ranks of both worlds",
            90.0,
            0.2,
        )
        assert len({item["pid"] for item in ranks.values()}) == 4
        for job in jobs:
            assert job.process.wait(120) == 0, job.stderr
        alerts = [i for i in server.get_items("incidents") if i["severity"] == "alert"]
        assert alerts == []


@pytest.mark.parametrize("launches", [1, 2])
def test_engine_that_takes_no_weights_is_named(tmp_path: Path, launches: int) -> None:
    with (
        run_server(tmp_path / "server", "--stall-after", "6") as server,
        launch_worlds(tmp_path, server, "stuck", "python", launches=launches),
    ):

        def find_alert() -> dict[str, Any] | None:
            incidents = server.get_items("incidents", job="run7")
            return next((i for i in incidents if i["severity"] == "alert"), None)

        alert = wait_for_value(find_alert, "an alert", 120.0, 0.5)
        assert (alert["kind"], alert["culprits"]) == ("missing_rank", [0]), alert["summary"]
        ranks = list_ranks(server)
        culprit = ranks[alert["job"], 0]
        transfer = [group for group in culprit["groups"] if group["name"] == "weights"]
        assert (
            transfer
            and transfer[0]["ranks"] == [0]
            and "rank 0 of job" in transfer[0]["outside"][0]
        )
        assert any(
            frame["line"] == PLANTED_LINE
            for stack in alert["stacks"]
            if stack["ranks"] == [0]
            for frame in stack["frames"]
        )
        assert len([i for i in server.get_items("incidents") if i["severity"] == "alert"]) == 1
