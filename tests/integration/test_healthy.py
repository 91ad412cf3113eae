"""A healthy job opens no alert, however uneven it is, and only its ranks are shown as ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.depth import choose_seed, draw_depth, draw_recorder
from tests.harness.expected import list_programs
from tests.harness.native import recorder_env
from tests.harness.verdicts import check_program


@pytest.mark.parametrize("name", list_programs(healthy=True, ci=True))
def test_healthy_program_has_no_alert(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seed = choose_seed()
    env = recorder_env(draw_recorder(name, seed), tmp_path_factory)
    outcome = check_program(name, tmp_path, depth=draw_depth(name, seed), env=env)
    assert outcome.is_ok, str(outcome)
