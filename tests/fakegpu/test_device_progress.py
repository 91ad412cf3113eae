"""hangwatch on torch's real ProcessGroupNCCL: how far each rank's device has come, in the API."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakegpu.launch import start_job
from tests.fakegpu.test_nccl import FAULTY, kill_job
from tests.harness.server import Server
from tests.simulation.waiting import wait_until

pytestmark = pytest.mark.fakegpu

Counters = tuple[int, int | None, int]  # enqueued, started, completed
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}
STUCK_RANK = 1  # of faulty.py


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "server", flags=("--stall-after", "5"))
    running.start()
    yield running
    running.stop()


@contextmanager
def watched_job(
    server: Server, torch_version: str, case: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    watched = {"HANGWATCH_URL": server.loopback_url, "HANGWATCH_JOB": "job", **environment}
    job = start_job(torch_version, 2, FAULTY, [case], environment=watched)
    try:
        yield job
    finally:
        kill_job(job)
        job.communicate()


def read_counters(server: Server) -> dict[tuple[int, str], Counters]:
    """The counters by rank and name of the group, for the groups whose device is known."""
    counters: dict[tuple[int, str], Counters] = {}
    for rank in server.get("ranks")["items"]:
        for group in rank["groups"]:
            device: dict[str, Any] | None = group["device"]
            if device is not None:
                assert device["source"] == "flight recorder"
                position = (device["enqueued"], device["started"], device["completed"])
                counters[rank["rank"], group["name"]] = position
    return counters


def test_stuck_kernel_shows_as_lag_of_its_device(torch_version: str, server: Server) -> None:
    expected: dict[tuple[int, str], Counters] = {
        (0, "0"): (6, 6, 5),
        (STUCK_RANK, "0"): (6, 5, 5),
    }
    environment = {**RECORDER, "TORCH_NCCL_ENABLE_TIMING": "1"}
    with watched_job(server, torch_version, "endless_kernel", **environment):
        wait_until(lambda: expected.items() <= read_counters(server).items(), 60, 0.5)
        counters = read_counters(server)
    assert expected.items() <= counters.items()
    # Each rank is in a group of its own too: number 1 in its backend, whatever the group's name.
    assert [value for key, value in sorted(counters.items()) if key[1] != "0"] == [(6, 5, 5)] * 2


def test_start_is_unknown_without_timing(torch_version: str, server: Server) -> None:
    with watched_job(server, torch_version, "stall", **RECORDER):
        assert wait_until(lambda: (0, "0") in read_counters(server), 60, 0.5)
        assert read_counters(server)[0, "0"][1] is None


def test_job_names_variable_if_devices_are_not_counted(torch_version: str, server: Server) -> None:
    def has_variable() -> bool:
        jobs = server.get("jobs")["items"]
        return any("TORCH_FR_BUFFER_SIZE=2000" in job["summary"] for job in jobs)

    with watched_job(server, torch_version, "stall", TORCH_FR_BUFFER_SIZE="0"):
        assert wait_until(has_variable, 60, 0.5), server.get("jobs")
        assert read_counters(server) == {}
