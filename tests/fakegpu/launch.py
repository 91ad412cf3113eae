"""Starts programs of several ranks on the stand-ins."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fakegpu.build import build_libraries
from tests.fakegpu.environment import environment_folder, library_folder, python_of


def job_environment(torch_version: str, *, faults: str = "") -> dict[str, str]:
    """The environment variables of a process that runs on the stand-ins; builds them if they are out of date."""
    folder = environment_folder(torch_version)
    libraries = build_libraries(python_of(folder), library_folder(torch_version))
    environment = dict(os.environ)
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    others = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = (
        f"{libraries}{os.pathsep}{others}" if others else str(libraries)
    )
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
