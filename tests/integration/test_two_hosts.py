"""A job on two hosts whose cables are pulled, whose packets vanish, whose clocks disagree, and of
which one goes down.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts import DATA, SERVER, TwoHostNetwork, create_network, namespaces_unavailable
from tests.harness.job import LaunchedJob
from tests.harness.processes import clean_up_job, find_job_processes, kill_processes
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

_namespaces_refused = namespaces_unavailable()
pytestmark = pytest.mark.skipif(_namespaces_refused is not None, reason=str(_namespaces_refused))

PROGRAM = Path(__file__).with_name("hosts_program.py")
STALL_AFTER_S = 4.0
VERDICT_WITHIN_S = STALL_AFTER_S + 5.0
# A node agent or a job must continue within these seconds once a cable is back.
RECOVERY_WITHIN_S = 30.0
HOUR_S = 3600.0

_CLOCK_AHEAD_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, at);
    if (!status && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += 3600;
    return status;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class TwoHostScenario:
    """Two hosts, a server, and a job of `ranks` on each host."""

    def __init__(self, net: TwoHostNetwork, server: Server, ranks: int) -> None:
        self.network, self.server, self.ranks = net, server, ranks
        self.jobs: list[LaunchedJob] = []

    def launch_jobs(self, folder: Path, *env: dict[str, str]) -> None:
        self.jobs = self.network.launch_jobs(
            PROGRAM, self.ranks, folder, self.server.url, env=env or ({}, {})
        )

    def list_incidents(self, status: str = "open") -> list[dict[str, Any]]:
        return [
            self.server.get(f"incidents/{i['id']}")
            for i in self.server.get_items("incidents", job="job", status=status)
        ]

    def count_steps(self) -> dict[int, int]:
        """The number of collectives by rank, of ranks on reporting hosts."""
        ranks = self.server.get_items("ranks", job="job")
        return {
            r["rank"]: r["groups"][0]["entered"]
            for r in ranks
            if r["groups"] and r["last_seen_s"] < 2.0
        }

    def wait_for_progress(self) -> bool:
        """Waits until all ranks report and make calls."""
        before = self.count_steps()

        def has_moved() -> bool:
            now = self.count_steps()
            return len(now) == 2 * self.ranks and all(
                now[rank] > before.get(rank, 0) for rank in now
            )

        return wait_until(has_moved, 90.0 if not before else RECOVERY_WITHIN_S)

    def wait_for_incident(self) -> dict[str, Any]:
        """The only open incident, once there is one."""
        assert wait_until(lambda: bool(self.list_incidents()), VERDICT_WITHIN_S), (
            "no incident in time"
        )
        (incident,) = self.list_incidents()
        return incident

    def incidents_after(self, seconds: float) -> list[dict[str, Any]]:
        """The open incidents after that time."""
        wait_until(lambda: False, seconds)
        return self.list_incidents()

    def wait_until_resolved(self) -> bool:
        return wait_until(lambda: not self.list_incidents(), RECOVERY_WITHIN_S)

    def power_off(self, host: int) -> None:
        kill_processes(set(find_job_processes(self.jobs[host].run_dir)))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwoHostScenario]:
    with (
        create_network() as net,
        running_server(tmp_path / "server", STALL_AFTER_S, net.server) as server,
    ):
        made = TwoHostScenario(net, server, request.param)
        try:
            yield made
        finally:
            for job in made.jobs:
                clean_up_job(job.run_dir, 0.0)
                job.process.wait()
    assert [line for job in made.jobs for line in find_job_processes(job.run_dir).values()] == []


def describe_incident(incident: dict[str, Any]) -> tuple[str, str, list[int], list[int]]:
    return incident["kind"], incident["severity"], incident["culprits"], incident["waiting"]


@pytest.mark.parametrize("scene", [4], indirect=True)
def test_network_failures_between_hosts(scene: TwoHostScenario, tmp_path: Path) -> None:
    near, far = [0, 1, 2, 3], [4, 5, 6, 7]
    scene.launch_jobs(tmp_path)
    assert scene.wait_for_progress()

    # Only the way to the server is cut, and the job is well: that of one host for a moment, of
    # both, and of one for long.
    scene.network.cut_cables(1, SERVER)
    scene.incidents_after(2.5)
    scene.network.cut_cables(0, SERVER)
    scene.incidents_after(STALL_AFTER_S + 2.0)
    scene.network.restore_cables(0, SERVER)
    assert wait_until(lambda: len(scene.count_steps()) == 4, RECOVERY_WITHIN_S)
    scene.incidents_after(STALL_AFTER_S + 2.0)
    scene.network.restore_cables(1, SERVER)
    assert scene.wait_for_progress()
    assert scene.list_incidents("open") + scene.list_incidents("resolved") == []

    scene.network.set_blackhole(True)
    assert describe_incident(scene.wait_for_incident()) == ("no_progress", "alert", [], near + far)
    assert [describe_incident(i) for i in scene.incidents_after(1.0)] == [
        ("no_progress", "alert", [], near + far)
    ]
    scene.network.set_blackhole(False)
    assert scene.wait_for_progress() and scene.wait_until_resolved()

    scene.network.cut_cables(1, DATA, SERVER)
    lost = scene.wait_for_incident()
    assert describe_incident(lost) == ("lost_node", "alert", far, near)
    assert "node1" in lost["summary"]
    assert [describe_incident(i) for i in scene.incidents_after(2.0)] == [
        ("lost_node", "alert", far, near)
    ]
    scene.network.restore_cables(1, DATA, SERVER)
    assert scene.wait_for_progress() and scene.wait_until_resolved()

    scene.network.cut_cables(1, DATA, SERVER)
    scene.power_off(1)
    assert describe_incident(scene.wait_for_incident()) == ("lost_node", "alert", far, near)
    assert len(scene.list_incidents("resolved")) == 2


@pytest.mark.parametrize("scene", [1], indirect=True)
def test_host_with_all_processes_killed(scene: TwoHostScenario, tmp_path: Path) -> None:
    """The connections are closed, so that the others fail on them before it is known that the host
    is gone.
    """
    scene.launch_jobs(tmp_path)
    assert scene.wait_for_progress()
    scene.power_off(1)
    incident = scene.wait_for_incident()
    assert (incident["kind"], incident["culprits"]) == ("lost_node", [1])
    assert len(scene.incidents_after(2.0)) == 1


@pytest.mark.parametrize("scene", [1], indirect=True)
def test_host_clock_one_hour_ahead(scene: TwoHostScenario, tmp_path: Path) -> None:
    """SECURITY.md: "The clocks of hosts need not agree."."""
    library = tmp_path / "ahead.so"
    subprocess.run(
        ["g++", "-x", "c", "-shared", "-fPIC", "-o", library, "-", "-ldl"],
        input=_CLOCK_AHEAD_SOURCE,
        text=True,
        check=True,
    )
    ahead = {"LD_PRELOAD": str(library)}
    clock = [
        sys.executable,
        "-c",
        "import time; print(time.time() - time.clock_gettime(time.CLOCK_TAI))",
    ]
    here, there = (
        float(subprocess.run(clock, env=env, check=True, capture_output=True).stdout)
        for env in ({}, ahead)
    )
    assert there - here == pytest.approx(HOUR_S, abs=60.0)

    scene.launch_jobs(tmp_path, {"LEAVES": "1"}, {"LEAVES": "1", **ahead})
    planted = scene.jobs[1]
    assert wait_until(lambda: planted.planted_at is not None, 90.0)
    expected = [
        ("missing_rank", "alert", [1], [0])
    ]  # on a busy machine the rank may pass for slow at first
    assert wait_until(
        lambda: [describe_incident(i) for i in scene.list_incidents()] == expected, VERDICT_WITHIN_S
    ), scene.list_incidents()
    [incident] = scene.list_incidents()
    assert [f["function"] for f in incident["stacks"][0]["frames"]][:1] == ["upload_samples"]
    assert datetime.fromisoformat(incident["onset_at"]).timestamp() == pytest.approx(
        planted.planted_at, abs=2.0
    )
    assert len(scene.incidents_after(2.0)) == 1
