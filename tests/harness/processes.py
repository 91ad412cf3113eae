"""Finds and ends the processes of one test. A test gives them a folder of their own in
HANGWATCH_RUN_DIR: all inherit it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.simulation.waiting import wait_until


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment, rid of what would steer hangwatch, torchrun or the colours, and
    with `added`.

    Python records unless HANGWATCH_RECORDER tells otherwise, so that no node agent builds the other
    recorder beside a test.
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
    wanted = f"HANGWATCH_RUN_DIR={run_dir}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            if (
                wanted in (entry / "environ").read_bytes().split(b"\0")
                and process_state(int(entry.name)) not in "ZX"
            ):
                found[int(entry.name)] = (
                    (entry / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
    return found


def process_state(pid: int) -> str:
    """One letter, as /proc has it; ``X`` where there is no such process."""
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
    """The live node agents of a run folder: the holders of its locks."""
    found = set()
    for lock in run_dir.rglob("agent.lock"):
        with contextlib.suppress(OSError, ValueError):  # just gone, or not yet written
            pid = int(lock.read_text())
            if (
                process_state(pid) not in "ZX"
                and b"hangwatch" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                found.add(pid)
    return found


def find_rings(run_dir: Path) -> list[Path]:
    return sorted(run_dir.rglob("*.ring"))


def kill_processes(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def clean_up_job(run_dir: Path, agent_exit_timeout_s: float = 15.0) -> list[str]:
    """Ends a job the hard way, and says what is left of hangwatch after its node agent had time to
    leave by itself.
    """
    spared: set[int] = set()
    for _ in range(50):
        spared |= find_agents(run_dir)
        doomed = set(find_job_processes(run_dir)) - spared
        if not doomed:
            break
        kill_processes(doomed)
        time.sleep(0.05)

    def is_cleaned_up() -> bool:
        return (
            not find_job_processes(run_dir) and not find_agents(run_dir) and not find_rings(run_dir)
        )

    if wait_until(is_cleaned_up, agent_exit_timeout_s):
        return []
    left = [f"process {pid} is left: {line}" for pid, line in find_job_processes(run_dir).items()]
    left += [f"file {path.name} is left" for path in find_rings(run_dir)]
    kill_processes(set(find_job_processes(run_dir)) | find_agents(run_dir))
    return left
