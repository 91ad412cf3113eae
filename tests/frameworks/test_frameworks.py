"""The representative part of the frameworks' programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.frameworks.__main__ import STALL_AFTER_S
from tests.frameworks.environment import environment_folder, frameworks_runtime
from tests.harness.environments import is_installed
from tests.harness.expected import list_programs
from tests.harness.verdicts import check_program

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _installed_frameworks() -> None:
    """Several of these jobs are more than two cores can run beside other tests: they run on request."""
    if "HANGWATCH_FRAMEWORKS_DIR" not in os.environ or not is_installed(environment_folder()):
        pytest.skip("runs on request: see tests/frameworks/README.md")


@pytest.mark.parametrize("name", list_programs(healthy=False, ci=True, backend="frameworks"))
def test_framework_hang_verdict(name: str, tmp_path: Path) -> None:
    outcome = check_program(name, tmp_path, STALL_AFTER_S, frameworks_runtime())
    assert outcome.is_ok, str(outcome)


@pytest.mark.parametrize("name", list_programs(healthy=True, ci=True, backend="frameworks"))
def test_healthy_framework_program_has_no_alert(name: str, tmp_path: Path) -> None:
    outcome = check_program(name, tmp_path, STALL_AFTER_S, frameworks_runtime())
    assert outcome.is_ok, str(outcome)
