"""The representative part of the zoo's programs for NCCL, on torch's real ProcessGroupNCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakegpu.conftest import require_torch
from tests.harness.depth import choose_seed, draw_depth
from tests.harness.expected import list_programs
from tests.harness.verdicts import check_program
from tests.zoo.nccl import nccl_runtime

TORCH_VERSION = "2.14.1"

pytestmark = pytest.mark.fakegpu


@pytest.fixture(autouse=True)
def _installed_torch() -> None:
    require_torch(TORCH_VERSION)


@pytest.mark.parametrize("name", list_programs(healthy=False, ci=True, backend="nccl"))
def test_nccl_hang_verdict(name: str, tmp_path: Path) -> None:
    depth = draw_depth(name, choose_seed())
    outcome = check_program(name, tmp_path, runtime=nccl_runtime(TORCH_VERSION), depth=depth)
    assert outcome.is_ok, str(outcome)


@pytest.mark.parametrize("name", list_programs(healthy=True, ci=True, backend="nccl"))
def test_healthy_nccl_program_has_no_alert(name: str, tmp_path: Path) -> None:
    depth = draw_depth(name, choose_seed())
    outcome = check_program(name, tmp_path, runtime=nccl_runtime(TORCH_VERSION), depth=depth)
    assert outcome.is_ok, str(outcome)
