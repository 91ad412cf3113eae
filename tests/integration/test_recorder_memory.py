"""No tensor and no object of the job lives longer because a recorder recorded a call."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.harness import job, native

PROGRAM = Path(__file__).with_name("recorder_cases") / "lifetimes.py"
CHECKS_ENV = {"HANGWATCH_CHECKS": "replicas,nonfinite,values", "HANGWATCH_CHECK_EVERY": "1"}


@pytest.mark.parametrize("recorder", ["none", "native", "python", "python with checks"])
def test_calls_let_go_of_their_tensors(
    recorder: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind, _, checks = recorder.partition(" with ")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = None if kind == "none" else f"http://127.0.0.1:{unused.getsockname()[1]}"
        env = {} if url is None else native.recorder_env(kind, tmp_path_factory)
        if checks:
            env |= CHECKS_ENV
        ended = job.run_job(PROGRAM, 2, tmp_path, url, env=env, agent_exit_timeout_s=0)
    assert ended.process.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == f"recorder {kind}"
    assert len(lines) == 3, lines
    assert all(line.startswith("checked ") for line in lines[1:]), lines
