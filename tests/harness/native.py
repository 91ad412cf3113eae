"""The recorder in C++ and the plugin for NCCL, built once for all tests of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .job import THIS_RUNTIME, TorchRuntime
from .processes import clean_environment

# Runs what the node agent runs in the background. Unlike there, the priority is not the lowest, at which
# a build takes minutes while other tests run.
BUILD_ARGUMENTS = (
    "-P",
    "-c",
    "import os; from hangwatch.agent.recorder.native import build;"
    " print(build.build_recorder(os.environ))",
)
_BUILD_PLUGIN_ARGUMENTS = (
    *BUILD_ARGUMENTS[:-1],
    BUILD_ARGUMENTS[-1].replace("recorder(", "plugin("),
)


def recorder_env(
    recorder: str, folders: pytest.TempPathFactory, runtime: TorchRuntime = THIS_RUNTIME
) -> dict[str, str]:
    """The environment of a job that ``recorder`` is to record, "native" or "python"."""
    folder = shared_folder(folders, "recorder")
    if recorder == "native":
        build_recorder(folder, runtime)
    return {"HANGWATCH_RECORDER": recorder, "HANGWATCH_CACHE_DIR": str(folder)}


def build_recorder(folder: Path, runtime: TorchRuntime = THIS_RUNTIME, **extra_env: str) -> None:
    """Puts the recorder, built for the runtime's torch, into ``folder``, which is
    HANGWATCH_CACHE_DIR then. Returns immediately if it is there already.
    """
    _run_build(BUILD_ARGUMENTS, folder, runtime, **extra_env)


def build_plugin(folder: Path, runtime: TorchRuntime = THIS_RUNTIME) -> None:
    """Puts the plugin for NCCL into ``folder``, likewise."""
    _run_build(_BUILD_PLUGIN_ARGUMENTS, folder, runtime)


def _run_build(
    arguments: tuple[str, ...], folder: Path, runtime: TorchRuntime, **extra_env: str
) -> None:
    env = clean_environment(**runtime.env, HANGWATCH_CACHE_DIR=str(folder), **extra_env)
    done = subprocess.run(
        [runtime.python, *arguments], env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def shared_folder(folders: pytest.TempPathFactory, name: str) -> Path:
    """One for all workers of pytest-xdist: they lie beside one another, in a folder of this run."""
    base = folders.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / name
