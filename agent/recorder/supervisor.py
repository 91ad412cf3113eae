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

_CHECK_EVERY = 2.0  # seconds
_START_WITHIN = 3.0
_TRIES = 3  # before the user is told
_PR_SET_PTRACER = 0x59616D61  # prctl(2); "Yama"
_RUN = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from hangwatch.agent.node.main import"
    " main; main()"
)
# What makes a process a rank, or preloads things meant for one.
_NOT_FOR_AGENTS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "PYTHONINSPECT",
    "PYTHONSTARTUP",
    "PYTHONDEVMODE",
    "PYTHONWARNINGS",
)


class Beside:
    """Called often, does little: one look at a lock every two seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        self._starting: int | None = None  # the start lock, while a node agent of ours comes up
        self._give_up = 0.0
        self._failed = 0
        self._agent = 0
        self._told = False

    def look_after(self) -> None:
        now = monotonic()
        if now < self._next:
            return
        alive = self._agent_pid()
        if alive:
            self._done_starting()
            self._let_in(alive)
            self._pass_on_notice()
        elif self._starting is None:
            self._start(now)
        elif now > self._give_up:
            self._done_starting()
            self._failed += 1
            if self._failed == _TRIES:
                faults.note(
                    "no node agent could be started, nobody watches this host: see"
                    f" {self._folder / run_dir.AGENT_LOG}"
                )
        self._next = now + (_CHECK_EVERY if alive else 0.2)

    def _agent_pid(self) -> int:
        """The pid of the node agent that holds the lock; 0 where none does."""
        try:
            fd = os.open(self._folder / run_dir.AGENT_LOCK, os.O_RDONLY | os.O_CLOEXEC)
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

    def _start(self, now: float) -> None:
        """Starts one, unless another rank is doing so: it holds the start lock until the new agent
        has its own.
        """
        fd = os.open(
            self._folder / run_dir.START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return
        self._starting, self._give_up = fd, now + _START_WITHIN
        env = {k: v for k, v in os.environ.items() if k not in _NOT_FOR_AGENTS} | {
            "PYTHONSAFEPATH": "1"
        }
        # Its own session and none of our descriptors: `torchrun ... | tee log` must end when the
        # ranks do. What is started here forks once more and ends at once, so that nothing stays
        # behind as a child of the rank.
        first = subprocess.Popen(
            [sys.executable, "-c", _RUN, "--run-dir", str(self._folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=env, start_new_session=True, cwd="/",
        )  # fmt: skip
        first.wait(10)

    def _done_starting(self) -> None:
        if self._starting is not None:
            os.close(self._starting)
            self._starting = None

    def _let_in(self, agent: int) -> None:
        """Under Yama's ptrace scope 1 a process names who may look into it. Kernels without Yama
        answer EINVAL.
        """
        if agent > 0 and agent != self._agent:
            self._agent = agent
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0)

    def _pass_on_notice(self) -> None:
        """What the node agent has to tell the user, told once a host: by the first rank to take the
        notice away.
        """
        if self._told:
            return
        notice = self._folder / run_dir.NOTICE
        if notice.exists():
            self._told = True
            taken = notice.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.rename(notice, taken)
                sys.stderr.write(f"hangwatch: {taken.read_text(errors='replace').strip()}\n")
                taken.unlink()
