"""`hangwatch doctor` where ptrace works and where it is really refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.job import PTRACE_REFUSED


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
    exit_code, findings = run_doctor(tmp_path)
    assert exit_code == 3
    assert [name for name, finding in findings.items() if finding["ok"] is False] == ["server"]
    assert findings["py-spy"]["ok"] and findings["faulthandler"]["ok"]
    assert findings["recorder"]["detail"] == "Python's, as HANGWATCH_RECORDER says"
    assert list(tmp_path.iterdir()) == []


def test_doctor_with_refused_ptrace(tmp_path: Path) -> None:
    exit_code, findings = run_doctor(tmp_path, *PTRACE_REFUSED)
    assert exit_code == 1
    assert findings["py-spy"]["ok"] is False
    assert "seccomp" in findings["py-spy"]["detail"]
    assert "--cap-add SYS_PTRACE" in findings["py-spy"]["remedy"]
    assert (
        findings["faulthandler"]["ok"] and "replaces py-spy" in findings["faulthandler"]["detail"]
    )
