"""Virtual environments that are kept in a cache, with packages that this interpreter's environment does not have."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def is_installed(folder: Path) -> bool:
    """Whether `create_environment` has finished there."""
    return (folder / "complete").exists()


def create_environment(folder: Path, install_packages: Callable[[Path], None]) -> None:
    """Create the environment in `folder`, unless it is complete; `install_packages` gets the folder. What it raises ends the creation,
    and a later call continues it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers may come at the same time
        if is_installed(folder):
            return
        if not python_of(folder).exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install_packages(folder)
        (folder / "complete").touch()


def list_agent_dependencies() -> list[str]:
    """hangwatch's base requirements. hangwatch itself is put on the path when a job starts: see checkout.py."""
    requirements = importlib.metadata.requires("hangwatch") or []
    return [requirement for requirement in requirements if "extra ==" not in requirement]


def run_pip(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the pip of the environment in `folder`, a second time without the machine's configuration if it fails."""
    command = [str(python_of(folder)), "-m", "pip", "-q", *arguments]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        # The machine's configuration may cap torch below the version that is to be tested.
        environment["PIP_CONFIG_FILE"] = os.devnull
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    return result
