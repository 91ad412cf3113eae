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

from tests.harness.hosts import DATA, SERVER, Network, network, why_not
from tests.harness.job import Job
from tests.harness.processes import belonging_to, clear, eventually, kill
from tests.harness.server import Server, serving

_refused = why_not()
pytestmark = pytest.mark.skipif(_refused is not None, reason=str(_refused))

PROGRAM = Path(__file__).with_name("hosts_program.py")
STALL_AFTER = 4.0
IN_TIME = STALL_AFTER + 5.0
BACK = 30.0  # seconds in which a node agent or a job is to go on once a cable is back
HOUR = 3600.0

_AHEAD = """
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


class Scene:
    """Two hosts, a server, and a job of `ranks` on each host."""

    def __init__(self, net: Network, server: Server, ranks: int) -> None:
        self.net, self.server, self.ranks = net, server, ranks
        self.jobs: list[Job] = []

    def launch(self, folder: Path, *env: dict[str, str]) -> None:
        self.jobs = self.net.launch(
            PROGRAM, self.ranks, folder, self.server.url, env=env or ({}, {})
        )

    def incidents(self, status: str = "open") -> list[dict[str, Any]]:
        return [
            self.server.get(f"incidents/{i['id']}")
            for i in self.server.items("incidents", job="job", status=status)
        ]

    def steps(self) -> dict[int, int]:
        """Collectives by rank, of those that are heard."""
        ranks = self.server.items("ranks", job="job")
        return {
            r["rank"]: r["groups"][0]["entered"]
            for r in ranks
            if r["groups"] and r["last_seen_s"] < 2.0
        }

    def goes_on(self) -> bool:
        """All ranks are heard, and all make calls."""
        before = self.steps()

        def moved() -> bool:
            now = self.steps()
            return len(now) == 2 * self.ranks and all(
                now[rank] > before.get(rank, 0) for rank in now
            )

        return eventually(moved, 90.0 if not before else BACK)

    def verdict(self) -> dict[str, Any]:
        """The only open incident, once there is one."""
        assert eventually(lambda: bool(self.incidents()), IN_TIME), "no incident in time"
        (incident,) = self.incidents()
        return incident

    def stays_for(self, seconds: float) -> list[dict[str, Any]]:
        """The open incidents after that time."""
        eventually(lambda: False, seconds)
        return self.incidents()

    def resolves(self) -> bool:
        return eventually(lambda: not self.incidents(), BACK)

    def power_off(self, host: int) -> None:
        kill(set(belonging_to(self.jobs[host].run_dir)))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with network() as net, serving(tmp_path / "server", STALL_AFTER, net.server) as server:
        made = Scene(net, server, request.param)
        try:
            yield made
        finally:
            for job in made.jobs:
                clear(job.run_dir, 0.0)
                job.process.wait()
    assert [line for job in made.jobs for line in belonging_to(job.run_dir).values()] == []


def described(incident: dict[str, Any]) -> tuple[str, str, list[int], list[int]]:
    return incident["kind"], incident["severity"], incident["culprits"], incident["waiting"]


@pytest.mark.parametrize("scene", [4], indirect=True)
def test_cables(scene: Scene, tmp_path: Path) -> None:
    near, far = [0, 1, 2, 3], [4, 5, 6, 7]
    scene.launch(tmp_path)
    assert scene.goes_on()

    # Only the way to the server is cut, and the job is well: that of one host for a moment, of
    # both, and of one for long.
    scene.net.cut(1, SERVER)
    scene.stays_for(2.5)
    scene.net.cut(0, SERVER)
    scene.stays_for(STALL_AFTER + 2.0)
    scene.net.mend(0, SERVER)
    assert eventually(lambda: len(scene.steps()) == 4, BACK)
    scene.stays_for(STALL_AFTER + 2.0)
    scene.net.mend(1, SERVER)
    assert scene.goes_on()
    assert scene.incidents("open") + scene.incidents("resolved") == []

    scene.net.blackhole(True)
    assert described(scene.verdict()) == ("no_progress", "alert", [], near + far)
    assert [described(i) for i in scene.stays_for(1.0)] == [
        ("no_progress", "alert", [], near + far)
    ]
    scene.net.blackhole(False)
    assert scene.goes_on() and scene.resolves()

    scene.net.cut(1, DATA, SERVER)
    lost = scene.verdict()
    assert described(lost) == ("lost_node", "alert", far, near)
    assert "node1" in lost["summary"]
    assert [described(i) for i in scene.stays_for(2.0)] == [("lost_node", "alert", far, near)]
    scene.net.mend(1, DATA, SERVER)
    assert scene.goes_on() and scene.resolves()

    scene.net.cut(1, DATA, SERVER)
    scene.power_off(1)
    assert described(scene.verdict()) == ("lost_node", "alert", far, near)
    assert len(scene.incidents("resolved")) == 2


@pytest.mark.parametrize("scene", [1], indirect=True)
def test_all_processes_of_a_host_are_killed(scene: Scene, tmp_path: Path) -> None:
    """The connections are closed, so that the others fail on them before it is known that the host
    is gone.
    """
    scene.launch(tmp_path)
    assert scene.goes_on()
    scene.power_off(1)
    incident = scene.verdict()
    assert (incident["kind"], incident["culprits"]) == ("lost_node", [1])
    assert len(scene.stays_for(2.0)) == 1


@pytest.mark.parametrize("scene", [1], indirect=True)
def test_a_clock_an_hour_ahead(scene: Scene, tmp_path: Path) -> None:
    library = tmp_path / "ahead.so"
    subprocess.run(
        ["g++", "-x", "c", "-shared", "-fPIC", "-o", library, "-", "-ldl"],
        input=_AHEAD,
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
    assert there - here == pytest.approx(HOUR, abs=60.0)

    scene.launch(tmp_path, {"LEAVES": "1"}, {"LEAVES": "1", **ahead})
    planted = scene.jobs[1]
    assert eventually(lambda: planted.planted_at is not None, 90.0)
    expected = [
        ("missing_rank", "alert", [1], [0])
    ]  # on a busy machine the rank may pass for slow at first
    assert eventually(lambda: [described(i) for i in scene.incidents()] == expected, IN_TIME), (
        scene.incidents()
    )
    [incident] = scene.incidents()
    assert [f["function"] for f in incident["stacks"][0]["frames"]][:1] == ["upload_samples"]
    assert datetime.fromisoformat(incident["onset_at"]).timestamp() == pytest.approx(
        planted.planted_at, abs=2.0
    )
    assert len(scene.stays_for(2.0)) == 1
