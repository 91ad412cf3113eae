"""GPUs as NVML and the kernel log report them, on a library made by the tests: a throttled GPU, an
Xid, memory errors, and a driver that blocks while a job hangs.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import nvml
from hangwatch.agent.node.hardware.host import Host
from hangwatch.agent.node.hardware.reader import SOURCES, ReaderProcess, SourceResult
from hangwatch.model.hardware import Weight
from tests.harness.job import running_job
from tests.harness.nvml_shim import build_nvml_shim, write_driver
from tests.harness.processes import find_agents, read_resident_mb
from tests.harness.server import running_server
from tests.simulation.waiting import wait_for_value

PROGRAM = Path(__file__).with_name("hosts_program.py")
STALL_AFTER_S = 4.0
START_S = 90.0
VERDICT_S = STALL_AFTER_S + 20.0
MAX_AGENT_MB = 60

(NVML,) = [source for source in SOURCES if source.name == nvml.SOURCE]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose GPUs are the shim's, also for the processes that are started here."""
    write_driver(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_nvml_shim(tmp_path / "lib")))
    monkeypatch.setenv("HANGWATCH_HOST_ROOT", str(tmp_path))
    return Host(sys=tmp_path / "sys", pids=(4711,))


def read_nvml(host: Host, timeout_s: float) -> list[SourceResult]:
    reader = ReaderProcess()
    try:
        reader.start_reading([NVML], host)
        return reader.collect(timeout_s)
    finally:
        reader.close()


def test_what_nvml_reports(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "errors").write_text("3")
    monkeypatch.setenv("FAKE_NVML_ERRORS", str(tmp_path / "errors"))
    ((observations, unavailable),) = read_nvml(host, 20.0)
    assert unavailable is None
    abnormal = {(o.about, o.what): o.now for o in observations if o.is_abnormal}
    assert abnormal == {
        ("GPU 0", "other_processes"): "99",
        ("GPU 1", "other_processes"): "99",
        ("GPU 1", "row_remapping_pending"): 1,
        ("GPU 1", "throttled"): "hardware slowdown, hardware thermal",
        ("GPU 1", "spins"): "100 % busy at 110 of 700 W",
        ("GPU 1", "pcie_link_width"): "x8 of x16",
    }
    counters = {(o.about, o.what): o.now for o in observations if o.is_counter}
    assert counters["GPU 0", "uncorrected_memory_errors"] == 0
    assert counters["GPU 1", "uncorrected_memory_errors"] == 3
    assert counters["GPU 1", "nvlink_replays"] == 0
    (version,) = [o for o in observations if o.weight is Weight.FACT]
    assert (version.about, version.now) == ("driver", "570.86.15")


def test_driver_that_blocks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_BLOCKS", "60")
    began = time.monotonic()
    ((observations, unavailable),) = read_nvml(host, 2.0)
    assert time.monotonic() - began < 10.0
    assert [(o.what, o.is_abnormal) for o in observations] == [("does_not_return", True)]
    assert unavailable is not None and "did not answer" in unavailable.reason


def test_hang_beside_a_driver_that_blocks(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict comes in time and has the Xid; the node agent stays small, and the job is not
    disturbed.
    """
    monkeypatch.setenv("FAKE_NVML_BLOCKS", "60")
    env = {"LEAVES": "1", "HANGWATCH_HOST_ROOT": str(tmp_path), "FAKE_NVML_BLOCKS": "60"}
    with (
        running_server(tmp_path / "server", STALL_AFTER_S) as server,
        running_job(PROGRAM, 2, tmp_path / "job", server.url, env=env) as job,
    ):
        wait_for_value(lambda: job.planted_at, "the fault", START_S)
        xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
        microseconds = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/kmsg").write_text(f"3,1,{microseconds},-;{xid}\n")

        def find_advice() -> str | None:
            for item in server.get_items("incidents", job="job"):
                incident = server.get(f"incidents/{item['id']}")
                if incident["severity"] == "warning":  # on a busy machine it may pass for slow
                    continue
                assert (incident["kind"], incident["culprits"]) == ("missing_rank", [1])
                if incident["hardware"]:
                    return str(incident["advice"])
            return None

        advice = wait_for_value(find_advice, "the verdict with the Xid", VERDICT_S)
        assert "GPU 0000:3b:00 reported Xid 79 (the GPU has fallen off the bus)" in advice
        (agent,) = find_agents(job.run_dir)
        assert read_resident_mb(agent) < MAX_AGENT_MB
        assert job.process.poll() is None
