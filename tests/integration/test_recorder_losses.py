"""A recorder that fails to record a call marks the streams in which the call is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import native
from tests.harness.depth import choose_seed, draw_recorder
from tests.harness.processes import clean_environment, clean_up_job

LOSSES_SCRIPT = Path(__file__).with_name("recorder_cases") / "losses.py"

SETUP, WORLD = ["process group set-up", "setup", None], ["default_pg", "collective", None]
OTHER = ["other", "collective", None]

# The cases: the streams, each with its number of calls and its loss; and the calls that are lost
# without a place.
EXPECTED: dict[str, tuple[list[Any], int]] = {
    "nothing_lost": (
        [[*SETUP, 1, None], [*WORLD, 2, None], ["default_pg", "send", 1, 1, None]],
        0,
    ),
    "collective": (
        [[*SETUP, 2, None], [*WORLD, 4, [3, "FAULT"]], [*OTHER, 2, None]],
        0,
    ),
    "message": (
        [
            [*SETUP, 2, None],
            [*WORLD, 1, None],
            ["default_pg", "send", 1, 2, [2, "FAULT"]],
            [*OTHER, 0, None],
            ["other", "send", 1, 1, None],
            ["default_pg", "send", 3, 1, [1, "FAULT"]],
        ],
        1,
    ),
    "first_call": ([[*SETUP, 2, None], [*WORLD, 1, None], [*OTHER, 1, [1, "FAULT"]]], 0),
    "unknown_group": (
        [[*SETUP, 2, [3, "FAULT"]], [*WORLD, 2, [2, "FAULT"]], [*OTHER, 1, [1, "FAULT"]]],
        1,
    ),
    "creation_of_a_group": ([[*SETUP, 2, [2, "FAULT"]], [*WORLD, 2, None]], 0),
    "declared_call": ([[*SETUP, 1, None], [*WORLD, 2, [2, "FAULT"]]], 0),
    "detached": ([[*SETUP, 1, [2, "LATE"]], [*WORLD, 2, [2, "LATE"]]], 1),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_streams_that_miss_a_call_are_marked(
    case: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recorder = draw_recorder(case, choose_seed())
    env = clean_environment(
        **native.recorder_env(recorder, tmp_path_factory), HANGWATCH_URL="http://127.0.0.1:9",
        HANGWATCH_RUN_DIR=str(tmp_path), RANK="0", WORLD_SIZE="2",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(LOSSES_SCRIPT), case],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    clean_up_job(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    streams, dropped_count = EXPECTED[case]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["recorder"] == recorder, done.stderr
    assert seen["streams"] == streams
    assert seen["dropped"] == dropped_count
    assert seen["opened"] == len(streams)
