"""Records processes by `py-spy record`, which samples for some seconds where a process spends its time:
one after the other, in a separate thread, so that neither heartbeats nor stack dumps wait for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hangwatch.protocol.commands import RecordingReply
from hangwatch.stacks.profile import Profile, pack_profile, parse_pyspy_raw

from ..stacks.pyspy import PySpy, PySpyError, explain_failure
from ..system import permission, processes

MAX_WAITING_RECORDINGS = 256
PREEMPT_TIMEOUT_S = 4.0
STOPPED_REASON = "it was stopped"
PREEMPTED_REASON = "stacks of this process were requested, and they come first"

# Seconds that a recording may take longer than requested, to start and to write its output.
MAX_OVERRUN_S = 15.0
MAX_NATIVE_OVERRUN_S = 45.0
UNINTERRUPTIBLE_WAIT_S = 1.0  # a process that merely reads a file leaves state D within this time
WRITE_TIMEOUT_S = 3.0  # py-spy writes its output within this time after it was interrupted
NICENESS = 10  # the job comes first; at 19 it would never run on a busy host
MAX_OUTPUT_BYTES = 32 << 20
_MIN_SAMPLE_SHARE = 0.8  # a recording with a lower share of the requested samples has a note
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
class RecordingOrder:
    key: str
    request_id: str
    spec: RecordingSpec


class RecordingWorker:
    """One daemon thread that runs one py-spy at a time. It calls ``wake`` for each reply, which
    `take_results` returns.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self._pyspy = pyspy
        self._wake = wake
        self._orders: queue.Queue[RecordingOrder] = queue.Queue(MAX_WAITING_RECORDINGS)
        self._results: queue.SimpleQueue[RecordingReply] = queue.SimpleQueue()
        self._current: RecordingOrder | None = None
        self._stop_reason = ""  # why the current recording is to end
        self._cancelled_request_ids: set[str] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit_order(self, order: RecordingOrder) -> bool:
        """Returns False if too many orders are queued."""
        if self._thread is None:  # started only now: most hosts are never recorded
            self._thread = threading.Thread(target=self._run_worker, name="recordings", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def is_pausing(self, key: str) -> bool:
        """A recording pauses this process now: its state t (traced) means nothing else."""
        current = self._current
        return current is not None and current.key == key and current.spec.native

    def preempt_recording(self, key: str) -> None:
        """Ends a recording that would keep a stack dump of the same process from attaching, and
        waits until it has ended.
        """
        deadline = time.monotonic() + PREEMPT_TIMEOUT_S
        while self.is_pausing(key) and time.monotonic() < deadline:
            self._stop_reason = self._stop_reason or PREEMPTED_REASON
            time.sleep(0.02)

    def stop_recording(self, request_id: str) -> None:
        """Ends one recording, which keeps its samples, or cancels it before it begins."""
        current = self._current
        if current is not None and current.request_id == request_id:
            self._stop_reason = self._stop_reason or STOPPED_REASON
        else:
            kept_ids = list(self._cancelled_request_ids)[:MAX_WAITING_RECORDINGS]
            self._cancelled_request_ids = {request_id, *kept_ids}

    def take_results(self) -> list[RecordingReply]:
        # No other thread takes results, so as many as there are now can be taken.
        return [self._results.get_nowait() for _ in range(self._results.qsize())]

    def close(self) -> None:
        """Ends the current recording, so that no py-spy outlives the node agent."""
        self._closed = True
        self._stop_reason = "the node agent exits"
        if self._thread is not None and self._current is not None:
            self._thread.join(PREEMPT_TIMEOUT_S)

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            self._stop_reason = ""
            self._current = order
            if self._closed:
                return
            if order.request_id in self._cancelled_request_ids:
                reply = _make_error_reply(order, f"{STOPPED_REASON} before it began")
            else:
                self._publish_reply(
                    RecordingReply(key=order.key, request=order.request_id, begun=True)
                )
                reply = self._record_process(order)
            self._current = None
            self._publish_reply(reply)

    def _record_process(self, order: RecordingOrder) -> RecordingReply:
        try:
            recording = record_profile(self._pyspy, order.spec, lambda: self._stop_reason)
            return RecordingReply(
                key=order.key,
                request=order.request_id,
                seconds=recording.seconds,
                profile=pack_profile(recording.profile),
                note=recording.note,
            )
        except PySpyError as error:
            return _make_error_reply(order, str(error))
        except Exception as error:  # every request gets a reply, and the thread continues
            return _make_error_reply(
                order,
                f"hangwatch failed to record: {type(error).__name__}: {error}; please report this",
            )

    def _publish_reply(self, reply: RecordingReply) -> None:
        self._results.put(reply)
        self._wake()


def _make_error_reply(order: RecordingOrder, error: str) -> RecordingReply:
    return RecordingReply(key=order.key, request=order.request_id, error=error)


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
    deadline = time.monotonic() + UNINTERRUPTIBLE_WAIT_S
    state = pyspy.read_state(spec.pid, spec.start_ticks)
    while state == "D" and time.monotonic() < deadline:
        time.sleep(0.02)
        state = pyspy.read_state(spec.pid, spec.start_ticks)
    if state == "D":
        raise PySpyError(
            "in uninterruptible sleep (state D): it waits in the kernel and is not sampled; try"
            " again, or see hangwatch dump"
        )
    if spec.native and state in "Tt":
        raise PySpyError(
            f"stopped (state {state}): it uses no time, and hangwatch dump shows where it stopped"
        )
    with contextlib.suppress(ProcessLookupError):  # the process has ended, which py-spy reports
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
        with contextlib.suppress(OSError):  # py-spy has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        while process.poll() is None and time.monotonic() - began < limit_s:
            if not stop_reason:
                stop_reason = get_stop_reason()
                if stop_reason:
                    process.send_signal(signal.SIGINT)  # py-spy then writes its samples
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
        stat = processes.read_live_stat(spec.pid, spec.start_ticks, pyspy.proc)
        ended = "; the process has ended" if stat is None else ""
        raise PySpyError(f"py-spy's output is not understood ({error}){ended}") from error
    is_alive = processes.read_live_stat(spec.pid, spec.start_ticks, pyspy.proc) is not None
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
