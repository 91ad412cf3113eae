"""Prebuilt recorders for CUDA builds of torch, in environments without an installed hangwatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakegpu.conftest import require_torch
from tests.fakegpu.environment import TORCH_VERSIONS, environment_folder
from tests.fakegpu.launch import stand_in_variables
from tests.harness.environments import python_of
from tests.harness.wheel import build_wheel, install_wheel, record_first_call


@pytest.mark.timeout(900)
@pytest.mark.parametrize("torch_version", TORCH_VERSIONS)
def test_first_call_is_recorded_natively(torch_version: str, tmp_path: Path) -> None:
    require_torch(torch_version)
    python = python_of(environment_folder(torch_version))
    env = {"LD_LIBRARY_PATH": stand_in_variables(torch_version)["LD_LIBRARY_PATH"]}
    wheel = build_wheel([python], tmp_path / "wheel", **env)
    installed = tmp_path / "installed"
    install_wheel(wheel, installed)
    found = record_first_call(python, tmp_path / "job", {**env, "PYTHONPATH": str(installed)})
    assert found["torch"].startswith(torch_version)
    assert found["hangwatch"].startswith(str(installed))
    assert found["recorder"] == "native" and not found["without"]
    assert "all_reduce" in found["calls"]
    assert found["took_s"] < 1.0
