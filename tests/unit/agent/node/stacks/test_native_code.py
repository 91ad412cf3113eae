"""Where a real thread is in native code, read while it is paused for microseconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks import device_holds
from hangwatch.agent.node.stacks.device_holds import is_in_driver
from hangwatch.agent.node.system import processes
from hangwatch.agent.node.system.processes import read_fields, read_mappings
from tests.simulation.waiting import wait_until

# A library that spins in its own code, in code of the C library that it calls, or in a function that its
# caller gives it, or sleeps.
_SOURCE = r"""
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
extern "C" void spin() { for (volatile long n = 0;; n = n + 1) {} }
extern "C" void lock() {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    for (;;) { pthread_mutex_lock(&mutex); pthread_mutex_unlock(&mutex); }
}
extern "C" void run(void (*function)()) { function(); }
static void write_byte(int) { if (write(1, "x", 1)) {} }
extern "C" void count_signals() { signal(34, write_byte); spin(); }
extern "C" void rest() { for (;;) sleep(1); }
"""
_PROGRAM = """
import ctypes, sys
driver, other, function, argument = sys.argv[1:]
libraries = {"driver": ctypes.CDLL(driver), "other": ctypes.CDLL(other)}
library, _, name = function.partition(".")
library_2, _, name_2 = argument.partition(".")
arguments = [getattr(libraries[library_2], name_2)] if argument else []
print(flush=True)
getattr(libraries[library], name)(*arguments)
"""

_SIGNALS = 20_000  # as many bytes fit into a pipe


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same library with the name of a driver and with another one."""
    folder = tmp_path_factory.mktemp("libraries")
    driver, other = folder / "libcudart-0a1b.so.13", folder / "libcudnn.so.9"
    for library in (driver, other):
        command = ["g++", "-x", "c++", "-shared", "-fPIC", "-O1", "-o", str(library), "-"]
        subprocess.run(command, input=_SOURCE.encode(), check=True)
    return driver, other


@contextmanager
def run_function(
    libraries: tuple[Path, Path], function: str, argument: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", _PROGRAM, *map(str, libraries), function, argument]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        is_resting = function.endswith("rest")
        assert wait_until(
            lambda: processes.read_stat(process.pid).state == ("S" if is_resting else "R"), 5.0
        )
        time.sleep(0.1)  # it calls the function
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        ("driver.spin", "", True),
        ("driver.lock", "", True),
        ("driver.run", "driver.lock", True),
        ("driver.run", "other.spin", False),  # as when it compiles
        ("other.run", "driver.spin", True),
        ("other.spin", "", False),
        ("other.lock", "", False),
        ("driver.rest", "", False),
    ],
)
def test_thread_in_driver(
    libraries: tuple[Path, Path], function: str, argument: str, expected: bool
) -> None:
    with run_function(libraries, function, argument) as process:
        pid = process.pid
        mappings = read_mappings(pid)
        assert [is_in_driver(pid, pid, mappings) for _ in range(20)] == [expected] * 20
        assert read_fields(f"/proc/{pid}/status")["TracerPid"] == "0"


def test_thread_gets_its_signals(libraries: tuple[Path, Path]) -> None:
    """Some of them arrive while it is seized, and stop it before the interrupt does."""
    with run_function(libraries, "driver.count_signals") as process:
        mappings = read_mappings(process.pid)
        script = (
            f"n=0; while [ $n -lt {_SIGNALS} ]; do kill -34 {process.pid} && n=$((n + 1)); done"
        )
        with subprocess.Popen(["sh", "-c", script]) as sender:
            while sender.poll() is None:
                is_in_driver(process.pid, process.pid, mappings)
        time.sleep(0.2)  # the last of them are delivered
        process.kill()
        assert process.stdout is not None
        assert len(process.stdout.read()) == _SIGNALS


def test_stopped_process_stays_stopped(libraries: tuple[Path, Path]) -> None:
    with run_function(libraries, "driver.spin") as process:
        pid = process.pid
        mappings = read_mappings(pid)
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: processes.read_stat(pid).state == "T", 5.0)
        assert not is_in_driver(pid, pid, mappings)
        assert processes.read_stat(pid).state == "T"


def test_thread_continues_after_an_error(
    libraries: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with run_function(libraries, "driver.spin") as process:
        pid = process.pid
        mappings = read_mappings(pid)
        monkeypatch.setattr(device_holds._PausedReading, "_wait_for_stop", fail)
        monkeypatch.setattr("threading.excepthook", lambda _: None)
        assert not is_in_driver(pid, pid, mappings)
        assert wait_until(lambda: processes.read_stat(pid).state == "R", 5.0)
        assert wait_until(lambda: read_fields(f"/proc/{pid}/status")["TracerPid"] == "0", 5.0)


@pytest.mark.parametrize("seconds", [0.02, 60.0])
def test_thread_that_another_one_traces(libraries: tuple[Path, Path], seconds: float) -> None:
    """The tracer may be a thread of our own that gave up and has not ended yet."""
    with run_function(libraries, "driver.spin") as process:
        pid = process.pid
        script = (
            f"import ctypes, os, time; assert not ctypes.CDLL(None).ptrace(0x4206, {pid}, 0, 0);"
            f" print(flush=True); time.sleep({seconds}); os._exit(0)"
        )
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
            assert tracer.stdout is not None
            tracer.stdout.readline()
            if seconds < 1.0:
                assert is_in_driver(pid, pid, read_mappings(pid))
            else:
                with pytest.raises(PermissionError, match=str(pid)):
                    is_in_driver(pid, pid, read_mappings(pid))
            tracer.kill()


def test_ended_thread_is_an_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(OSError, match=re.escape(str(process.pid))):
        is_in_driver(process.pid, process.pid, [])


def test_machine_with_unknown_registers(
    libraries: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_function(libraries, "driver.spin") as process:
        pid = process.pid
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
        with pytest.raises(NotImplementedError):
            is_in_driver(pid, pid, read_mappings(pid))
