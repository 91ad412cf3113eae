"""The virtual environment with the frameworks, in which the programs run. It is kept in a cache, and this checkout's hangwatch is put on
its path when a job starts.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from tests.fakegpu.checkout import hangwatch_folders
from tests.harness.environments import (
    create_environment,
    list_agent_dependencies,
    python_of,
    run_pip,
)
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


def install_frameworks() -> None:
    """Creates the environment, unless it is complete. Raises FrameworksUnavailableError if something cannot be fetched."""
    create_environment(environment_folder(), _install_packages)


def _install_packages(folder: Path) -> None:
    result = run_pip(folder, ["install", "-r", str(REQUIREMENTS), *list_agent_dependencies()])
    if result.returncode:
        raise FrameworksUnavailableError(f"the frameworks cannot be installed:\n{result.stderr}")


def frameworks_runtime() -> TorchRuntime:
    """What runs the programs."""
    path = os.pathsep.join(map(str, hangwatch_folders()))
    return TorchRuntime(python=str(python_of(environment_folder())), env={"PYTHONPATH": path})
