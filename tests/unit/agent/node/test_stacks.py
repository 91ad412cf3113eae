"""Parsing the output of py-spy and faulthandler, and the errors reported if they fail."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks import faulthandler_dumps, source
from hangwatch.agent.node.stacks.pyspy import PySpy, PySpyError, explain_failure, parse_dump
from hangwatch.agent.node.system.processes import read_stat
from hangwatch.model.threads import Frame, ThreadStack
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


def test_invalid_faulthandler_registration_is_ignored() -> None:
    assert (
        faulthandler_dumps.FaulthandlerRegistration.from_identity(
            {"stacks_signal": 62, "stacks_fd": 5}
        )
        is not None
    )
    for identity in (
        {},
        {"stacks_signal": 9, "stacks_fd": 5},
        {"stacks_signal": "62", "stacks_fd": 5},
        {"stacks_signal": 62},
    ):
        assert faulthandler_dumps.FaulthandlerRegistration.from_identity(identity) is None


def test_no_signal_to_process_without_handler(tmp_path: Path) -> None:
    """This very process has no handler on the signal: one that was sent would end the test run."""
    output = tmp_path / "x.stacks"
    sent = []
    with open(output, "ab") as f:
        registration = faulthandler_dumps.FaulthandlerRegistration(
            signal=61, fd=f.fileno(), main_thread=None
        )
        pid = os.getpid()
        ticks = read_stat(pid).start_ticks
        with pytest.raises(faulthandler_dumps.FaultStacksError, match="no longer catches"):
            faulthandler_dumps.request_stacks(
                pid, ticks, registration, output, send_signal=lambda *what: sent.append(what)
            )
        with pytest.raises(faulthandler_dumps.FaultStacksError, match="has ended"):
            faulthandler_dumps.request_stacks(
                pid, ticks + 1, registration, output, send_signal=lambda *what: sent.append(what)
            )
    assert sent == []


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


def test_target_left_stopped_by_pyspy_is_resumed(tmp_path: Path) -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], dict(os.environ))
    try:
        stops = (
            f"kill -STOP {pid}; until grep -q T.*stopped /proc/{pid}/status; do :; done; echo"
            " '[]'\n"
        )
        dump = PySpy(path=write_script(tmp_path, stops)).dump_stacks(
            pid, read_stat(pid).start_ticks
        )
        assert dump.was_continued
        assert wait_until(lambda: read_stat(pid).state != "T", 5.0)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


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
    (annotated,) = source.add_source_text([stack], os.getpid())
    assert [frame.text for frame in annotated.frames] == ["b = 2", None, None, None, None]


def test_user_line_is_read_below_many_library_frames(tmp_path: Path) -> None:
    code = tmp_path / "train.py"
    code.write_text("for batch in loader:\n")
    library = tuple(
        Frame(function="next", file=f"/usr/lib/python3.11/site-packages/torch/{n}.py", line=1)
        for n in range(20)
    )
    mine = Frame(function="main", file=str(code), line=1)
    (annotated,) = source.add_source_text(
        [ThreadStack(thread="t", frames=(*library, mine, replace(mine, function="run")))],
        os.getpid(),
    )
    assert [frame.text for frame in annotated.frames[-2:]] == ["for batch in loader:", None]
