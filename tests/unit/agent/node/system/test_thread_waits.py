"""What /proc shows of where threads wait."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hangwatch.agent.node.system.thread_waits import describe_wait, read_turns, was_asleep
from tests.simulation.waiting import wait_until


def write_thread(proc: Path, tid: int, state: str, **files: str) -> None:
    folder = proc / "7" / "task" / str(tid)
    folder.mkdir(parents=True)
    fields = " ".join(["0"] * 50)
    (folder / "stat").write_text(f"{tid} (python) {state} {fields}\n")
    for name, content in files.items():
        (folder / name).write_text(content)


def test_description_of_where_a_thread_waits(tmp_path: Path) -> None:
    write_thread(tmp_path, 7, "S", wchan="hrtimer_nanosleep", syscall="230 0x1 0x0 0x7ff 0x7ff\n")
    write_thread(tmp_path, 8, "S", wchan="0")  # what another user reads
    write_thread(tmp_path, 9, "R", wchan="0", syscall="running\n")
    texts = [describe_wait(7, tid, str(tmp_path)) for tid in (7, 8, 9, 10)]
    assert texts == [
        "asleep in the kernel (hrtimer_nanosleep, system call 230)",
        "asleep in the kernel (state S)",
        "running on a CPU",
        "gone",
    ]


def wait_for_gil(stop: threading.Event) -> None:
    """Wakes as often as a thread that waits for the GIL."""
    while not stop.wait(0.005):
        pass


def run_python(stop: threading.Event) -> None:
    while not stop.wait(0.001):
        sum(range(50_000))


def wait_asleep(stop: threading.Event) -> None:
    while not stop.is_set():
        time.sleep(0.005)


@contextlib.contextmanager
def running_threads(
    *functions: Callable[[threading.Event], object],
) -> Iterator[tuple[int, ...]]:
    """Runs each function in a thread; yields the ids of the threads."""
    stop = threading.Event()
    threads = [threading.Thread(target=function, args=(stop,)) for function in functions]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    yield tuple(thread.native_id or 0 for thread in threads)
    stop.set()
    for thread in threads:
        thread.join()


def find_candidates(waiter: int) -> list[int]:
    """Asked in another process, since this one would hold the GIL meanwhile."""
    code = (
        "from hangwatch.agent.node.system.thread_waits import find_gil_candidates;"
        f"print(*find_gil_candidates({os.getpid()}, {waiter}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(tid) for tid in done.stdout.split()]


def test_thread_that_sleeps_may_keep_the_gil_from_one_that_waits() -> None:
    with running_threads(wait_for_gil, threading.Event.wait) as (waiter, sleeper):
        # The waiter may wake too late to be recognized on a busy machine.
        assert wait_until(lambda: sleeper in find_candidates(waiter), 30.0)
        assert waiter not in find_candidates(waiter)


def test_nobody_keeps_the_gil_while_another_thread_runs_python() -> None:
    with running_threads(wait_for_gil, threading.Event.wait, run_python) as (waiter, *_):
        assert find_candidates(waiter) == []


def test_thread_that_waits_for_something_else() -> None:
    with running_threads(wait_asleep, threading.Event.wait) as (waiter, sleeper):
        assert find_candidates(waiter) == []
        assert find_candidates(sleeper) == []


def test_thread_that_has_slept_between_two_readings_is_unchanged() -> None:
    with running_threads(wait_for_gil, threading.Event.wait) as (waiter, sleeper):
        before = read_turns(os.getpid())
        time.sleep(0.1)
        after = read_turns(os.getpid())
    assert was_asleep(before[sleeper], after[sleeper])
    assert not was_asleep(before[waiter], after[waiter])
    assert not was_asleep(None, after[sleeper])
