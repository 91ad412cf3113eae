"""Sees to it that a node agent runs beside the ranks of this host, and lets it look into this
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic

from ..environment import run_dir
from . import faults

_CHECK_INTERVAL_S = 2.0  # seconds
_START_TIMEOUT_S = 3.0
_MAX_START_FAILURES = 3  # before the user is told
_PR_SET_PTRACER = 0x59616D61  # prctl(2); "Yama"
_AGENT_CODE = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from hangwatch.agent.node.main import"
    " main; main()"
)
# What makes a process a rank, or preloads things meant for one.
_RANK_ONLY_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "PYTHONINSPECT",
    "PYTHONSTARTUP",
    "PYTHONDEVMODE",
    "PYTHONWARNINGS",
)


class AgentSupervisor:
    """Called often, does little: one look at a lock every two seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_check_at = 0.0
        # the start lock, while a node agent of ours comes up
        self._start_lock_fd: int | None = None
        self._start_deadline = 0.0
        self._failed_starts = 0
        self._permitted_pid = 0
        self._is_notice_shown = False

    def ensure_agent(self) -> None:
        now = monotonic()
        if now < self._next_check_at:
            return
        alive = self._find_agent_pid()
        if alive:
            self._release_start_lock()
            self._allow_ptrace(alive)
            self._show_notice()
        elif self._start_lock_fd is None:
            self._start_agent(now)
        elif now > self._start_deadline:
            self._release_start_lock()
            self._failed_starts += 1
            if self._failed_starts == _MAX_START_FAILURES:
                faults.record_message(
                    "no node agent could be started, nobody watches this host: see"
                    f" {self._folder / run_dir.AGENT_LOG_NAME}"
                )
        self._next_check_at = now + (_CHECK_INTERVAL_S if alive else 0.2)

    def _find_agent_pid(self) -> int:
        """The pid of the node agent that holds the lock; 0 where none does."""
        try:
            fd = os.open(self._folder / run_dir.AGENT_LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            return int(text) if text.isdigit() else -1  # it has the lock and is about to write
        else:
            return 0
        finally:
            os.close(fd)

    def _start_agent(self, now: float) -> None:
        """Starts one, unless another rank is doing so: it holds the start lock until the new agent
        has its own.
        """
        fd = os.open(
            self._folder / run_dir.START_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return
        self._start_lock_fd, self._start_deadline = fd, now + _START_TIMEOUT_S
        env = {k: v for k, v in os.environ.items() if k not in _RANK_ONLY_VARIABLES} | {
            "PYTHONSAFEPATH": "1"
        }
        # Its own session and none of our descriptors: `torchrun ... | tee log` must end when the
        # ranks do. What is started here forks once more and ends at once, so that nothing stays
        # behind as a child of the rank.
        first = subprocess.Popen(
            [sys.executable, "-c", _AGENT_CODE, "--run-dir", str(self._folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=env, start_new_session=True, cwd="/",
        )  # fmt: skip
        first.wait(10)

    def _release_start_lock(self) -> None:
        if self._start_lock_fd is not None:
            os.close(self._start_lock_fd)
            self._start_lock_fd = None

    def _allow_ptrace(self, agent_pid: int) -> None:
        """Under Yama's ptrace scope 1 a process names who may look into it. Kernels without Yama
        answer EINVAL.
        """
        if agent_pid > 0 and agent_pid != self._permitted_pid:
            self._permitted_pid = agent_pid
            ctypes.CDLL(None, use_errno=True).prctl(
                _PR_SET_PTRACER, ctypes.c_ulong(agent_pid), 0, 0, 0
            )

    def _show_notice(self) -> None:
        """What the node agent has to tell the user, told once a host: by the first rank to take the
        notice away.
        """
        if self._is_notice_shown:
            return
        notice = self._folder / run_dir.NOTICE_NAME
        if notice.exists():
            self._is_notice_shown = True
            taken = notice.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.rename(notice, taken)
                sys.stderr.write(f"hangwatch: {taken.read_text(errors='replace').strip()}\n")
                taken.unlink()
