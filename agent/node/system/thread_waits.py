"""Where the threads of a process wait, as /proc shows it to anyone who may read the process."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from .processes import (
    PROC_ROOT,
    TICKS_PER_S,
    read_fields,
    read_schedstat,
    read_text,
    read_thread_stat,
)

# A thread that waits for the GIL wakes every 5 ms (sys.getswitchinterval) to request it, on a busy
# host less often. It is measured until it has done so often enough, and no longer than this.
_STEP_S = 0.05
_MAX_STEPS = 8
_MIN_GIL_WAKEUPS = 8
# A wakeup takes some 20 microseconds. A thread that needs more than this had the GIL meanwhile, and
# kept it for up to 5 ms.
_MAX_WAITER_CPU_NS = 1_500_000
_MAX_WAKEUP_CPU_NS = 100_000  # added for each wakeup
_WCHAN_ATTEMPTS = 10  # wchan cannot be read while the thread is awake


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTurn:
    """How often a thread slept or lost its CPU, how long it ran, and if it runs or is ready."""

    sleeps: int = 0
    preemptions: int = 0
    cpu_ns: int = 0
    is_running: bool = False


_NO_TURN = ThreadTurn()  # a thread that has just started


def read_turns(pid: int, proc: str = PROC_ROOT) -> dict[int, ThreadTurn]:
    """The turns of each thread of a process, by its id. Raises OSError if the process is gone."""
    turns = {}
    for tid in map(int, os.listdir(f"{proc}/{pid}/task")):
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            status = read_fields(f"{proc}/{pid}/task/{tid}/status")
            cpu_ns = read_schedstat(pid, tid, proc).cpu_ns
            if not cpu_ns:
                ticks = read_thread_stat(pid, tid, proc).cpu_ticks
                cpu_ns = ticks * 1_000_000_000 // TICKS_PER_S
            turns[tid] = ThreadTurn(
                sleeps=int(status.get("voluntary_ctxt_switches", "0")),
                preemptions=int(status.get("nonvoluntary_ctxt_switches", "0")),
                cpu_ns=cpu_ns,
                is_running=status.get("State", "?").startswith("R"),
            )
    return turns


def was_asleep(before: ThreadTurn | None, after: ThreadTurn | None) -> bool:
    """A thread was asleep all the time between two readings. False if that is not known."""
    if before is None or after is None or after.is_running:
        return False
    return (before.sleeps, before.preemptions) == (after.sleeps, after.preemptions)


def find_gil_candidates(pid: int, waiter: int, proc: str = PROC_ROOT) -> list[int]:
    """The threads that may keep the GIL from the thread ``waiter``; empty if this thread does not
    wait for it, or if others have had it meanwhile, so that Python runs. Takes up to 0.4 seconds.

    A thread that waits for the GIL sleeps on a futex and wakes often. The one that keeps it in native
    code either sleeps all the time or runs; so may others that do not need it.
    """
    try:
        before = after = read_turns(pid, proc)
        began = before.get(waiter, _NO_TURN)
        for _ in range(_MAX_STEPS):
            time.sleep(_STEP_S)
            after = read_turns(pid, proc)
            if after.get(waiter, _NO_TURN).sleeps - began.sleeps >= _MIN_GIL_WAKEUPS:
                break
        else:
            return []
    except OSError:  # the process has ended
        return []
    candidates = []
    for tid, turn in after.items():
        earlier = before.get(tid, _NO_TURN)
        sleeps = turn.sleeps - earlier.sleeps
        if not sleeps:
            candidates.append(tid)
        elif turn.cpu_ns - earlier.cpu_ns > _MAX_WAITER_CPU_NS + sleeps * _MAX_WAKEUP_CPU_NS:
            return []  # the thread has run Python
    for _ in range(_WCHAN_ATTEMPTS):
        where = read_text(f"{proc}/{pid}/task/{waiter}/wchan")
        if where not in ("", "0"):
            return sorted(candidates) if "futex" in where else []
        time.sleep(0.001)
    return []


def describe_wait(pid: int, tid: int, proc: str) -> str:
    """Where a thread is: on a CPU, or where it sleeps in the kernel, as far as this may be read."""
    try:
        state = read_thread_stat(pid, tid, proc).state
    except (OSError, ValueError):
        return "gone"
    if state == "R":
        return "running on a CPU"
    where = read_text(f"{proc}/{pid}/task/{tid}/wchan")
    call = read_text(f"{proc}/{pid}/task/{tid}/syscall").split(" ")[0]
    parts = [where] if where not in ("", "0") else []
    if call.isdigit():
        parts.append(f"system call {call}")
    return f"asleep in the kernel ({', '.join(parts) or f'state {state}'})"
