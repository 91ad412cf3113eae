"""The representative part of the zoo's programs for NCCL, on torch's real ProcessGroupNCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakegpu.conftest import require_torch
from tests.harness.depth import choose_seed, draw_depth, draw_recorder
from tests.harness.expected import list_programs
from tests.harness.native import build_plugin, recorder_env
from tests.harness.verdicts import ProgramOutcome, check_program
from tests.zoo.nccl import nccl_runtime

TORCH_VERSION = "2.14.1"

pytestmark = pytest.mark.fakegpu


@pytest.fixture(autouse=True)
def _installed_torch() -> None:
    require_torch(TORCH_VERSION)


@pytest.mark.parametrize("name", list_programs(healthy=False, ci=True, backend="nccl"))
def test_nccl_hang_verdict(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcome = run_program(name, tmp_path, tmp_path_factory)
    assert outcome.is_ok, str(outcome)


@pytest.mark.parametrize("name", list_programs(healthy=True, ci=True, backend="nccl"))
def test_healthy_nccl_program_has_no_alert(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcome = run_program(name, tmp_path, tmp_path_factory)
    assert outcome.is_ok, str(outcome)


def run_program(name: str, folder: Path, folders: pytest.TempPathFactory) -> ProgramOutcome:
    """Runs a program with the recorder and the number of earlier calls that the seed gives."""
    seed, runtime = choose_seed(), nccl_runtime(TORCH_VERSION)
    env = recorder_env(draw_recorder(name, seed), folders, runtime)
    build_plugin(Path(env["HANGWATCH_CACHE_DIR"]), runtime)
    return check_program(name, folder, runtime=runtime, depth=draw_depth(name, seed), env=env)
