"""The recorder in a process that is used roughly: the program notices nothing, and no call is
missed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import native
from tests.harness.depth import choose_seed, draw_recorder
from tests.harness.processes import clean_environment, clean_up_job

ROUGH_SCRIPT = Path(__file__).with_name("recorder_cases") / "rough.py"


@pytest.mark.parametrize("case", ["threads", "forks", "signals", "modes", "worlds"])
def test_recorder_survives_rough_use(
    case: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recorder = draw_recorder(case, choose_seed())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        env = clean_environment(
            **native.recorder_env(recorder, tmp_path_factory), HANGWATCH_URL=f"http://127.0.0.1:{unused.getsockname()[1]}",
            HANGWATCH_RUN_DIR=str(tmp_path), RANK="0", WORLD_SIZE="1",
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(ROUGH_SCRIPT), case],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        clean_up_job(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"recorder {recorder} faults []", done.stderr
