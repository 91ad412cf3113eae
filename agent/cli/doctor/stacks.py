"""Checks py-spy and faulthandler by taking the stacks of a small process that is started for it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...environment import run_dir
from ...node.stacks import faulthandler_dumps
from ...node.stacks.pyspy import PySpy, PySpyError, locate_pyspy
from ...node.system import permission
from .findings import Finding

_READY_S = 20.0
_SLEEPER_CODE = """
import sys
sys.path[:] = [p for p in sys.path if p]
import json, os, threading, time
from pathlib import Path
from hangwatch.agent.environment.run_dir import read_start_ticks
from hangwatch.agent.recorder.fault_dumps import StackDumper
from hangwatch.agent.recorder.writer import RingWriter
path = Path(sys.argv[1])
ring = RingWriter(path, pid=os.getpid(), start_ticks=read_start_ticks(os.getpid()))
dumper = StackDumper(path, ring)
def answer():
    dumper.start_answering()
    while True:
        ring.write_pulse(0)
        dumper.answer_request()
        time.sleep(0.05)
threading.Thread(target=answer, daemon=True).start()
def hangwatch_doctor_sleeps():
    print(json.dumps({**dumper.registration, "main_thread": threading.main_thread().ident}), flush=True)
    sys.stdin.read()
hangwatch_doctor_sleeps()
"""


def check_stacks(path: str | None = None) -> Iterator[Finding]:
    """Checks py-spy (at ``path``, or where it is installed) and faulthandler."""
    path = path or locate_pyspy()
    with tempfile.TemporaryDirectory(prefix="hangwatch-doctor-") as folder:
        ring_path = Path(folder, f"sleeper{run_dir.RING_SUFFIX}")
        env = {k: v for k, v in os.environ.items() if k not in ("HANGWATCH_URL", "RANK")}
        env["PYTHONSAFEPATH"] = "1"
        with subprocess.Popen(
            [sys.executable, "-c", _SLEEPER_CODE, str(ring_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd="/",
        ) as sleeper:
            try:
                registered = _await_registration(sleeper)
                pyspy_finding = check_pyspy(PySpy(path=path), sleeper.pid)
                yield pyspy_finding
                is_needed = not pyspy_finding.ok
                yield check_faulthandler(sleeper.pid, registered, ring_path, needed=is_needed)
            except (OSError, ValueError) as error:
                yield Finding(
                    name="stacks",
                    ok=False,
                    detail=f"the test process did not start: {error}",
                    remedy="check whether Python itself works here",
                )
            finally:
                with contextlib.suppress(OSError):  # it has ended already
                    sleeper.kill()


def check_pyspy(pyspy: PySpy, pid: int) -> Finding:
    """Takes the stacks of the process ``pid`` with py-spy."""
    name = "py-spy"
    if pyspy.path is None:
        return Finding(
            name=name,
            ok=None,
            detail="not installed: stacks come from faulthandler",
            remedy="pip install py-spy",
        )
    facts = _format_ptrace_facts()
    try:
        threads = pyspy.dump_stacks(pid, run_dir.read_start_ticks(pid)).threads
    except PySpyError as error:
        text = str(error)
        # The message includes the remedy, since it is also shown with the stacks of a rank.
        reason, _, remedy = text.partition(". " if permission.PTRACE_REMEDY in text else ": ")
        return Finding(
            name=name,
            ok=False,
            detail=f"{reason} ({facts})",
            remedy=remedy or "pip install --upgrade py-spy",
        )
    functions = [frame.function for thread in threads for frame in thread.frames]
    if not any("hangwatch_doctor_sleeps" in function for function in functions):
        return Finding(
            name=name,
            ok=False,
            detail=f"it reads wrong stacks ({facts})",
            remedy="pip install --upgrade py-spy",
        )
    return Finding(
        name=name, ok=True, detail=f"{pyspy.path} reads the stacks of another process ({facts})"
    )


def _format_ptrace_facts() -> str:
    facts = permission.read_ptrace_facts()
    parts = [
        f"CAP_SYS_PTRACE {'held' if facts.has_capability else 'missing'}",
        f"Yama scope {'none' if facts.yama_scope is None else facts.yama_scope}",
    ]
    if facts.has_seccomp_filter:
        parts.append("a seccomp filter")
    return ", ".join(parts)


def check_faulthandler(
    pid: int, registered: dict[str, Any], ring_path: Path, *, needed: bool
) -> Finding:
    """Lets the process ``pid`` write its own stacks with faulthandler, as a rank does."""
    name = "faulthandler"
    registration = faulthandler_dumps.FaulthandlerRegistration.from_identity(registered)
    remedy = "without it, py-spy must work" if needed else "py-spy works, so it is not needed"
    try:
        dump = faulthandler_dumps.request_stacks(
            pid, run_dir.read_start_ticks(pid), ring_path, registration
        )
    except faulthandler_dumps.FaultStacksError as error:
        return Finding(name=name, ok=False if needed else None, detail=str(error), remedy=remedy)
    if registration.signal is None:
        return Finding(
            name=name,
            ok=None,
            detail="no signal is free for it: a rank that keeps the GIL in native code has no stack",
            remedy=remedy,
        )
    role = "replaces py-spy" if needed else "used where py-spy is not permitted"
    return Finding(
        name=name,
        ok=True,
        detail=f"a process writes the stacks of its {len(dump.threads)} threads: {role}",
    )


def _await_registration(sleeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The registration that the process prints when it is ready. Raises ValueError if it fails."""
    assert sleeper.stdout is not None
    readable, _, _ = select.select([sleeper.stdout], [], [], _READY_S)
    if not readable:
        raise ValueError(f"it was not ready within {_READY_S:g} s")
    registered = json.loads(sleeper.stdout.readline() or b"null")
    if not isinstance(registered, dict):
        raise ValueError("it ended immediately")
    return registered
