"""A job that makes 20,000 calls needs no more memory for it, and what then happens is still found.

``LONG_JOB_CALLS=100000`` makes as many calls.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import job, native
from tests.harness.processes import find_agents, find_rings, read_resident_mb
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_for_value, wait_until

PROGRAM = Path(__file__).with_name("long_program.py")
RANKS, MOST_EXTRA_CALLS = 3, 3000
CALLS = int(os.environ.get("LONG_JOB_CALLS", "20000"))
# Each run draws the fault, its place and the recorder again; the failure's text has the seed.
SEED = int(os.environ.get("LONG_JOB_SEED", random.randrange(1000)))
CASES = [
    (recorder, fault) for fault in ("mismatch", "missing_rank") for recorder in ("native", "python")
]
# About a minute on two cores that do nothing else.
JOB_TIMEOUT_S, VERDICT_TIMEOUT_S = 800.0, 20.0
# The growth from the fourth tenth of the calls to the end. Ranks and the node agent keep up to 4,096
# shapes of calls for each rank, of which the job makes thousands.
RANK_GROWTH_MB, AGENT_GROWTH_MB, SERVER_GROWTH_MB = 12.0, 12.0, 12.0


def read_memory(folder: Path, rank: int) -> list[float]:
    path = folder / str(rank)
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.timeout(1000)
def test_memory_is_flat_and_the_fault_is_found(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recorder, fault = CASES[SEED % len(CASES)]
    memory = tmp_path / "memory"
    memory.mkdir()
    env = {
        "CALLS": str(CALLS + random.Random(SEED).randrange(MOST_EXTRA_CALLS)),
        "SEED": str(SEED),
        "FAULT": fault,
        "MEMORY_DIR": str(memory),
        **native.recorder_env(recorder, tmp_path_factory),
    }
    name = f"seed{SEED}"
    with (
        running_server(tmp_path / "server") as server,
        job.running_job(
            PROGRAM, RANKS, tmp_path / "job", server.url, name=name, env=env
        ) as running,
    ):
        early = sample_memory(server, running, memory, tenths=4)
        late = sample_memory(server, running, memory, tenths=10)
        assert wait_until(lambda: running.planted_at is not None, JOB_TIMEOUT_S), running.stderr
        verdict = wait_for_value(
            lambda: find_alert(server, name), f"an alert of {name}", VERDICT_TIMEOUT_S
        )
        report = f"{name} {recorder} {fault} {early} {late} {verdict['summary']}"
        assert (verdict["kind"], verdict["culprits"]) == (fault, [1]), report
        assert find_planted_line(fault) in list_lines(verdict), report
        assert len(server.get_items("incidents", job=name)) == 1, report
    limits = {"agent": AGENT_GROWTH_MB, "server": SERVER_GROWTH_MB, "rings": 0.0}
    growth = {part: late[part] - early[part] for part in early}
    assert all(mb <= limits.get(part, RANK_GROWTH_MB) for part, mb in growth.items()), report


def sample_memory(
    server: Server, running: job.LaunchedJob, memory: Path, *, tenths: int
) -> dict[str, float]:
    """The memory in MB of each part when each rank has made so many tenths of its calls."""
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while min(len(read_memory(memory, rank)) for rank in range(RANKS)) < tenths:
        assert running.process.poll() is None, running.stderr
        assert time.monotonic() < deadline, "the job is too slow"
        time.sleep(0.2)
    parts = {f"rank {rank}": read_memory(memory, rank)[tenths - 1] for rank in range(RANKS)}
    (agent,) = find_agents(running.run_dir)
    parts["agent"], parts["server"] = read_resident_mb(agent), read_resident_mb(server.pid)
    parts["rings"] = sum(ring.stat().st_size for ring in find_rings(running.run_dir)) / 1e6
    return parts


def find_alert(server: Server, name: str) -> dict[str, Any] | None:
    """The first alert, once it has the stack or the line of its culprit."""
    alerts = [i for i in server.get_items("incidents", job=name) if i["severity"] == "alert"]
    if not alerts:
        return None
    incident: dict[str, Any] = server.get(f"incidents/{alerts[0]['id']}")
    return incident if list_lines(incident) else None


def list_lines(incident: dict[str, Any]) -> set[int]:
    """The lines of the program in the culprit's calls and stacks."""
    sites = [c["site"] for c in incident["calls"] if c["ranks"] == [1] and c["site"]]
    stacks = [s for s in incident["stacks"] if s["ranks"] == [1] and "frames" in s]
    frames = [f for s in stacks for f in s["frames"]]
    return {place["line"] for place in sites + frames if place["file"].endswith(PROGRAM.name)}


def find_planted_line(fault: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# planted: {fault}"))
