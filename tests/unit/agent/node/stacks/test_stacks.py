"""Parsing the output of py-spy and faulthandler, and the errors reported if they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks import faulthandler_dumps, sampler
from hangwatch.agent.node.stacks.pyspy import PySpy, PySpyError, explain_failure, parse_dump
from hangwatch.agent.node.system.processes import read_stat
from hangwatch.model.ranks import Frame, ThreadStack
from tests.simulation.waiting import wait_until

FAULTHANDLER_DUMP = """Thread 0x00007f73526fc6c0 [loader one] (most recent call first):
  File "/a/q.py", line 2 in get
  File "/a/threading.py", line 982 in run

Current thread 0x00007f7353257b80 (most recent call first):
  File "<string>", line ??? in <module>
  File "train.py", line 41 in step of it
"""


def test_faulthandler_dump() -> None:
    main, other = faulthandler_dumps.parse_stacks(FAULTHANDLER_DUMP, 0x7F7353257B80)
    assert main == ThreadStack(
        thread="MainThread", main=True,
        frames=(Frame(function="<module>", file="<string>", line=0), Frame(function="step of it", file="train.py", line=41)),
    )  # fmt: skip
    assert (other.thread, other.main, [f.function for f in other.frames]) == (
        "loader one",
        False,
        ["get", "run"],
    )
    assert (
        faulthandler_dumps.parse_stacks(FAULTHANDLER_DUMP)[1].thread == "thread 0x00007f7353257b80"
    ), "no thread is marked as main without evidence"
    with pytest.raises(faulthandler_dumps.FaultStacksError):
        faulthandler_dumps.parse_stacks("nonsense\n")


def test_invalid_signal_is_never_sent() -> None:
    valid = {"stacks_signal": 62, "stacks_fd": 5, "main_thread": 7}
    assert faulthandler_dumps.FaulthandlerRegistration.from_identity(valid).signal == 62
    for identity in (
        {},
        {"stacks_signal": 9, "stacks_fd": 5},
        {"stacks_signal": "62", "stacks_fd": 5},
        {"stacks_signal": 62},
    ):
        registration = faulthandler_dumps.FaulthandlerRegistration.from_identity(identity)
        assert registration.signal is None


def test_thread_list_names_the_threads() -> None:
    thread_list = {0x7F7353257B80: (41, "MainThread"), 0x7F73526FC6C0: (42, "loader")}
    main, other = faulthandler_dumps.parse_stacks(FAULTHANDLER_DUMP, 0x7F7353257B80, thread_list)
    assert (main.thread, main.tid, main.main) == ("MainThread", 41, True)
    assert (other.thread, other.tid, other.main) == ("loader", 42, False)


WAITER_CODE = """
import os, sys, threading
from pathlib import Path
from hangwatch.agent.environment.run_dir import read_start_ticks
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import LiveWord
ring = RingWriter(Path(sys.argv[1]), pid=os.getpid(), start_ticks=read_start_ticks(os.getpid()))
def wake_often():
    ring.set_word(LiveWord.RECORDER_THREAD, threading.get_native_id())
    print(flush=True)
    while not stop.wait(0.005):
        pass
stop = threading.Event()
threading.Thread(target=wake_often, daemon=True).start()
while sys.stdin.readline():
    ring.write_pulse(0)
    print(flush=True)
