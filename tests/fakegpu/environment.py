"""The virtual environments with a CUDA build of torch, without the vendor's packages, in which the stand-ins run."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from tests.harness.environments import create_environment, list_agent_dependencies, run_pip

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


def environment_folder(torch_version: str) -> Path:
    """The environment of one torch version in the cache."""
    return cache_folder() / f"torch-{torch_version}"


def library_folder(torch_version: str) -> Path:
    """The stand-in libraries for one torch version in the cache."""
    return cache_folder() / f"lib-{torch_version}"


def install_environment(folder: Path, torch_version: str) -> None:
    """Create the environment, unless it is complete: torch without its CUDA packages, and what hangwatch's agent needs.

    Raises `WheelUnavailableError` if torch cannot be fetched, `subprocess.CalledProcessError` if something else fails.
    """
    create_environment(folder, partial(_install_packages, torch_version))


def _install_packages(torch_version: str, folder: Path) -> None:
    wheel = run_pip(folder, ["install", "--no-deps", f"torch=={torch_version}"])
    if wheel.returncode:
        raise WheelUnavailableError(f"torch {torch_version} cannot be installed:\n{wheel.stderr}")
    result = run_pip(folder, ["install", *_DEPENDENCIES, *list_agent_dependencies()])
    if result.returncode:
        sys.stderr.write(result.stderr)
        result.check_returncode()
