"""Which real threads a device holds, as far as it can be seen without one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks.device_holds import mark_device_hold
from hangwatch.agent.node.stacks.pyspy import PySpy, PySpyError, locate_pyspy, parse_place
from hangwatch.agent.node.stacks.sampler import mark_callers
from hangwatch.agent.node.system.processes import read_stat
from hangwatch.ring.reader import Caller
from tests.simulation.waiting import wait_until

_SOURCE = r"""
#include <time.h>
extern "C" void wait_for_device(double seconds) {
    timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while (now.tv_sec - start.tv_sec + 1e-9 * (now.tv_nsec - start.tv_nsec) < seconds);
}
"""
_PROGRAM = """
import ctypes, sys, threading
library = ctypes.CDLL(sys.argv[1])
library.wait_for_device.argtypes = (ctypes.c_double,)
def waits():
    library.wait_for_device(600)
def waits_in_thread():
    threading.Thread(target=waits, daemon=True).start()
    print(threading.enumerate()[-1].native_id, flush=True)
    threading.Event().wait()
def evaluates():
    total = 0.0
    while True:
        library.wait_for_device(0.02)
        total += 0.5
def computes():
    sum(range(1 << 60))
print(threading.main_thread().native_id, flush=True)
globals()[sys.argv[2]]()
"""


@pytest.mark.parametrize(
    ("function", "is_held"),
    [("waits", True), ("waits_in_thread", True), ("evaluates", False), ("computes", False)],
)
def test_device_hold(function: str, is_held: bool, tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    compiler = ["g++", "-x", "c++", "-shared", "-fPIC", "-O1", "-o", str(library), "-"]
    subprocess.run(compiler, input=_SOURCE.encode(), check=True)
    command = [sys.executable, "-c", _PROGRAM, str(library), function]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        tid = int(process.stdout.readline())
        if function == "waits_in_thread":
            tid = int(process.stdout.readline())
        spy = PySpy(path=locate_pyspy())

        def is_called() -> bool:
            try:
                place = spy.read_place(process.pid, tid)
            except PySpyError:  # a reading that does not pause the process may fail
                return False
            return function.removesuffix("_in_thread") in [frame[0][1] for frame in place]

        assert wait_until(is_called, 30.0)
        threads = spy.dump_stacks(process.pid, read_stat(process.pid).start_ticks)
        threads = mark_callers(threads, process.pid, [Caller(thread=tid, uids=(1,))])
        holds = [mark_device_hold(threads, process.pid, spy) for _ in range(2)]
        process.kill()
    assert holds[0] == holds[1]
    held = [thread.tid for thread in holds[0] if thread.device_hold]
    assert held == ([tid] if is_held else [])
    assert None not in [thread.device_hold for thread in holds[0]], "all were examined"


def test_no_hold_is_claimed_without_pyspy() -> None:
    spy = PySpy(path=locate_pyspy())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.3)
        threads = spy.dump_stacks(process.pid, read_stat(process.pid).start_ticks)
        (stack,) = mark_device_hold(threads, process.pid, PySpy(path=None))
        process.kill()
    assert stack.device_hold == 0


def test_place_of_main_thread_without_thread_ids() -> None:
    thread = (
        '[{"pid": 7, "os_thread_id": null, "thread_name": "MainThread", "frames": [{"name": "step",'
        ' "filename": "/t.py", "line": 3, "locals": [{"name": "n", "addr": 9, "repr": "5"}]}]}]'
    )
    place = ((("/t.py", "step", 3), (("n", 9, "5"),)),)
    assert parse_place(thread.encode(), 7) == place
    with pytest.raises(PySpyError, match="ended"):
        parse_place(thread.encode(), 8)
    with pytest.raises(PySpyError, match="not understood"):
        parse_place(b"[{}]", 7)