"""


class FakeGilWaiter:
    """A process whose recorder's thread seems to wait for the GIL. It has no handler on the signal: one
    that was sent would end it.
    """

    def __init__(self, process: subprocess.Popen[bytes], ring_path: Path) -> None:
        self.process = process
        self.start_ticks = read_stat(process.pid).start_ticks
        self._ring_path = ring_path

    def write_pulse(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def request_stacks(self, start_ticks: int) -> faulthandler_dumps.OwnDump:
        registration = faulthandler_dumps.FaulthandlerRegistration(
            signal=61, fd=0, main_thread=None
        )
        return faulthandler_dumps.request_stacks(
            self.process.pid, start_ticks, self._ring_path, registration, wait_s=0.9
        )


@pytest.fixture
def gil_waiter(tmp_path: Path) -> Iterator[FakeGilWaiter]:
    ring_path = tmp_path / "x.ring"
    with subprocess.Popen(
        [sys.executable, "-c", WAITER_CODE, str(ring_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield FakeGilWaiter(process, ring_path)
        assert process.poll() is None
        process.kill()


def test_no_signal_without_handler(gil_waiter: FakeGilWaiter) -> None:
    with pytest.raises(faulthandler_dumps.FaultStacksError, match="no longer catches"):
        gil_waiter.request_stacks(gil_waiter.start_ticks)
    with pytest.raises(faulthandler_dumps.FaultStacksError, match="has ended"):
        gil_waiter.request_stacks(gil_waiter.start_ticks + 1)


def test_no_signal_while_the_recorder_runs(gil_waiter: FakeGilWaiter) -> None:
    gil_waiter.write_pulse()
    with pytest.raises(faulthandler_dumps.FaultStacksError, match="did not answer"):
        gil_waiter.request_stacks(gil_waiter.start_ticks)


def test_pyspy_dump() -> None:
    threads = [
        {"pid": 7, "thread_id": 1, "thread_name": "w", "os_thread_id": 9, "active": True, "owns_gil": True,
         "frames": [{"name": "inner", "filename": "/a.py", "line": 3}, {"name": "outer", "filename": "/a.py", "line": 9}]},
        {"pid": 7, "thread_id": 2, "thread_name": None, "os_thread_id": 7, "active": False, "owns_gil": False, "frames": []},
    ]  # fmt: skip
    main, worker = parse_dump(json.dumps(threads).encode())
    assert (main.thread, main.main, main.holds_gil) == ("MainThread", True, False)
    assert (worker.thread, worker.active, worker.holds_gil, worker.tid) == ("w", True, True, 9)
    assert [f.function for f in worker.frames] == ["inner", "outer"], "the innermost first"
    for bad in (b"", b"{}x", b'[{"pid": 1}]', b"[3]"):
        with pytest.raises(PySpyError):
            parse_dump(bad)


def test_pyspy_errors_name_the_remedy() -> None:
    refused = explain_failure(
        "Error: Permission Denied: Try running again with elevated permissions by going 'sudo env"
        " ...'"
    )
    assert refused.is_permanent
    for remedy in ("--cap-add SYS_PTRACE", "securityContext", "kernel.yama.ptrace_scope=0"):
        assert remedy in str(refused)
    assert "upgrade py-spy" in str(explain_failure("Error: Unsupported version of Python: 3.19.0"))
    assert "has ended" in str(
        explain_failure(
            "Error: Failed to open process\n\nCaused by:\n    No such process (os error 3)\n"
        )
    )
    assert not explain_failure("Error: something else").is_permanent


def write_script(folder: Path, text: str) -> str:
    path = folder / "py-spy"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_hanging_pyspy_is_killed(tmp_path: Path) -> None:
    spy = PySpy(path=write_script(tmp_path, "exec sleep 60\n"), timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(PySpyError, match=r"more than 0\.3 s"):
        spy.dump_stacks(os.getpid(), read_stat(os.getpid()).start_ticks)
    assert time.monotonic() - began < 10


@pytest.fixture
def busy_pid() -> Iterator[int]:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "while :; do :; done"], dict(os.environ))
    assert wait_until(lambda: read_stat(pid).state == "R", 5.0)
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def stop_process(pid: int) -> str:
    """A shell command that returns once the process is stopped."""
    return f"kill -STOP {pid}; until grep -q T.*stopped /proc/{pid}/status; do :; done"


@pytest.mark.parametrize("end", ["exit 1", "kill -KILL $$", "exec sleep 60"])
def test_target_left_stopped_by_failed_pyspy_is_continued(
    end: str, busy_pid: int, tmp_path: Path
) -> None:
    script = write_script(tmp_path, f"{stop_process(busy_pid)}; {end}\n")
    with pytest.raises(PySpyError, match="it was continued"):
        PySpy(path=script, timeout_s=0.5).dump_stacks(busy_pid, read_stat(busy_pid).start_ticks)
    assert wait_until(lambda: read_stat(busy_pid).state == "R", 5.0)


@pytest.mark.parametrize(("nonblocking", "exit_status"), [(False, 0), (True, 0), (True, 1)])
def test_target_that_was_stopped_meanwhile_stays_stopped(
    busy_pid: int, tmp_path: Path, nonblocking: bool, exit_status: int
) -> None:
    """A debugger or a scheduler stops it while py-spy starts, which may take a second."""
    script = f"{stop_process(busy_pid)}; echo '[]'; exit {exit_status}\n"
    spy = PySpy(path=write_script(tmp_path, script))
    start_ticks = read_stat(busy_pid).start_ticks
    with pytest.raises(PySpyError) if exit_status else nullcontext():
        spy.dump_stacks(busy_pid, start_ticks, nonblocking=nonblocking)
    time.sleep(0.6)  # a process that is found stopped gets half a second
    assert read_stat(busy_pid).state == "T"


@pytest.mark.parametrize(
    ("command", "is_paused"), [("sleep 60", False), ("while :; do :; done", True)]
)
def test_only_a_process_that_runs_is_paused(command: str, is_paused: bool, tmp_path: Path) -> None:
    """py-spy pauses the process unless an option forbids that, and could end a system call."""
    pid = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", f"exec {command}" if "sleep" in command else command],
        dict(os.environ),
    )
    try:
        thread = {"pid": pid, "thread_id": 1, "os_thread_id": pid, "frames": []}
        script = f"echo $* >> {tmp_path}/calls; echo '{json.dumps([thread])}'\n"
        assert wait_until(lambda: (read_stat(pid).state == "R") == is_paused, 5.0)
        time.sleep(0.1)  # the thread begins to sleep, or to run
        spy = PySpy(path=write_script(tmp_path, script))
        (stack,) = spy.dump_stacks(pid, read_stat(pid).start_ticks)
        assert stack.main
        calls = (tmp_path / "calls").read_text().splitlines()
        assert ["--nonblocking" in call for call in calls] == [not is_paused]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_pause_follows_a_reading_in_which_a_thread_moved(tmp_path: Path) -> None:
    code = "import time\nprint(flush=True)\nwhile True: time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pid = process.pid
        thread = {"pid": pid, "thread_id": 1, "os_thread_id": pid, "frames": []}
        script = f"echo $* >> {tmp_path}/calls; sleep 0.2; echo '{json.dumps([thread])}'\n"
        PySpy(path=write_script(tmp_path, script)).dump_stacks(pid, read_stat(pid).start_ticks)
        process.kill()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--nonblocking" not in calls[-1]


def test_vanished_or_uninterruptible_target(tmp_path: Path) -> None:
    spy = PySpy(path="/nonexistent/py-spy", proc=str(tmp_path))
    with pytest.raises(PySpyError, match="has ended"):
        spy.dump_stacks(7, 1)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (python) D 1 1 1 0 -1 0 0 0 0 0 1 0 0 0 20 0 1 0 1 0\n")
    with pytest.raises(PySpyError, match="uninterruptible"):
        spy.dump_stacks(7, 1)
    with pytest.raises(PySpyError, match="pip install py-spy"):
        PySpy(path=None).dump_stacks(7, 1)


def test_source_lines_are_read_from_regular_files_only(tmp_path: Path) -> None:
    code = tmp_path / "train.py"
    code.write_text("a = 1\n    b = 2  \n")
    os.mkfifo(tmp_path / "pipe.py")
    places = [
        (str(code), 2),
        (str(code), 9),
        (str(tmp_path / "pipe.py"), 1),
        (str(tmp_path / "none.py"), 1),
        ("<string>", 1),
    ]
    stack = ThreadStack(
        thread="t", frames=tuple(Frame(function="f", file=file, line=line) for file, line in places)
    )
    (annotated,) = sampler.add_source_text([stack], os.getpid())
    assert [frame.text for frame in annotated.frames] == ["b = 2", None, None, None, None]


def test_user_line_is_read_below_many_library_frames(tmp_path: Path) -> None:
    code = tmp_path / "train.py"
    code.write_text("for batch in loader:\n")
    library = tuple(
        Frame(function="next", file=f"/usr/lib/python3.11/site-packages/torch/{n}.py", line=1)
        for n in range(20)
    )
    mine = Frame(function="main", file=str(code), line=1)
    (annotated,) = sampler.add_source_text(
        [ThreadStack(thread="t", frames=(*library, mine, replace(mine, function="run")))],
        os.getpid(),
    )
    assert [frame.text for frame in annotated.frames[-2:]] == ["for batch in loader:", None]
