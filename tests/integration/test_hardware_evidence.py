"""What hosts report of their hardware during real hangs: a port that flaps, and a network that loses
packets, between two hosts that are network namespaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.hosts import TwoHostNetwork, create_network, namespaces_unavailable
from tests.harness.job import LaunchedJob
from tests.harness.processes import clean_up_job
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_for_value

_namespaces_refused = namespaces_unavailable()
pytestmark = pytest.mark.skipif(_namespaces_refused is not None, reason=str(_namespaces_refused))

PROGRAM = Path(__file__).with_name("hosts_program.py")
STALL_AFTER_S = 4.0
START_S = 90.0
BASELINE_S = 30.0  # the first one is read 2 seconds after the first rank was found
EVIDENCE_S = STALL_AFTER_S + 15.0


@pytest.fixture
def network(tmp_path: Path) -> Iterator[TwoHostNetwork]:
    with create_network() as net:
        yield net


@pytest.fixture
def server(network: TwoHostNetwork, tmp_path: Path) -> Iterator[Server]:
    with running_server(tmp_path / "server", STALL_AFTER_S, network.server) as running:
        yield running


def write_port(root: Path, link_downed: int) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "counters/link_downed": link_downed}
    for name, value in files.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{value}\n")


def wait_for_baselines(roots: list[Path]) -> None:
    """A tree was read when its files were."""

    def are_read() -> bool:
        paths = [root / "sys/class/infiniband/mlx5_0/ports/1/state" for root in roots]
        return all(path.stat().st_atime_ns > path.stat().st_mtime_ns for path in paths)

    wait_for_value(are_read, "the first readings", BASELINE_S)


def wait_for_evidence(server: Server, source: str) -> dict[str, Any]:
    """The incident once it has what that source observed."""

    def find_incident() -> dict[str, Any] | None:
        for item in server.get_items("incidents", job="job"):
            incident: dict[str, Any] = server.get(f"incidents/{item['id']}")
            if any(entry["source"] == source for entry in incident["hardware"]):
                return incident
        return None

    return wait_for_value(find_incident, f"an incident with evidence of {source}", EVIDENCE_S)


def wait_for_progress(server: Server, ranks: int) -> None:
    def all_make_calls() -> bool:
        items = server.get_items("ranks", job="job")
        entered = [rank["groups"][0]["entered"] for rank in items if rank["groups"]]
        return len(entered) == ranks and min(entered) > 5

    wait_for_value(all_make_calls, "the job makes calls", START_S)


def end_jobs(jobs: list[LaunchedJob]) -> None:
    for job in jobs:
        clean_up_job(job.run_dir, 0.0)
        job.process.wait()


def test_port_that_flaps_is_named(network: TwoHostNetwork, server: Server, tmp_path: Path) -> None:
    roots = [tmp_path / "host0", tmp_path / "host1"]
    for root in roots:
        write_port(root, 2)
    env = [{"HANGWATCH_HOST_ROOT": str(root)} for root in roots]
    jobs = network.launch_jobs(PROGRAM, 1, tmp_path, server.url, env=(env[0], env[1]))
    try:
        wait_for_progress(server, 2)
        wait_for_baselines(roots)
        write_port(roots[1], 3)
        network.set_blackhole(True)
        incident = wait_for_evidence(server, "infiniband")
        assert (incident["kind"], incident["culprits"]) == ("no_progress", [])
        flapped = [e for e in incident["hardware"] if e["source"] == "infiniband"]
        assert [(e["host"], e["about"], e["what"], e["before"], e["now"]) for e in flapped] == [
            ("node1", "mlx5_0/1", "link_downed", 2, 3)
        ]
        wait_for_value(
            lambda: (
                "node1 alone reports a fault of its hardware: the link of mlx5_0/1 went down (2 to 3"
                " times). That this is the cause is inferred."
                in server.get(f"incidents/{incident['id']}")["advice"]
            ),
            "the advice names the port",
            EVIDENCE_S,
        )
        page = httpx.get(f"{server.url}/incidents/{incident['id']}", trust_env=False).text
        assert "the link of mlx5_0/1 went down (2 to 3 times)" in page
    finally:
        end_jobs(jobs)


def test_lost_packets_are_evidence(network: TwoHostNetwork, server: Server, tmp_path: Path) -> None:
    """The real counters of the kernel."""
    jobs = network.launch_jobs(PROGRAM, 1, tmp_path, server.url, env=({}, {}))
    try:
        wait_for_progress(server, 2)
        network.set_blackhole(True)
        incident = wait_for_evidence(server, "network")
        assert (incident["kind"], incident["culprits"]) == ("no_progress", [])
        lost = {
            (entry["host"], entry["what"]): entry
            for entry in incident["hardware"]
            if entry["about"] == "TCP"
        }
        retransmitted = [entry for (_, what), entry in lost.items() if what == "RetransSegs"]
        assert retransmitted
        assert all(entry["now"] > entry["before"] for entry in retransmitted)
        assert {entry["weight"] for entry in retransmitted} == {"hint"}
    finally:
        end_jobs(jobs)
