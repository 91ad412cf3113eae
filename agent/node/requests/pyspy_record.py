"""`py-spy record`: where a process spends its time, sampled from outside for some seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hangwatch.stacks.profile import Profile, parse_pyspy_raw

from ..stacks.pyspy import PySpy, PySpyError, explain
from ..system import permission

OVER_S, NATIVE_OVER_S = (
    15.0,
    45.0,
)  # that a recording may take longer than asked: to start, and to write what it found
READING_S = 1.0  # in which a process that merely reads a file leaves state D
WRITE_S = 3.0  # for what it has by then, once it is told to end
NICENESS = 10  # the job comes first; at 19 it would see a busy host only when that rests
LARGEST = 32 << 20  # bytes of py-spy's output
_ENOUGH = 0.8  # of the samples asked for
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be recorded of one process."""

    pid: int
    start_ticks: int
    seconds: int
    rate: int
    native: bool = False
    gil: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    profile: Profile
    seconds: float
    note: str = ""


def record(pyspy: PySpy, wish: Wish, enough: Callable[[], str]) -> Recording:
    """Samples the process; ``enough`` ends it early, with what there is by then, once it gives a
    reason. Raises PySpyError.

    The process is not paused for it, so that its step takes as long as ever: now and then a stack
    is read while it changes and mixes two moments. Native frames cannot be had so: each of their
    samples pauses the process.
    """
    if pyspy.path is None:
        raise PySpyError("py-spy is not installed: pip install py-spy", lasting=True)
    until = time.monotonic() + READING_S
    while (state := pyspy.state(wish.pid, wish.start_ticks)) == "D" and time.monotonic() < until:
        time.sleep(0.02)
    if state == "D":
        raise PySpyError(
            "in uninterruptible sleep (state D): it waits in the kernel and is not sampled; try"
            " again, or see hangwatch dump"
        )
    if wish.native and state in "Tt":
        raise PySpyError(
            f"stopped (state {state}): it spends its time nowhere, and hangwatch dump says where it"
            " stands"
        )
    with contextlib.suppress(ProcessLookupError):  # it has ended: py-spy says so
        if not permission.may_read(wish.pid):
            raise PySpyError(permission.refusal(pyspy.proc), lasting=True)
    with tempfile.TemporaryDirectory(prefix="hangwatch-record-") as folder:
        output = Path(folder, "samples")
        try:
            seconds, why = _sample(pyspy, wish, output, enough)
        finally:
            if wish.native:
                pyspy.keep_running(wish.pid, wish.start_ticks)
        return _read(output, wish, seconds, why, pyspy)


def command(path: str, wish: Wish, output: Path) -> list[str]:
    told = [
        path,
        "record",
        "--pid",
        str(wish.pid),
        "--duration",
        str(wish.seconds),
        "--rate",
        str(wish.rate),
    ]
    told += ["--format", "raw", "--full-filenames", "--threads", "--output", str(output)]
    return [
        *told,
        "--gil" if wish.gil else "--idle",
        "--native" if wish.native else "--nonblocking",
    ]


def _sample(pyspy: PySpy, wish: Wish, output: Path, enough: Callable[[], str]) -> tuple[float, str]:
    """Runs py-spy: the seconds it took, and why it was ended early, if it was."""
    assert pyspy.path is not None  # seen to by `record`
    limit = wish.seconds + (NATIVE_OVER_S if wish.native else OVER_S)
    began, why = time.monotonic(), ""
    with (output.parent / "stderr").open("w+b") as stderr:
        try:
            process = subprocess.Popen(
                command(pyspy.path, wish, output),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise PySpyError(
                f"{pyspy.path} cannot be run ({error.strerror}): pip install --force-reinstall"
                " py-spy"
            ) from error
        try:
            with contextlib.suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            while process.poll() is None and time.monotonic() - began < limit:
                if not why and (why := enough()):
                    process.send_signal(signal.SIGINT)  # it writes what it has
                    limit = time.monotonic() - began + WRITE_S
                time.sleep(_POLL_S)
        finally:
            if late := process.poll() is None:
                process.kill()
            process.wait()
        if late and not why:
            raise PySpyError(
                f"py-spy took more than {limit:g} s and was killed; the host may be overloaded: try"
                " a lower --rate"
            )
        stderr.seek(0)
        said = stderr.read(1 << 16).decode(errors="replace")
    if why and not output.exists():
        raise PySpyError(f"{why} before there was a sample")
    if process.returncode and not output.exists():
        raise explain(said, pyspy.proc)
    return time.monotonic() - began, why


def _read(output: Path, wish: Wish, took: float, why: str, pyspy: PySpy) -> Recording:
    try:
        if output.stat().st_size > LARGEST:
            raise PySpyError(
                f"py-spy's samples take more than {LARGEST >> 20} MiB: ask for fewer with --seconds"
                " or --rate"
            )
        with output.open(encoding="utf-8", errors="replace") as lines:
            profile = parse_pyspy_raw((line.rstrip("\n") for line in lines), wish.pid)
    except (OSError, ValueError) as error:
        ended = "" if _lives(pyspy, wish) else "; the process has ended meanwhile"
        raise PySpyError(f"py-spy gave nothing that is understood ({error}){ended}") from error
    lives = _lives(pyspy, wish)
    seconds = wish.seconds if lives and not why else min(took, wish.seconds)
    return Recording(
        profile=profile, seconds=round(seconds, 2), note=_note(profile, wish, seconds, why, lives)
    )


def _note(profile: Profile, wish: Wish, seconds: float, why: str, lives: bool) -> str:
    if why:
        return f"ended after {seconds:.1f} of {wish.seconds} s: {why}"
    if not lives:
        return f"the process ended after {seconds:.1f} s"
    main = next((t.sample_count for t in profile.threads if t.is_main), 0)
    if not wish.gil and main < _ENOUGH * wish.rate * wish.seconds:
        return (
            f"{main} of {wish.rate * wish.seconds} samples could be taken: the host is busy, or"
            " stacks changed while they were read"
        )
    return ""


def _lives(pyspy: PySpy, wish: Wish) -> bool:
    try:
        pyspy.state(wish.pid, wish.start_ticks)
    except PySpyError:
        return False
    return True
