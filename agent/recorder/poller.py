"""The one thread of hangwatch in a training process: it shows that Python can run, polls which
calls are complete, writes stacks on request, and ensures that a node agent runs on this host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hangwatch.model.ranks import RECORDER_THREAD_NAME
from hangwatch.ring.layout import LiveWord

from ..environment import run_dir
from . import faults
from .device import DeviceStatusReader
from .exceptions import HandledExceptions
from .recorder import Recorder
from .stack_dumps import StackDumper

POLL_INTERVAL_S = 0.1
_CHECK_INTERVAL_S = 2.0
_START_CHECK_INTERVAL_S = 0.2  # the interval of checks while no node agent runs
_START_TIMEOUT_S = 3.0
_MAX_START_FAILURES = 3  # the number of failures after which a message is shown
_PR_SET_PTRACER = 0x59616D61  # prctl(2); "Yama"
_AGENT_CODE = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from hangwatch.agent.node.main import"
    " main; main()"
)
# The variables that make a process a rank, or preload modules meant for one.
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


class Poller:
    """A daemon thread that takes the GIL for some 20 microseconds ten times a second."""

    def __init__(self, recorder: Recorder, folder: Path, stack_dumper: StackDumper) -> None:
        """``folder`` is the run directory."""
        self._ring = recorder.ring
        self._recorder = recorder
        self._supervisor = AgentSupervisor(folder)
        self._stack_dumper = stack_dumper
        self._device_status = DeviceStatusReader(recorder)
        # None once an exception has ended the program: its note stays.
        self.handled_exceptions: HandledExceptions | None = HandledExceptions(recorder)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(
            target=self._run_loop, name=RECORDER_THREAD_NAME, daemon=True
        )
        self.steps_by_optimizer: dict[int, int] = {}  # the key is id(optimizer)
        self.declared_step = -1

    def start_thread(self) -> None:
        steps = self.steps_by_optimizer

        def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1

        register_optimizer_step_post_hook(count_step)
        self._thread.start()

    def stop_thread(self) -> None:
        """Ends the thread, so that no thread of ours runs when the interpreter exits."""
        self._stop_event.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._poll_once()

    def _run_loop(self) -> None:
        self._stack_dumper.start_answering()
        while not self._stop_event.is_set():
            try:
                call_count = self._poll_once()
                self._stack_dumper.answer_request()
                self._device_status.update_ring(call_count, monotonic_ns())
                if self.handled_exceptions is not None:
                    self.handled_exceptions.update_note(call_count)
                self._supervisor.ensure_agent()
            except Exception as error:  # our error: the thread continues
                faults.record_fault("polling", error)
            self._stop_event.wait(POLL_INTERVAL_S)
        self._ring.set_word(LiveWord.RECORDER_THREAD, 0)

    def _poll_once(self) -> int:
        """Returns the number of calls recorded so far."""
        call_count = self._recorder.update_streams()
        self._ring.write_pulse(call_count)
        self._ring.set_word(LiveWord.DROPPED, self._recorder.count_dropped())
        step = self.declared_step
        if step < 0:  # a training step is a step of the busiest optimizer
            step = max(self.steps_by_optimizer.values(), default=-1)
        self._ring.set_word(LiveWord.STEP, step + 1)
        return call_count


class AgentSupervisor:
    """Starts the node agent if none holds the lock, which is checked every two seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_check_at = 0.0
        # The lock is held while a node agent that this process launched is starting.
        self._start_lock_fd: int | None = None
        self._start_deadline = 0.0
        self._failed_starts = 0
        self._permitted_pid = 0
        self._is_notice_shown = False

    def ensure_agent(self) -> None:
        now = monotonic()
        if now < self._next_check_at:
            return
        agent_pid = self._find_agent_pid()
        if agent_pid:
            self._release_start_lock()
            if agent_pid > 0 and agent_pid != self._permitted_pid:
                # Under Yama's ptrace scope 1, a process names the one that may attach to it.
                # Kernels without Yama return EINVAL.
                self._permitted_pid = agent_pid
                prctl = ctypes.CDLL(None, use_errno=True).prctl
                prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent_pid), 0, 0, 0)
            notice = self._folder / run_dir.NOTICE_NAME
            if not self._is_notice_shown and notice.exists():
                self._is_notice_shown = True
                taken = notice.with_suffix(f".{os.getpid()}")
                # The rank of the host that first renames the file shows the node agent's message.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(notice, taken)
                    text = taken.read_text(errors="replace").strip()
                    # It may quote the server, which must not control the user's terminal.
                    plain = "".join(c if c.isprintable() else " " for c in text)
                    sys.stderr.write(f"hangwatch: {plain}\n")
                    taken.unlink()
        elif self._start_lock_fd is None:
            self._start_agent(now)
        elif now > self._start_deadline:
            self._release_start_lock()
            self._failed_starts += 1
            if self._failed_starts == _MAX_START_FAILURES:
                faults.record_message(
                    "no node agent could be started, this host is not watched: see"
                    f" {self._folder / run_dir.AGENT_LOG_NAME}"
                )
        self._next_check_at = now + (_CHECK_INTERVAL_S if agent_pid else _START_CHECK_INTERVAL_S)

    def _find_agent_pid(self) -> int:
        """The pid of the node agent that holds the lock; 0 if none does, -1 if it is not known yet."""
        try:
            fd = os.open(self._folder / run_dir.AGENT_LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            return int(text) if text.isdigit() else -1  # the node agent will write its pid next
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile keeps the descriptor
            return 0
        finally:
            os.close(fd)

    def _start_agent(self, now: float) -> None:
        """Starts a node agent, unless another rank does: the start lock is held until it runs."""
        fd = os.open(
            self._folder / run_dir.START_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return
        self._start_lock_fd = fd
        self._start_deadline = now + _START_TIMEOUT_S
        env = {k: v for k, v in os.environ.items() if k not in _RANK_ONLY_VARIABLES}
        env["PYTHONSAFEPATH"] = "1"
        # The agent gets its own session and none of our descriptors: `torchrun ... | tee log` must
        # end when the ranks do. The process started here forks again and exits immediately, so that
        # the agent is no child of the rank.
        launcher = subprocess.Popen(
            [sys.executable, "-c", _AGENT_CODE, "--run-dir", str(self._folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=env, start_new_session=True, cwd="/",
        )  # fmt: skip
        launcher.wait(10)

    def _release_start_lock(self) -> None:
        if self._start_lock_fd is not None:
            # A child that was forked meanwhile, such as a DataLoader worker, keeps the descriptor.
            fcntl.flock(self._start_lock_fd, fcntl.LOCK_UN)
            os.close(self._start_lock_fd)
            self._start_lock_fd = None
