"""CUDA graphs and NCCL profiler plugins on the stand-ins: right sums in each replay, and the events that NCCL reports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakegpu.build import CPP_FOLDER
from tests.fakegpu.environment import environment_folder
from tests.fakegpu.launch import job_environment, start_job
from tests.fakegpu.test_nccl import PROGRAMS, finish
from tests.harness.environments import python_of

BREAKS_CAPTURES = PROGRAMS / "breaks_captures.py"
REPLAYS_GRAPHS = PROGRAMS / "replays_graphs.py"
RAW_NCCL = PROGRAMS / "raw_nccl.py"
RANKS = 2
REPLAYS = 40
STEPS = 20
CHANNELS = 2  # that the stand-ins report for each kernel
KERNEL_EVENTS = 64
OTHER_EVENTS = 1 | 2 | 4 | 256 | 512 | 1024 | 2048
FIRST_INTERFACE_WITH_CALLS = 5  # NCCL 2.28's

pytestmark = pytest.mark.fakegpu

Counts = dict[str, Any]  # a line that counting_profiler.cpp writes


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiler plugin that counts events."""
    library = tmp_path_factory.mktemp("plugin") / "counting_profiler.so"
    source = CPP_FOLDER / "counting_profiler.cpp"
    flags = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-shared"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return library


def run_program(
    torch_version: str, program: Path, count: int, environment: dict[str, str] | None = None
) -> Counts:
    """The result line of a program that ends well."""
    job = start_job(torch_version, RANKS, program, [str(count)], environment=environment)
    output = finish(job)
    assert job.returncode == 0, output
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert len(lines) == 1, output
    result: Counts = json.loads(lines[0])
    assert result["ranks"] == RANKS
    return result


def profiled(plugin: Path, counts: Path, **settings: int) -> dict[str, str]:
    """The environment of a job whose communicators' events are counted in a file."""
    variables = {name: str(value) for name, value in settings.items()}
    return {
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "COUNTING_PROFILER_FILE": str(counts),
        **variables,
    }


def read_counts(path: Path) -> list[Counts]:
    """The counts by communicator and rank."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["id"], line["rank"]))


def expect_complete(counts: Counts) -> None:
    assert counts["unstopped"] == 0, counts
    assert counts["orphans"] == 0, counts
    assert counts["kernels_ended"] == counts["kernels"], counts


def test_capture_refuses_what_it_cannot_hold(torch_version: str) -> None:
    python = python_of(environment_folder(torch_version))
    done = subprocess.run(
        [python, BREAKS_CAPTURES],
        env=job_environment(torch_version),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    unsupported = "CUDA error: operation not permitted when stream is capturing"
    assert json.loads(done.stdout) == {
        "copy": "",
        "joined stream": "",
        "unjoined stream": "CUDA error: capturing stream has unjoined work",
        "device": unsupported,
        "stream": unsupported,
        "earlier event": "CUDA error: dependency created on uncaptured work in another stream",
        "captured event": (
            "CUDA error: operation not permitted on an event last recorded in a capturing stream"
        ),
        # The other thread's call fails, and it ends the capture.
        "another thread": "CUDA error: operation failed due to a previous error during capture",
        "another thread, thread_local": "",
    }


def test_replays_reduce_the_right_data(torch_version: str) -> None:
    result = run_program(torch_version, REPLAYS_GRAPHS, REPLAYS)
    assert result["replays"] == REPLAYS
    assert result["eager"] > 1


def test_raw_communicator_is_reported_beside_torchs(
    torch_version: str, plugin: Path, tmp_path: Path
) -> None:
    counts = tmp_path / "counts"
    run_program(torch_version, RAW_NCCL, STEPS, profiled(plugin, counts))
    communicators = read_counts(counts)
    assert [line["rank"] for line in communicators] == [0, 1, 0, 1], communicators
    assert len({line["id"] for line in communicators}) == 2, communicators
    for line in communicators:
        expect_complete(line)
        assert line["ranks"] == RANKS
        assert line["collectives"] == STEPS, line
        assert line["kernels"] == STEPS * CHANNELS, line
        has_calls = line["interface"] >= FIRST_INTERFACE_WITH_CALLS
        assert line["collective_calls"] == (STEPS if has_calls else 0), line


@pytest.mark.parametrize("sees_kernels", [True, False])
def test_replays_are_reported_where_kernels_are(
    torch_version: str, plugin: Path, tmp_path: Path, sees_kernels: bool
) -> None:
    counts = tmp_path / "counts"
    mask = OTHER_EVENTS | (KERNEL_EVENTS if sees_kernels else 0)
    settings = profiled(plugin, counts, COUNTING_PROFILER_MASK=mask)
    result = run_program(torch_version, REPLAYS_GRAPHS, REPLAYS, settings)
    captured, eager = result["captured"], result["eager"]
    communicators = read_counts(counts)
    assert [line["rank"] for line in communicators] == list(range(RANKS)), communicators
    for line in communicators:
        expect_complete(line)
        # Without kernels, what is captured is reported once, and its replays are not.
        replayed = captured * (REPLAYS if sees_kernels else 1)
        assert line["collectives"] == eager + replayed, line
        kernels = (eager + replayed) * CHANNELS if sees_kernels else 0
        assert line["kernels"] == kernels, line
        if line["interface"] >= FIRST_INTERFACE_WITH_CALLS:
            assert line["collective_calls"] == eager + captured, line
            assert line["captured_calls"] == captured, line


@pytest.mark.parametrize("reason", ["missing", "refuses", "none"])
def test_job_runs_without_its_plugin(
    torch_version: str, plugin: Path, tmp_path: Path, reason: str
) -> None:
    counts = tmp_path / "counts"
    named = {"missing": tmp_path / "missing.so", "refuses": plugin, "none": Path("none")}
    settings = profiled(named[reason], counts, COUNTING_PROFILER_REFUSES=int(reason == "refuses"))
    run_program(torch_version, RAW_NCCL, STEPS, settings)
    assert not counts.exists()
