"""The threads of torch's own that carry out collectives, when the interpreter is about to go."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

from hangwatch.model.backends import WORKER_THREAD_NAMES

_TASK_DIR = Path("/proc/self/task")


def wait_until_idle(timeout_s: float = 0.2) -> None:
    """Waits, ``limit`` seconds at most, until those threads rest.

    A worker drops its last references to tensors only after it has said that the call is complete,
    and needs the GIL for those that Python has seen. Where the interpreter is ending by then, torch
    ends the process with SIGABRT ("terminate called without an active exception":
    https://github.com/pytorch/pytorch/issues/190489). DDP's own tensors Python sees on account of
    the kernels of ours, so this race must not be left to luck.
    """
    seen = {
        task.name: ""
        for task in _TASK_DIR.iterdir()
        if _read_task_file(task.name, "comm").strip() in WORKER_THREAD_NAMES
    }
    end = monotonic() + timeout_s
    while seen and monotonic() < end:
        sleep(0.001)  # without the GIL, so that who waits for it gets it
        now = {task: _read_activity(task) for task in seen}
        # One that runs works; one whose switches went up was waiting for something that came, as
        # the GIL.
        seen = {
            task: found
            for task, found in now.items()
            if found.startswith("R") or found != seen[task]
        }


def _read_activity(task: str) -> str:
    """Its state and its voluntary context switches, as /proc has them; empty once it has ended."""
    lines = dict(
        line.split(":\t", 1)
        for line in _read_task_file(task, "status").splitlines()
        if ":\t" in line
    )
    return f"{lines.get('State', '')} {lines.get('voluntary_ctxt_switches', '')}".strip()


def _read_task_file(task: str, name: str) -> str:
    try:
        return (_TASK_DIR / task / name).read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""
