"""Finds and ends the processes of one test. A test gives them a folder of their own in
HANGWATCH_RUN_DIR: all inherit it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from hangwatch.agent.node.system.processes import read_stat
from tests.simulation.waiting import wait_until


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without the variables of hangwatch and torchrun, and with `added`.

    The Python recorder is used unless HANGWATCH_RECORDER is set, so that no node agent builds the
    native one during a test.
    """
    recorder = {
        k: v for k, v in os.environ.items() if k in ("HANGWATCH_RECORDER", "HANGWATCH_CACHE_DIR")
    }
    dropped = ("HANGWATCH_", "TORCHELASTIC_", "TORCH_NCCL", "PET_")
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PLANTED_AT"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in ranks}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HANGWATCH_RECORDER": "python",
        **recorder,
        **added,
    }


def find_job_processes(run_dir: Path) -> dict[int, str]:
    """The live processes that have `run_dir` in their environment, and their command lines."""
    variable = f"HANGWATCH_RUN_DIR={run_dir}".encode()
    command_lines: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            environ = (entry / "environ").read_bytes().split(b"\0")
            if variable in environ and process_state(pid) not in "ZX":
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                command_lines[pid] = b" ".join(arguments).decode(errors="replace").strip()
    return command_lines


def read_resident_mb(pid: int) -> float:
    """The resident memory. Raises OSError if there is no such process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def read_cpu_s(pid: int) -> float:
    """The CPU time of all threads. Raises OSError if there is no such process."""
    return read_stat(pid).cpu_ticks / os.sysconf("SC_CLK_TCK")


def process_state(pid: int) -> str:
    """The state as one letter, as in /proc; ``X`` if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def parent_pid(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def find_agents(run_dir: Path) -> set[int]:
    """The live node agents of a run directory: the holders of its locks."""
    pids: set[int] = set()
    for lock in run_dir.rglob("agent.lock"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or its lock is empty yet
            pid = int(lock.read_text())
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if process_state(pid) not in "ZX" and b"hangwatch" in command_line:
                pids.add(pid)
    return pids


def find_rings(run_dir: Path) -> list[Path]:
    return sorted(run_dir.rglob("*.ring"))


def kill_processes(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def clean_up_job(run_dir: Path, agent_exit_timeout_s: float = 15.0) -> list[str]:
    """Kills a job, and waits until its node agent exits by itself. Returns what remains of
    hangwatch, which is then killed, too.
    """
    agents: set[int] = set()
    for _ in range(50):
        agents |= find_agents(run_dir)
        job_processes = set(find_job_processes(run_dir)) - agents
        if not job_processes:
            break
        kill_processes(job_processes)
        time.sleep(0.05)

    def is_cleaned_up() -> bool:
        return (
            not find_job_processes(run_dir) and not find_agents(run_dir) and not find_rings(run_dir)
        )

    if wait_until(is_cleaned_up, agent_exit_timeout_s):
        return []
    remaining = find_job_processes(run_dir)
    problems = [f"process {pid} remains: {command}" for pid, command in remaining.items()]
    problems += [f"file {path.name} remains" for path in find_rings(run_dir)]
    kill_processes(set(find_job_processes(run_dir)) | find_agents(run_dir))
    return problems
