"""`hangwatch doctor` where ptrace works and where it is really refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REFUSED_COMMAND = [sys.executable, str(Path(__file__).parent / "node_refused.py")]


def run_doctor(folder: Path, *under: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = (
        "import sys; from hangwatch.agent.cli import main; sys.exit(main(['doctor', '--json',"
        " '--url', 'http://127.0.0.1:9']))"
    )
    env = {**os.environ, "HANGWATCH_RUN_DIR": str(folder), "HANGWATCH_RECORDER": "python"}
    done = subprocess.run(
        [*under, sys.executable, "-c", code], env=env, capture_output=True, timeout=120, check=False
    )
    assert not done.stderr, done.stderr.decode()
    return done.returncode, {
        finding["name"]: finding for finding in json.loads(done.stdout)["findings"]
    }


def test_doctor_with_unreachable_server(tmp_path: Path) -> None:
    code, found = run_doctor(tmp_path)
    assert code == 3
    assert [name for name, finding in found.items() if finding["ok"] is False] == ["server"]
    assert found["py-spy"]["ok"] and found["faulthandler"]["ok"]
    assert found["recorder"]["detail"] == "Python's, as HANGWATCH_RECORDER says"
    assert list(tmp_path.iterdir()) == []


def test_doctor_with_refused_ptrace(tmp_path: Path) -> None:
    code, found = run_doctor(tmp_path, *REFUSED_COMMAND)
    assert code == 1
    assert found["py-spy"]["ok"] is False
    assert "seccomp" in found["py-spy"]["detail"]
    assert "--cap-add SYS_PTRACE" in found["py-spy"]["remedy"]
    assert found["faulthandler"]["ok"] and "replaces py-spy" in found["faulthandler"]["detail"]
