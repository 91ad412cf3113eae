"""Starts the processes of a demo in sessions of their own, so that the terminal's Ctrl-C does not
reach them, and ends all processes that have the demo's mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...environment.run_dir import make_private_folder

MARK_VARIABLE = "HANGWATCH_RUN_DIR"  # the demo's own folder: unique to its processes

# Variables that a launcher or a watched job around the demo has set would change the demo's job.
_FOREIGN_PREFIXES = (
    "HANGWATCH_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_",
    "PET_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "PYTHONPATH", "PYTHONSAFEPATH",
)  # fmt: skip


class DemoSandbox:
    """A temporary folder and the processes that run in it. `close` removes both."""

    def __init__(self, env: Mapping[str, str], proc: str = "/proc") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hangwatch-demo-"))
        self._proc = proc
        self._started: list[subprocess.Popen[bytes]] = []
        rings, temporary = self.folder / "run", self.folder / "tmp"
        make_private_folder(rings)
        make_private_folder(temporary)  # torchrun leaves folders behind
        self._mark = f"{MARK_VARIABLE}={rings}".encode()
        kept = {k: v for k, v in env.items() if not k.startswith(_FOREIGN_PREFIXES)}
        self.env = kept | {
            MARK_VARIABLE: str(rings),
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start_process(
        self, name: str, command: Sequence[str], **env: str
    ) -> subprocess.Popen[bytes]:
        """Starts a command in a session of its own. Its output is written to the files ``NAME.out``
        and ``NAME.err`` in the folder.
        """
        with (
            open(self.folder / f"{name}.out", "wb") as out,
            open(self.folder / f"{name}.err", "wb") as err,
        ):
            started = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.env | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def read_output(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):  # not started yet
            return (self.folder / name).read_text(errors="replace")
        return ""

    def close(self, patience_s: float = 3.0) -> None:
        """Ends every process: by SIGTERM, and after `patience_s` seconds by SIGKILL."""
        self._signal_processes(signal.SIGTERM)
        kill_at = time.monotonic() + patience_s
        deadline = kill_at + patience_s
        while self.find_processes() and time.monotonic() < deadline:
            if time.monotonic() > kill_at:
                # Repeated, because a process may have forked in between.
                self._signal_processes(signal.SIGKILL)
            self._reap_processes()
            time.sleep(0.05)
        self._reap_processes()
        shutil.rmtree(self.folder, ignore_errors=True)

    def find_processes(self) -> list[int]:
        """All processes that have the mark. Process groups would not do: the ranks are in sessions
        of their own, and the node agent is not a child of the demo.
        """
        return [
            pid
            for pid in _list_pids(self._proc)
            if pid != os.getpid() and self._mark in _read_environ(self._proc, pid)
        ]

    def _signal_processes(self, number: signal.Signals) -> None:
        for pid in self.find_processes():
            with contextlib.suppress(ProcessLookupError):  # it has exited meanwhile
                os.kill(pid, number)

    def _reap_processes(self) -> None:
        for process in self._started:
            process.poll()


def _list_pids(proc: str) -> list[int]:
    return [int(path.name) for path in Path(proc).iterdir() if path.name.isdigit()]


def _read_environ(proc: str, pid: int) -> list[bytes]:
    try:
        return Path(proc, str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # it has exited, or belongs to another user
        return []
