"""torch's real ProcessGroupNCCL on the stand-ins: right data in healthy jobs, its watchdog and Flight Recorder in hung ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakegpu.launch import start_job

PROGRAMS = Path(__file__).parent / "programs"
HEALTHY = PROGRAMS / "healthy.py"
FAULTY = PROGRAMS / "faulty.py"
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}

pytestmark = pytest.mark.fakegpu


def finish(job: subprocess.Popen[str], timeout_s: float = 120) -> str:
    """The output of a job that ends by itself; its processes are killed if it does not."""
    try:
        output, _ = job.communicate(timeout=timeout_s)
        return output
    finally:
        kill_job(job)


def kill_job(job: subprocess.Popen[str]) -> None:
    try:
        os.killpg(
            job.pid, signal.SIGTERM
        )  # torchrun ends its workers, which are in sessions of their own
        job.wait(20)
    except ProcessLookupError:
        return
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)


def wait_for(condition: Path, count: int, pattern: str, timeout_s: float) -> list[Path]:
    """The files in a folder that match, once there are `count` of them that are not empty."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        files = [path for path in sorted(condition.glob(pattern)) if path.stat().st_size]
        if len(files) >= count:
            return files
        time.sleep(0.2)
    raise AssertionError(
        f"{len(list(condition.glob(pattern)))} of {count} files {pattern} after {timeout_s} s"
    )


def run_fault(
    torch_version: str, case: str, folder: Path, **environment: str
) -> list[dict[str, tuple[int, int, int]]]:
    """Each rank's (enqueued, started, completed) by group, some seconds after the fault."""
    report = {
        "FAKEGPU_REPORT": str(folder / "status"),
        "FAKEGPU_EXIT_AFTER_REPORT": "1",
        "FAKEGPU_REPORT_AFTER_S": "4",
    }
    job = start_job(
        torch_version, 4, FAULTY, [case], environment={**RECORDER, **report, **environment}
    )
    output = finish(job)
    statuses = []
    for rank in range(4):
        path = folder / f"status.{rank}.json"
        assert path.exists(), output
        groups = json.loads(path.read_text())["pg_status"]
        names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
        statuses.append(
            {key: tuple(int(group[name]) for name in names) for key, group in groups.items()}
        )
    return statuses  # type: ignore[return-value]


def test_communication_moves_the_right_data(torch_version: str) -> None:
    job = start_job(torch_version, 4, HEALTHY)
    output = finish(job)
    assert job.returncode == 0, output
    assert output.count("passed") == 13, output


def test_communicators_made_lazily(torch_version: str) -> None:
    cases = ["collectives", "send_recv", "batched_p2p", "new_group"]
    job = start_job(torch_version, 2, HEALTHY, cases, environment={"EAGER": "0"})
    output = finish(job)
    assert job.returncode == 0, output


def test_kernel_that_never_ends_shows_on_its_rank(torch_version: str, tmp_path: Path) -> None:
    statuses = run_fault(torch_version, "endless_kernel", tmp_path, TORCH_NCCL_ENABLE_TIMING="1")
    assert [status["0"] for status in statuses] == [(6, 6, 5), (6, 5, 5), (6, 6, 5), (6, 6, 5)]


def test_stalled_network_shows_started_on_all_ranks(torch_version: str, tmp_path: Path) -> None:
    statuses = run_fault(torch_version, "stall", tmp_path, TORCH_NCCL_ENABLE_TIMING="1")
    assert [status["0"] for status in statuses] == [(6, 6, 5)] * 4


def start_dumping_job(
    torch_version: str, ranks: int, case: str, folder: Path, **environment: str
) -> subprocess.Popen[str]:
    """A job whose watchdog writes a dump of each rank to ``folder`` after three seconds."""
    dumps = {
        "NCCL_TIMEOUT_S": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dump_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "dump_"),
    }
    return start_job(
        torch_version, ranks, FAULTY, [case], environment={**RECORDER, **dumps, **environment}
    )


def test_watchdog_fires_and_dumps(torch_version: str, tmp_path: Path) -> None:
    job = start_dumping_job(torch_version, 2, "stall", tmp_path)
    try:
        wait_for(tmp_path, 2, "dump_*", 90)
    finally:
        kill_job(job)
    output, _ = job.communicate()
    assert "Watchdog caught collective operation timeout" in output


@pytest.mark.parametrize(
    ("case", "timing", "kind", "culprits"),
    [
        ("endless_kernel", "1", "device_stuck", [1]),
        ("stall", "1", "no_progress", []),
        # The two look the same unless the start of kernels is recorded.
        ("endless_kernel", "0", "no_progress", []),
    ],
)
def test_dumps_of_the_watchdog_are_analyzed(
    torch_version: str, tmp_path: Path, case: str, timing: str, kind: str, culprits: list[int]
) -> None:
    job = start_dumping_job(torch_version, 4, case, tmp_path, TORCH_NCCL_ENABLE_TIMING=timing)
    try:
        wait_for(tmp_path, 4, "dump_*", 90)
        time.sleep(1.0)  # the last one may not be complete
    finally:
        kill_job(job)
        job.communicate()
    hangwatch = Path(sys.executable).with_name("hangwatch")
    command = [str(hangwatch), "analyze", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    verdicts = json.loads(done.stdout)["items"]
    assert [(v["kind"], v["culprits"]) for v in verdicts] == [(kind, culprits)], done


def test_fault_by_call_number_from_outside(torch_version: str, tmp_path: Path) -> None:
    faults = {"FAKEGPU_FAULTS": "endless_kernel:rank=2,after=10"}
    statuses = run_fault(torch_version, "nothing", tmp_path, TORCH_NCCL_ENABLE_TIMING="1", **faults)
    # The kernel comes before the event that ends the tenth call, so that call is still open on its rank.
    assert [status["0"] for status in statuses] == [(6, 6, 5), (6, 6, 5), (5, 5, 5), (6, 6, 5)]
    assert [status["1"] for status in statuses] == [(6, 5, 5), (6, 5, 5), (5, 5, 4), (6, 5, 5)]


def test_memory_runs_out_on_one_rank(torch_version: str) -> None:
    job = start_job(torch_version, 2, FAULTY, ["out_of_memory"])
    output = finish(job)
    assert job.returncode != 0
    assert "torch.OutOfMemoryError: CUDA out of memory" in output


def test_slow_link_ends_well(torch_version: str) -> None:
    job = start_job(torch_version, 2, FAULTY, ["nothing"], faults="slow:ms=50")
    output = finish(job)
    assert job.returncode == 0, output
