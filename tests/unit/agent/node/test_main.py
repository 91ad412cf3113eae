"""The node agent's start, for which a rank waits, and what remains after its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.main import acquire_agent_lock, clean_run_dir

LATE_PACKAGES = ("hangwatch.model", "hangwatch.protocol", "hangwatch.report", "hangwatch.ring")


def test_modules_that_take_long_to_load_are_imported_after_the_fork() -> None:
    code = "import sys, hangwatch.agent.node.main; print(*sys.modules, sep='\\n')"
    loaded = subprocess.check_output((sys.executable, "-c", code), text=True).splitlines()
    assert "hangwatch.agent.node.main" in loaded
    assert not [name for name in loaded if name.startswith(LATE_PACKAGES)]


def test_run_dir_is_removed_with_what_children_of_ranks_left(tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "run"
    folder.mkdir(parents=True)
    lock = acquire_agent_lock(folder)
    assert lock is not None
    (folder / f"7{run_dir.GPU_CORE_SUFFIX}").touch()
    os.mkfifo(folder / f"7{run_dir.GPU_PIPE_SUFFIX}")
    clean_run_dir(folder, lock, keep_log=False)
    assert not folder.exists()
