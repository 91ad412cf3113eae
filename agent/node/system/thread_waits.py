"""Where the threads of a process wait, as /proc shows it to anyone who may read the process."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from .processes import PROC_ROOT, TICKS_PER_S, read_schedstat, read_status, read_thread_stat

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


@dataclass(frozen=True, slots=True)
class ThreadTurns:
    """How often each thread of a process has gone to sleep or lost its CPU, and how long it ran, by
    its id; and which threads are on a CPU or wait for one.
    """

    sleeps: dict[int, int]
    preemptions: dict[int, int]
    cpu_ns: dict[int, int]
    running: frozenset[int]

    @classmethod
    def read(cls, pid: int, proc: str = PROC_ROOT) -> ThreadTurns:
        """Raises OSError if the process is gone."""
        sleeps: dict[int, int] = {}
        preemptions: dict[int, int] = {}
        cpu_ns: dict[int, int] = {}
        running = set()
        for name in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                status = read_status(f"{pid}/task/{name}", proc)
                sleeps[int(name)] = int(status.get("voluntary_ctxt_switches", "0"))
                preemptions[int(name)] = int(status.get("nonvoluntary_ctxt_switches", "0"))
                if status.get("State", "?").startswith("R"):
                    running.add(int(name))
                schedstat = read_schedstat(pid, int(name), proc)
                if schedstat:
                    cpu_ns[int(name)] = int(schedstat.split()[0])
                else:
                    ticks = read_thread_stat(pid, int(name), proc).cpu_ticks
                    cpu_ns[int(name)] = ticks * 1_000_000_000 // TICKS_PER_S
        return cls(sleeps, preemptions, cpu_ns, frozenset(running))

    def count_sleeps(self, before: ThreadTurns, tid: int) -> int:
        """How often a thread has gone to sleep since ``before`` was read."""
        return self.sleeps.get(tid, 0) - before.sleeps.get(tid, 0)

    def is_unchanged(self, before: ThreadTurns, tid: int | None) -> bool:
        """A thread was asleep all the time since ``before`` was read. False if that is not known."""
        if tid is None or tid not in self.sleeps or tid in self.running:
            return False
        return (self.sleeps[tid], self.preemptions[tid]) == (
            before.sleeps.get(tid),
            before.preemptions.get(tid),
        )


def find_gil_candidates(pid: int, waiter: int, proc: str = PROC_ROOT) -> list[int]:
    """The threads that may keep the GIL from the thread ``waiter``; empty if this thread does not
    wait for it, or if others have had it meanwhile, so that Python runs. Takes up to 0.4 seconds.

    A thread that waits for the GIL sleeps on a futex and wakes often. The one that keeps it in native
    code either sleeps all the time or runs; so may others that do not need it.
    """
    try:
        before = after = ThreadTurns.read(pid, proc)
        for _ in range(_MAX_STEPS):
            time.sleep(_STEP_S)
            after = ThreadTurns.read(pid, proc)
            if after.count_sleeps(before, waiter) >= _MIN_GIL_WAKEUPS:
                break
        else:
            return []
    except OSError:  # the process has ended
        return []
    sleeps = {tid: after.count_sleeps(before, tid) for tid in after.sleeps}
    has_run_python = any(
        after.cpu_ns.get(tid, 0) - before.cpu_ns.get(tid, 0)
        > _MAX_WAITER_CPU_NS + count * _MAX_WAKEUP_CPU_NS
        for tid, count in sleeps.items()
        if count
    )
    if has_run_python or not _sleeps_on_futex(pid, waiter, proc):
        return []
    return sorted(tid for tid, count in sleeps.items() if not count)


def _sleeps_on_futex(pid: int, tid: int, proc: str) -> bool:
    for _ in range(_WCHAN_ATTEMPTS):
        where = _read_text(f"{proc}/{pid}/task/{tid}/wchan")
        if where not in ("", "0"):
            return "futex" in where
        time.sleep(0.001)
    return False


def describe_wait(pid: int, tid: int, proc: str = PROC_ROOT) -> str:
    """Where a thread is: on a CPU, or where it sleeps in the kernel, as far as this may be read."""
    try:
        state = read_thread_stat(pid, tid, proc).state
    except (OSError, ValueError):
        return "gone"
    if state == "R":
        return "running on a CPU"
    where = _read_text(f"{proc}/{pid}/task/{tid}/wchan")
    call = _read_text(f"{proc}/{pid}/task/{tid}/syscall").split(" ")[0]
    parts = [where] if where not in ("", "0") else []
    if call.isdigit():
        parts.append(f"system call {call}")
    return f"asleep in the kernel ({', '.join(parts) or f'state {state}'})"


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(200).strip()
    except OSError:  # this is not permitted, or the thread has ended
        return ""
