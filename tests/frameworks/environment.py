"""The virtual environment with the frameworks, in which the programs run. It is kept in a cache, and this checkout's hangwatch is put on
its path when a job starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.fakegpu.checkout import hangwatch_folders
from tests.fakegpu.environment import list_agent_dependencies, python_of, run_pip
from tests.harness.job import TorchRuntime

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


class FrameworksUnavailableError(Exception):
    """pip could not fetch the frameworks."""


def environment_folder() -> Path:
    """Where the environment for these requirements is: in HANGWATCH_FRAMEWORKS_DIR, or below ~/.cache."""
    chosen = os.environ.get("HANGWATCH_FRAMEWORKS_DIR")
    cache = Path(chosen) if chosen else Path.home() / ".cache" / "hangwatch-frameworks"
    digest = hashlib.blake2b(REQUIREMENTS.read_bytes(), digest_size=4).hexdigest()
    return cache / f"python{sys.version_info[0]}.{sys.version_info[1]}-{digest}"


def is_installed() -> bool:
    """Whether `install_frameworks` has finished."""
    return (environment_folder() / "complete").exists()


def install_frameworks() -> None:
    """Creates the environment, unless it is complete. Raises FrameworksUnavailableError if something cannot be fetched."""
    folder = environment_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers may come at the same time
        if is_installed():
            return
        if not python_of(folder).exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        result = run_pip(folder, ["install", "-r", str(REQUIREMENTS), *list_agent_dependencies()])
        if result.returncode:
            raise FrameworksUnavailableError(
                f"the frameworks cannot be installed:\n{result.stderr}"
            )
        (folder / "complete").touch()


def frameworks_runtime() -> TorchRuntime:
    """What runs the programs."""
    path = os.pathsep.join(map(str, hangwatch_folders()))
    return TorchRuntime(python=str(python_of(environment_folder())), env={"PYTHONPATH": path})
