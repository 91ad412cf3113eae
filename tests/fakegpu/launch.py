"""Starts programs of several ranks on the stand-ins."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fakegpu.build import build_libraries
from tests.fakegpu.checkout import hangwatch_folders
from tests.fakegpu.environment import environment_folder, library_folder
from tests.harness.environments import python_of


def stand_in_variables(torch_version: str) -> dict[str, str]:
    """What a process needs in its environment to run on the stand-ins, this checkout's hangwatch included.

    Builds the stand-ins if they are out of date.
    """
    folder = environment_folder(torch_version)
    libraries = build_libraries(python_of(folder), library_folder(torch_version))
    return {
        "PATH": _prepend("PATH", folder / "bin"),
        "LD_LIBRARY_PATH": _prepend("LD_LIBRARY_PATH", libraries),
        "PYTHONPATH": _prepend("PYTHONPATH", *hangwatch_folders()),
    }


def _prepend(variable: str, *folders: Path) -> str:
    others = os.environ.get(variable)
    return os.pathsep.join([*map(str, folders), *([others] if others else [])])


def job_environment(torch_version: str, *, faults: str = "") -> dict[str, str]:
    """The environment variables of a process that runs on the stand-ins."""
    environment = {**os.environ, **stand_in_variables(torch_version)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if faults:
        environment["FAKEGPU_FAULTS"] = faults
    return environment


def torchrun_command(
    torch_version: str, ranks: int, program: Path, arguments: Sequence[str] = ()
) -> list[str]:
    """The command line that starts `program` on `ranks` ranks of this machine, without restarts."""
    python = str(python_of(environment_folder(torch_version)))
    launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(program), *arguments]


def start_job(
    torch_version: str,
    ranks: int,
    program: Path,
    arguments: Sequence[str] = (),
    *,
    faults: str = "",
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `program` under torchrun in a session of its own; stdout and stderr are one pipe."""
    return subprocess.Popen(
        torchrun_command(torch_version, ranks, program, arguments),
        env={**job_environment(torch_version, faults=faults), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
