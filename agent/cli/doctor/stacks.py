"""Checks of where stacks come from, by really taking some: py-spy's and faulthandler's, of a small
process made for it.
"""

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
import json, threading, time
from pathlib import Path
from hangwatch.agent.recorder.fault_dumps import register_stack_dumps
told = register_stack_dumps(Path(sys.argv[1]))
def hangwatch_doctor_sleeps():
    print(json.dumps({**told, "main_thread": threading.main_thread().ident}), flush=True)
    sys.stdin.read()
hangwatch_doctor_sleeps()
"""


def check_stacks(path: str | None = None) -> Iterator[Finding]:
    """py-spy (at ``path``, else where it is found) and faulthandler."""
    path = path or locate_pyspy()
    with tempfile.TemporaryDirectory(prefix="hangwatch-doctor-") as folder:
        output = Path(folder, "sleeper.stacks")
        env = {k: v for k, v in os.environ.items() if k not in ("HANGWATCH_URL", "RANK")} | {
            "PYTHONSAFEPATH": "1"
        }
        with subprocess.Popen(
            [sys.executable, "-c", _SLEEPER_CODE, str(output)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd="/",
        ) as sleeper:
            try:
                told = _await_registration(sleeper)
                spied = check_pyspy(PySpy(path=path), sleeper.pid)
                yield spied
                yield check_faulthandler(sleeper.pid, told, output, needed=not spied.ok)
            except (OSError, ValueError) as error:
                detail = f"the process for trying them did not start: {error}"
                yield Finding(
                    name="stacks",
                    ok=False,
                    detail=detail,
                    remedy="see whether Python itself works here",
                )
            finally:
                with contextlib.suppress(OSError):  # it has ended already
                    sleeper.kill()


def check_pyspy(pyspy: PySpy, pid: int) -> Finding:
    """py-spy on a real process."""
    name = "py-spy"
    if pyspy.path is None:
        return Finding(
            name=name,
            ok=None,
            detail="not installed: stacks come from faulthandler",
            remedy="pip install py-spy",
        )
    facts = permission.read_ptrace_facts()
    known = (
        f"CAP_SYS_PTRACE {'held' if facts.has_capability else 'missing'}, Yama scope"
        f" {'none' if facts.yama_scope is None else facts.yama_scope}"
        + (", a seccomp filter" if facts.has_seccomp_filter else "")
    )
    try:
        threads = pyspy.dump_stacks(pid, run_dir.read_start_ticks(pid)).threads
    except PySpyError as error:
        text = str(error)
        # The remedy is a part of the message, since a rank's stacks carry the same one.
        why, _, remedy = text.partition(". " if permission.PTRACE_REMEDY in text else ": ")
        return Finding(
            name=name,
            ok=False,
            detail=f"{why} ({known})",
            remedy=remedy or "pip install --upgrade py-spy",
        )
    if not any(
        "hangwatch_doctor_sleeps" in frame.function for thread in threads for frame in thread.frames
    ):
        return Finding(
            name=name,
            ok=False,
            detail=f"it reads wrong stacks ({known})",
            remedy="pip install --upgrade py-spy",
        )
    return Finding(
        name=name, ok=True, detail=f"{pyspy.path} reads the stacks of another process ({known})"
    )


def check_faulthandler(
    pid: int, registered: dict[str, Any], output: Path, *, needed: bool
) -> Finding:
    """faulthandler on the same process, by the same way that a rank goes."""
    name = "faulthandler"
    registration = faulthandler_dumps.FaulthandlerRegistration.from_identity(registered)
    remedy = "without it, py-spy must work" if needed else "py-spy works, so it is not needed"
    if registration is None:
        return Finding(
            name=name,
            ok=False if needed else None,
            detail="no signal is free for it",
            remedy=remedy,
        )
    try:
        threads = faulthandler_dumps.request_stacks(
            pid, run_dir.read_start_ticks(pid), registration, output
        )
    except faulthandler_dumps.FaultStacksError as error:
        return Finding(name=name, ok=False if needed else None, detail=str(error), remedy=remedy)
    role = "serves in py-spy's place" if needed else "stands in where py-spy may not"
    return Finding(
        name=name,
        ok=True,
        detail=f"answers on signal {registration.signal} with {len(threads)} stack: {role}",
    )


def _await_registration(sleeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the process registered, once it sleeps. Raises ValueError where it does not get there."""
    assert sleeper.stdout is not None
    if not select.select([sleeper.stdout], [], [], _READY_S)[0]:
        raise ValueError(f"nothing heard of it within {_READY_S:g} s")
    told = json.loads(sleeper.stdout.readline() or b"null")
    if not isinstance(told, dict):
        raise ValueError("it ended at once")
    return told
