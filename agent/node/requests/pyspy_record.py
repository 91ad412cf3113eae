"""Runs `py-spy record`, which samples for some seconds where a process spends its time."""

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

# How much longer than requested a recording may take, to start and to write its output.
MAX_OVERRUN_S = 15.0
MAX_NATIVE_OVERRUN_S = 45.0
UNINTERRUPTIBLE_WAIT_S = 1.0  # a process that merely reads a file leaves state D within this time
WRITE_TIMEOUT_S = 3.0  # to write its output, once it was interrupted
NICENESS = 10  # the job comes first; at 19 it would never run on a busy host
MAX_OUTPUT_BYTES = 32 << 20
_MIN_SAMPLE_SHARE = 0.8  # of the requested samples; the note of a recording with fewer says so
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
    """Samples the process. As soon as ``get_stop_reason`` returns one, the recording ends and keeps
    its samples so far. Raises PySpyError.

    The process is not paused, so that its steps take as long as ever; a few stacks change while
    they are read and mix two moments. With native frames each sample pauses the process.
    """
    if pyspy.path is None:
        raise PySpyError("py-spy is not installed: pip install py-spy", is_permanent=True)
    state = _wait_until_interruptible(pyspy, spec)
    if state == "D":
        raise PySpyError(
            "in uninterruptible sleep (state D): it waits in the kernel and is not sampled; try"
            " again, or see hangwatch dump"
        )
    if spec.native and state in "Tt":
        raise PySpyError(
            f"stopped (state {state}): it uses no time, and hangwatch dump shows where it stopped"
        )
    with contextlib.suppress(ProcessLookupError):  # it has ended: py-spy reports it
        if not permission.may_read_memory(spec.pid):
            raise PySpyError(permission.format_refusal(pyspy.proc), is_permanent=True)
    with tempfile.TemporaryDirectory(prefix="hangwatch-record-") as folder:
        output = Path(folder, "samples")
        try:
            took_s, stop_reason = _run_recording(pyspy, spec, output, get_stop_reason)
        finally:
            if spec.native:
                pyspy.ensure_running(spec.pid, spec.start_ticks)
        return _read_recording(output, spec, took_s, stop_reason, pyspy)


def _wait_until_interruptible(pyspy: PySpy, spec: RecordingSpec) -> str:
    """Waits a short time for the process to leave state D, and returns its state."""
    deadline = time.monotonic() + UNINTERRUPTIBLE_WAIT_S
    while True:
        state = pyspy.read_state(spec.pid, spec.start_ticks)
        if state != "D" or time.monotonic() >= deadline:
            return state
        time.sleep(0.02)


def build_command(path: str, spec: RecordingSpec, output: Path) -> list[str]:
    command = [path, "record", "--pid", str(spec.pid)]
    command += ["--duration", str(spec.seconds), "--rate", str(spec.rate)]
    command += ["--format", "raw", "--full-filenames", "--threads", "--output", str(output)]
    command.append("--gil" if spec.gil else "--idle")
    command.append("--native" if spec.native else "--nonblocking")
    return command


def _run_recording(
    pyspy: PySpy, spec: RecordingSpec, output: Path, get_stop_reason: Callable[[], str]
) -> tuple[float, str]:
    """Runs py-spy. Returns the seconds it took, and why it was ended early (empty if it was not)."""
    assert pyspy.path is not None  # checked by `record_profile`
    began = time.monotonic()
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
        limit_s = spec.seconds + (MAX_NATIVE_OVERRUN_S if spec.native else MAX_OVERRUN_S)
        stop_reason = _wait_for_recording(process, limit_s, get_stop_reason)
        stderr.seek(0)
        messages = stderr.read(1 << 16).decode(errors="replace")
    if stop_reason and not output.exists():
        raise PySpyError(f"{stop_reason} before there was a sample")
    if process.returncode and not output.exists():
        raise explain_failure(messages, pyspy.proc)
    return time.monotonic() - began, stop_reason


def _wait_for_recording(
    process: subprocess.Popen[bytes], limit_s: float, get_stop_reason: Callable[[], str]
) -> str:
    """Waits for py-spy's end, and returns why it was ended early, if it was. Raises PySpyError if it
    exceeds the limit.
    """
    began = time.monotonic()
    stop_reason = ""
    try:
        with contextlib.suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        while process.poll() is None and time.monotonic() - began < limit_s:
            if not stop_reason:
                stop_reason = get_stop_reason()
                if stop_reason:
                    process.send_signal(signal.SIGINT)  # it writes its samples
                    limit_s = time.monotonic() - began + WRITE_TIMEOUT_S
            time.sleep(_POLL_INTERVAL_S)
    finally:
        is_late = process.poll() is None
        if is_late:
            process.kill()
        process.wait()
    if is_late and not stop_reason:
        raise PySpyError(
            f"py-spy took more than {limit_s:g} s and was killed; the host may be overloaded: try"
            " a lower --rate"
        )
    return stop_reason


def _read_recording(
    output: Path, spec: RecordingSpec, took_s: float, stop_reason: str, pyspy: PySpy
) -> ProfileRecording:
    try:
        if output.stat().st_size > MAX_OUTPUT_BYTES:
            raise PySpyError(
                f"py-spy's samples take more than {MAX_OUTPUT_BYTES >> 20} MiB: request fewer with"
                " --seconds or --rate"
            )
        with output.open(encoding="utf-8", errors="replace") as lines:
            profile = parse_pyspy_raw((line.rstrip("\n") for line in lines), spec.pid)
    except (OSError, ValueError) as error:
        ended = "" if _is_alive(pyspy, spec) else "; the process has ended"
        raise PySpyError(f"py-spy's output is not understood ({error}){ended}") from error
    is_alive = _is_alive(pyspy, spec)
    seconds: float = spec.seconds
    if stop_reason or not is_alive:
        seconds = min(took_s, seconds)
    return ProfileRecording(
        profile=profile,
        seconds=round(seconds, 2),
        note=_describe_shortfall(profile, spec, seconds, stop_reason, is_alive),
    )


def _describe_shortfall(
    profile: Profile, spec: RecordingSpec, seconds: float, stop_reason: str, is_alive: bool
) -> str:
    if stop_reason:
        return f"ended after {seconds:.1f} of {spec.seconds} s: {stop_reason}"
    if not is_alive:
        return f"the process ended after {seconds:.1f} s"
    sample_count = next((t.sample_count for t in profile.threads if t.is_main), 0)
    requested_count = spec.rate * spec.seconds
    if not spec.gil and sample_count < _MIN_SAMPLE_SHARE * requested_count:
        return (
            f"only {sample_count} of {requested_count} samples were taken: the host is busy, or"
            " stacks changed while they were read"
        )
    return ""


def _is_alive(pyspy: PySpy, spec: RecordingSpec) -> bool:
    try:
        pyspy.read_state(spec.pid, spec.start_ticks)
    except PySpyError:
        return False
    return True
