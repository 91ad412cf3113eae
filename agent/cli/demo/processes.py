"""The processes of a demo: started apart from the terminal's Ctrl-C, found by a mark in their
environment, all ended at the end.
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

MARK_VARIABLE = "HANGWATCH_RUN_DIR"  # the demo's own folder: no other process has it

# What a launcher or a watched job around the demo has set would make it another job than it is.
_FOREIGN_PREFIXES = (
    "HANGWATCH_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_",
    "PET_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "PYTHONPATH", "PYTHONSAFEPATH",
)  # fmt: skip


class DemoSandbox:
    """A temporary folder and what runs in it. `close` leaves nothing of either."""

    def __init__(self, env: Mapping[str, str], proc: str = "/proc") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hangwatch-demo-"))
        self._proc = proc
        self._started: list[subprocess.Popen[bytes]] = []
        rings, temporary = self.folder / "run", self.folder / "tmp"
        rings.mkdir()
        temporary.mkdir()  # torchrun leaves folders behind
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
        """Starts a command in a session of its own; what it says goes to the folder's ``NAME.out``
        and ``NAME.err``.
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
        """Ends every process: asked first, killed after `patience_s` seconds."""
        self._signal_processes(signal.SIGTERM)
        polite, deadline = time.monotonic() + patience_s, time.monotonic() + 2 * patience_s
        while self.find_processes() and time.monotonic() < deadline:
            if time.monotonic() > polite:
                self._signal_processes(
                    signal.SIGKILL
                )  # again and again: one may have forked in between
            self._reap_processes()
            time.sleep(0.05)
        self._reap_processes()
        shutil.rmtree(self.folder, ignore_errors=True)

    def find_processes(self) -> list[int]:
        """All that carry the mark: the ranks are in sessions of their own, and the node agent is
        nobody's child.
        """
        return [
            pid
            for pid in _list_pids(self._proc)
            if pid != os.getpid() and self._mark in _read_environ(self._proc, pid)
        ]

    def _signal_processes(self, number: signal.Signals) -> None:
        for pid in self.find_processes():
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, number)

    def _reap_processes(self) -> None:
        for process in self._started:
            process.poll()


def _list_pids(proc: str) -> list[int]:
    return [int(path.name) for path in Path(proc).iterdir() if path.name.isdigit()]


def _read_environ(proc: str, pid: int) -> list[bytes]:
    try:
        return Path(proc, str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or somebody else's
        return []
