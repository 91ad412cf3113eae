"""Reading other threads' frames while garbage is collected and threads start and end."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hangwatch.agent.recorder import callers
from tests.harness.processes import clean_environment

# In Python 3.11 `sys._current_frames` in place of `find_frame` deadlocks here immediately,
# with the GIL held.
_SAMPLING_SCRIPT = """
import threading, time
from hangwatch.agent.recorder.callers import find_frame

class LetsGoOfTheGil:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)

def look():
    for _ in range(3000):
        LetsGoOfTheGil()
        find_frame(threading.main_thread().ident)

def start():
    for _ in range(1500):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

threads = [threading.Thread(target=work) for work in (look, look, start, start)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_sampling_never_stops_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SAMPLING_SCRIPT],
        env=clean_environment(),
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Waiter:
    """A thread that waits in a function with a local variable of its own."""

    def __init__(self) -> None:
        self.waits, self.may_return, self.has_returned = (threading.Event() for _ in range(3))
        self.local_ref: weakref.ref[object] = weakref.ref(self)
        self.thread = threading.Thread(target=self._run_thread, daemon=True)
        self.thread.start()
        assert self.waits.wait(10)

    def _run_thread(self) -> None:
        self._wait_with_local()
        self.has_returned.set()

    def _wait_with_local(self) -> None:
        local = threading.Event()
        self.local_ref = weakref.ref(local)
        self.waits.set()
        self.may_return.wait(10)


@pytest.fixture(params=[True, False], ids=["gc on", "gc off"])
def _gc_state(request: pytest.FixtureRequest) -> Iterator[None]:
    was_enabled = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield
    assert gc.isenabled() == request.param
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("_gc_state")
def test_frame_of_another_thread() -> None:
    waiter = Waiter()
    assert waiter.thread.ident is not None
    frame = callers.find_frame(waiter.thread.ident)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "_wait_with_local" in names
    waiter.may_return.set()
    waiter.thread.join()
    assert callers.find_frame(waiter.thread.ident) is None


def test_thread_inside_our_own_code_is_where_that_was_called() -> None:
    """Checks and the kernel in Python run inside a call."""
    # Functions in C, which have no frames.
    entered, may_return = threading.Lock(), threading.Lock()
    functions: dict[str, Any] = {"enter": entered.release, "wait": may_return.acquire}
    entered.acquire()
    may_return.acquire()
    recorder = os.path.dirname(callers.__file__)
    for file, code in (
        (f"{recorder}/checks/inspection.py", "def check(): enter(), wait()"),
        (f"{recorder}/faults.py", "def run_guarded(): check()"),
        (f"{recorder}/python_kernel.py", "def kernel(): run_guarded()"),
        ("/packages/torch/distributed/distributed_c10d.py", "def all_reduce(): kernel()"),
    ):
        exec(compile(code, file, "exec"), functions)
    thread = threading.Thread(target=functions["all_reduce"])
    thread.start()
    assert entered.acquire(timeout=10)
    assert thread.ident is not None
    try:
        assert callers.inspect_thread(thread.ident) == (True, True)
    finally:
        may_return.release()
        thread.join()


@pytest.mark.parametrize("inspect", [callers.find_frame, callers.inspect_thread])
def test_inspection_keeps_no_local_variable_alive(inspect: Callable[[int], object]) -> None:
    """All threads are sampled, so those that are not inspected count as well."""
    inspected, other = Waiter(), Waiter()
    threshold = gc.get_threshold()
    gc.set_threshold(100_000)  # it stays enabled: then 3.11 takes its own path
    try:
        assert inspected.thread.ident is not None
        inspect(inspected.thread.ident)
        for waiter in (inspected, other):
            waiter.may_return.set()
            assert waiter.has_returned.wait(10)
            assert waiter.local_ref() is None
    finally:
        gc.set_threshold(*threshold)
