"""The driver's variables for core dumps of GPUs, which only few jobs get."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.environment.run_dir import find_run_dir
from hangwatch.agent.recorder import faults
from hangwatch.agent.recorder.core_dumps import enable_gpu_core_dumps

URL = "http://127.0.0.1:1"
WANTED = {"HANGWATCH_URL": URL, "HANGWATCH_GPU_CORE": "1", "HANGWATCH_ON_HANG": "abort"}


@pytest.fixture(autouse=True)
def fresh_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGWATCH_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(faults, "fault_counts", {})


def test_variables_are_set_once_for_a_job_and_its_children() -> None:
    env = dict(WANTED)
    enable_gpu_core_dumps(env)
    folder = find_run_dir(URL)
    assert folder is not None
    assert env["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] == "1"
    assert env["CUDA_COREDUMP_FILE"] == f"{folder}/%p.gpucore"
    assert env["CUDA_COREDUMP_PIPE"] == f"{folder}/%p.gpupipe"
    assert "skip_global_memory" in env["CUDA_COREDUMP_GENERATION_FLAGS"]
    assert "skip_abort" not in env["CUDA_COREDUMP_GENERATION_FLAGS"], "it would hide errors"
    inherited = dict(env)
    enable_gpu_core_dumps(inherited)
    assert inherited == env and not faults.fault_counts


@pytest.mark.parametrize(
    "name", ["HANGWATCH_GPU_CORE", "HANGWATCH_ON_HANG"], ids=["not wanted", "never ended"]
)
def test_other_jobs_stay_as_they_are(name: str) -> None:
    env = {**WANTED, name: "0"}
    enable_gpu_core_dumps(env)
    assert env == {**WANTED, name: "0"}


@pytest.mark.parametrize("name", ["CUDA_COREDUMP_FILE", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION"])
def test_settings_of_the_user_have_precedence(name: str) -> None:
    env = {**WANTED, name: "0"}
    enable_gpu_core_dumps(env)
    assert env == {**WANTED, name: "0"}
    assert name in next(iter(faults.fault_counts))
