"""Waits for torch's own threads, which execute collectives, before the interpreter exits."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

from hangwatch.model.backends import WORKER_THREAD_NAMES

_TASK_DIR = Path("/proc/self/task")


def wait_until_idle(timeout_s: float = 0.2) -> None:
    """Waits until those threads are idle, at most ``timeout_s`` seconds.

    A worker drops its last references to tensors only after it has reported the call as complete,
    and needs the GIL for tensors that have a Python object. If the interpreter is exiting by then,
    torch ends the process with SIGABRT ("terminate called without an active exception":
    https://github.com/pytorch/pytorch/issues/190489). DDP's own tensors have a Python object only
    because of our kernels, so hangwatch would cause this race.
    """
    activities = {
        task.name: ""
        for task in _TASK_DIR.iterdir()
        if _read_task_file(task.name, "comm").strip() in WORKER_THREAD_NAMES
    }
    end = monotonic() + timeout_s
    while activities and monotonic() < end:
        sleep(0.001)  # releases the GIL for a thread that waits for it
        current = {task: _read_activity(task) for task in activities}
        # A thread is busy if it runs, or if its context switches show that it got what it waited
        # for, such as the GIL.
        activities = {
            task: activity
            for task, activity in current.items()
            if activity.startswith("R") or activity != activities[task]
        }


def _read_activity(task: str) -> str:
    """The state and the voluntary context switches in /proc; empty once the thread has exited."""
    lines = dict(
        line.split(":\t", 1)
        for line in _read_task_file(task, "status").splitlines()
        if ":\t" in line
    )
    return f"{lines.get('State', '')} {lines.get('voluntary_ctxt_switches', '')}".strip()


def _read_task_file(task: str, name: str) -> str:
    try:
        return (_TASK_DIR / task / name).read_text(errors="replace")
    except OSError:  # it has exited
        return ""
