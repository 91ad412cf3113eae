"""A real job for one test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import launchers
from .expected import PROGRAMS_DIR
from .processes import clean_environment, clean_up_job


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRuntime:
    """The interpreter that runs a job, what that needs in its environment, and whether the ranks
    have to share one GPU.
    """

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    shares_gpu: bool = False
    command_prefix: tuple[str, ...] = ()  # the job's launcher

    def choose_launcher(self, launcher: str) -> str:
        """NCCL lets ranks share a GPU only if they are on different nodes."""
        return f"{launcher}-nodes" if self.shares_gpu else launcher


THIS_RUNTIME = TorchRuntime()
# `import earlier_calls` in the programs of the zoo.
SUPPORT_DIR = PROGRAMS_DIR / "support"
# Runs a command and its children where py-spy may not attach, as in most containers.
PTRACE_REFUSED = (sys.executable, str(Path(__file__).with_name("ptrace_refused.py")))


@dataclass(slots=True)
class LaunchedJob:
    """``process`` is the launcher; what it and its ranks print goes to ``folder``."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def planted_at(self) -> float | None:
        """When the program touched its mark right before the fault, in seconds since the epoch."""
        try:
            return (self.folder / "planted").stat().st_mtime
        except FileNotFoundError:
            return None

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")


def launch_job(
    program: Path,
    ranks: int,
    folder: Path,
    url: str | None,
    *,
    name: str = "job",
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    launcher: str = "torchrun",
    max_restarts: int = 0,
    runtime: TorchRuntime = THIS_RUNTIME,
) -> LaunchedJob:
    """Starts `program`, watched by the server at `url`, or not watched where that is None."""
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    command, needed = launchers.build_command(
        launcher,
        program,
        ranks,
        args=args,
        max_restarts=max_restarts,
        python=runtime.python,
    )
    variables = {
        "HANGWATCH_RUN_DIR": str(run_dir),
        "PLANTED_AT": str(folder / "planted"),
        **needed,
        **runtime.env,
        **(env or {}),
    }
    search_path = [str(SUPPORT_DIR), variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    if url is not None:
        variables |= {"HANGWATCH_URL": url, "HANGWATCH_JOB": name}
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*runtime.command_prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=clean_environment(**variables),
            cwd=folder,
            start_new_session=True,
        )
    return LaunchedJob(name, folder, process)


@contextlib.contextmanager
def running_job(
    program: Path,
    ranks: int,
    folder: Path,
    url: str | None,
    *,
    name: str = "job",
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    agent_exit_timeout_s: float = 15.0,
) -> Iterator[LaunchedJob]:
    """Runs a job for the length of the block, and leaves nothing of it behind.

    Raises AssertionError if its node agent has not exited `agent_exit_timeout_s` after it; 0 does
    not wait, for a job without a server.
    """
    job = launch_job(program, ranks, folder, url, name=name, env=env, args=args)
    try:
        yield job
    finally:
        left = clean_up_job(job.run_dir, agent_exit_timeout_s)
        job.process.wait()
    assert not (left and agent_exit_timeout_s), left


def run_job(
    program: Path,
    ranks: int,
    folder: Path,
    url: str | None,
    *,
    name: str = "job",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    agent_exit_timeout_s: float = 15.0,
) -> LaunchedJob:
    """Runs a job to its end, as `running_job`. Raises subprocess.TimeoutExpired if it does not
    end.
    """
    with running_job(
        program, ranks, folder, url, name=name, env=env, agent_exit_timeout_s=agent_exit_timeout_s
    ) as job:
        job.process.wait(timeout_s)
    return job
