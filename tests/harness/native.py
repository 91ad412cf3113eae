"""The recorder in C++, built once for all tests of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .processes import environment


def use(recorder: str, folders: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a job that ``recorder`` is to record, "native" or "python"."""
    env = {"HANGWATCH_RECORDER": recorder, "HANGWATCH_CACHE_DIR": str(shared(folders, "recorder"))}
    if recorder == "native":
        build = [sys.executable, "-P", "-m", "hangwatch.agent.recorder.native.build"]
        done = subprocess.run(build, env=environment(**env), capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
    return env


def shared(folders: pytest.TempPathFactory, name: str) -> Path:
    """One for all workers of pytest-xdist: they lie beside one another, in a folder of this run."""
    base = folders.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / name
