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

from ..stacks.pyspy import PySpy, PySpyError, explain_failure
from ..system import permission

MAX_OVERRUN_S, MAX_NATIVE_OVERRUN_S = (
    15.0,
    45.0,
)  # that a recording may take longer than asked: to start, and to write what it found
UNINTERRUPTIBLE_WAIT_S = 1.0  # in which a process that merely reads a file leaves state D
WRITE_TIMEOUT_S = 3.0  # for what it has by then, once it is told to end
NICENESS = 10  # the job comes first; at 19 it would see a busy host only when that rests
MAX_OUTPUT_BYTES = 32 << 20  # bytes of py-spy's output
_MIN_SAMPLE_SHARE = 0.8  # of the samples asked for
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSpec:
    """What is to be recorded of one process."""

    pid: int
    start_ticks: int
    seconds: int
    rate: int
    native: bool = False
    gil: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecording:
    profile: Profile
    seconds: float
    note: str = ""


def record_profile(
    pyspy: PySpy, spec: RecordingSpec, get_stop_reason: Callable[[], str]
) -> ProfileRecording:
    """Samples the process; ``enough`` ends it early, with what there is by then, once it gives a
    reason. Raises PySpyError.

    The process is not paused for it, so that its step takes as long as ever: now and then a stack
    is read while it changes and mixes two moments. Native frames cannot be had so: each of their
    samples pauses the process.
    """
    if pyspy.path is None:
        raise PySpyError("py-spy is not installed: pip install py-spy", is_permanent=True)
    until = time.monotonic() + UNINTERRUPTIBLE_WAIT_S
    while (
        state := pyspy.read_state(spec.pid, spec.start_ticks)
    ) == "D" and time.monotonic() < until:
        time.sleep(0.02)
    if state == "D":
        raise PySpyError(
            "in uninterruptible sleep (state D): it waits in the kernel and is not sampled; try"
            " again, or see hangwatch dump"
        )
    if spec.native and state in "Tt":
        raise PySpyError(
            f"stopped (state {state}): it spends its time nowhere, and hangwatch dump says where it"
            " stands"
        )
    with contextlib.suppress(ProcessLookupError):  # it has ended: py-spy says so
        if not permission.may_read_memory(spec.pid):
            raise PySpyError(permission.format_refusal(pyspy.proc), is_permanent=True)
    with tempfile.TemporaryDirectory(prefix="hangwatch-record-") as folder:
        output = Path(folder, "samples")
        try:
            seconds, why = _run_recording(pyspy, spec, output, get_stop_reason)
        finally:
            if spec.native:
                pyspy.ensure_running(spec.pid, spec.start_ticks)
        return _read_recording(output, spec, seconds, why, pyspy)


def build_command(path: str, spec: RecordingSpec, output: Path) -> list[str]:
    told = [
        path,
        "record",
        "--pid",
        str(spec.pid),
        "--duration",
        str(spec.seconds),
        "--rate",
        str(spec.rate),
    ]
    told += ["--format", "raw", "--full-filenames", "--threads", "--output", str(output)]
    return [
        *told,
        "--gil" if spec.gil else "--idle",
        "--native" if spec.native else "--nonblocking",
    ]


def _run_recording(
    pyspy: PySpy, spec: RecordingSpec, output: Path, get_stop_reason: Callable[[], str]
) -> tuple[float, str]:
    """Runs py-spy: the seconds it took, and why it was ended early, if it was."""
    assert pyspy.path is not None  # seen to by `record`
    limit = spec.seconds + (MAX_NATIVE_OVERRUN_S if spec.native else MAX_OVERRUN_S)
    began, why = time.monotonic(), ""
    with (output.parent / "stderr").open("w+b") as stderr:
        try:
            process = subprocess.Popen(
                build_command(pyspy.path, spec, output),
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
                if not why and (why := get_stop_reason()):
                    process.send_signal(signal.SIGINT)  # it writes what it has
                    limit = time.monotonic() - began + WRITE_TIMEOUT_S
                time.sleep(_POLL_INTERVAL_S)
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
        raise explain_failure(said, pyspy.proc)
    return time.monotonic() - began, why


def _read_recording(
    output: Path, spec: RecordingSpec, took_s: float, stop_reason: str, pyspy: PySpy
) -> ProfileRecording:
    try:
        if output.stat().st_size > MAX_OUTPUT_BYTES:
            raise PySpyError(
                f"py-spy's samples take more than {MAX_OUTPUT_BYTES >> 20} MiB: ask for fewer with"
                " --seconds or --rate"
            )
        with output.open(encoding="utf-8", errors="replace") as lines:
            profile = parse_pyspy_raw((line.rstrip("\n") for line in lines), spec.pid)
    except (OSError, ValueError) as error:
        ended = "" if _is_alive(pyspy, spec) else "; the process has ended meanwhile"
        raise PySpyError(f"py-spy gave nothing that is understood ({error}){ended}") from error
    lives = _is_alive(pyspy, spec)
    seconds = spec.seconds if lives and not stop_reason else min(took_s, spec.seconds)
    return ProfileRecording(
        profile=profile,
        seconds=round(seconds, 2),
        note=_describe_shortfall(profile, spec, seconds, stop_reason, lives),
    )


def _describe_shortfall(
    profile: Profile, spec: RecordingSpec, seconds: float, stop_reason: str, is_alive: bool
) -> str:
    if stop_reason:
        return f"ended after {seconds:.1f} of {spec.seconds} s: {stop_reason}"
    if not is_alive:
        return f"the process ended after {seconds:.1f} s"
    main = next((t.sample_count for t in profile.threads if t.is_main), 0)
    if not spec.gil and main < _MIN_SAMPLE_SHARE * spec.rate * spec.seconds:
        return (
            f"{main} of {spec.rate * spec.seconds} samples could be taken: the host is busy, or"
            " stacks changed while they were read"
        )
    return ""


def _is_alive(pyspy: PySpy, spec: RecordingSpec) -> bool:
    try:
        pyspy.read_state(spec.pid, spec.start_ticks)
    except PySpyError:
        return False
    return True
