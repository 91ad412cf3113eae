"""The virtual environments with a CUDA build of torch, without the vendor's packages, in which the stand-ins run."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# One per CUDA major version and process group generation; 2.15 makes `nccl2` the default backend.
TORCH_VERSIONS = ("2.9.1", "2.14.1", "2.15.0")
_DEPENDENCIES = (
    "typing_extensions",
    "filelock",
    "networkx",
    "jinja2",
    "fsspec",
    "sympy",
    "setuptools>=77",
    "numpy",
    "pytest",
)


class WheelUnavailableError(Exception):
    """pip could not fetch the CUDA wheel of torch."""


def cache_folder() -> Path:
    """Where environments and libraries are kept: HANGWATCH_FAKEGPU_DIR, or below ~/.cache."""
    chosen = os.environ.get("HANGWATCH_FAKEGPU_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "hangwatch-fakegpu"


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def environment_folder(torch_version: str) -> Path:
    """The environment of one torch version in the cache."""
    return cache_folder() / f"torch-{torch_version}"


def library_folder(torch_version: str) -> Path:
    """The stand-in libraries for one torch version in the cache."""
    return cache_folder() / f"lib-{torch_version}"


def is_installed(folder: Path) -> bool:
    """Whether `install_environment` has finished there."""
    return (folder / "complete").exists()


def install_environment(folder: Path, torch_version: str) -> None:
    """Create the environment, unless it is complete: torch without its CUDA packages, and what hangwatch's agent needs.

    Raises `WheelUnavailableError` if torch cannot be fetched, `subprocess.CalledProcessError` if something else fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers may come at the same time
        if not is_installed(folder):
            _install(folder, torch_version)


def _install(folder: Path, torch_version: str) -> None:
    if not python_of(folder).exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wheel = run_pip(folder, ["install", "--no-deps", f"torch=={torch_version}"])
    if wheel.returncode:
        raise WheelUnavailableError(f"torch {torch_version} cannot be installed:\n{wheel.stderr}")
    result = run_pip(folder, ["install", *_DEPENDENCIES, *list_agent_dependencies()])
    if result.returncode:
        sys.stderr.write(result.stderr)
        result.check_returncode()
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
