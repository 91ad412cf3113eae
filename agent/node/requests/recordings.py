"""Records processes by `py-spy record`, which samples for some seconds where a process spends its time:
one after the other, in a separate thread, so that neither heartbeats nor stack dumps wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hangwatch.protocol.commands import Command, RecordingReply
from hangwatch.stacks.profile import pack_profile, parse_pyspy_raw

from ..stacks.pyspy import PySpy, PySpyError, explain_failure
from ..system import permission, processes
from ..system.runtime import OrderWorker

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
class RecordingOrder:
    command: Command
    pid: int
    start_ticks: int

    @property
    def reply(self) -> RecordingReply:
        """A reply without content."""
        return RecordingReply(key=self.command.key, request=self.command.id)


class RecordingWorker(OrderWorker[RecordingOrder, RecordingReply]):
    """The thread that runs one py-spy at a time."""

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        super().__init__("recordings", wake, max_waiting=MAX_WAITING_RECORDINGS)
        self._pyspy = pyspy
        self._current: RecordingOrder | None = None
        self._stop_reason = ""  # why the current recording is to end
        self._cancelled_request_ids: deque[str] = deque(maxlen=MAX_WAITING_RECORDINGS)
        self._closed = False

    def is_pausing(self, key: str) -> bool:
        """Whether a recording pauses this process now, for each of its samples."""
        current = self._current
        return current is not None and current.command.key == key and current.command.native

    def preempt_recording(self, key: str) -> None:
        """Ends a recording that keeps a stack dump from attaching, and waits for its end."""
        self._end_while(lambda: self.is_pausing(key), PREEMPTED_REASON)

    def stop_recording(self, request_id: str) -> None:
        """Ends one recording, which keeps its samples, or cancels it before it begins."""
        current = self._current
        if current is not None and current.command.id == request_id:
            self._stop_reason = self._stop_reason or STOPPED_REASON
        else:
            self._cancelled_request_ids.append(request_id)

    def close(self) -> None:
        """Ends the current recording, so that no py-spy outlives the node agent."""
        self._closed = True
        self._end_while(lambda: self._current is not None, "the node agent exits")

    def _end_while(self, is_running: Callable[[], bool], reason: str) -> None:
        """Has the current recording end while ``is_running`` returns True, for a limited time."""
        deadline = time.monotonic() + PREEMPT_TIMEOUT_S
        while is_running() and time.monotonic() < deadline:
            self._stop_reason = self._stop_reason or reason
            time.sleep(0.02)

    def execute_order(self, order: RecordingOrder) -> RecordingReply | None:
        """Returns the last reply to an order, after a first one that it has begun."""
        self._stop_reason = ""
        self._current = order
        try:
            if self._closed:
                return None
            if order.command.id in self._cancelled_request_ids:
                return replace(order.reply, error=f"{STOPPED_REASON} before it began")
            self.publish_result(replace(order.reply, begun=True))
            return self.record_profile(order)
        except PySpyError as error:
            return replace(order.reply, error=str(error))
        finally:
            self._current = None

    def explain_failure(self, order: RecordingOrder, error: str) -> RecordingReply:
        problem = f"hangwatch failed to record: {error}; please report this"
        return replace(order.reply, error=problem)

    def record_profile(self, order: RecordingOrder) -> RecordingReply:
        """Samples the process. As soon as there is a reason to stop, the recording ends and keeps its
        samples so far. Raises PySpyError.

        The process is not paused, so that its steps take as long as ever; a few stacks change while
        they are read and mix two moments. With native frames each sample pauses the process.
        """
        pyspy = self._pyspy
        pyspy.require_path()
        deadline = time.monotonic() + UNINTERRUPTIBLE_WAIT_S
        while (state := pyspy.read_state(order.pid, order.start_ticks)) == "D":
            if time.monotonic() >= deadline:
                raise PySpyError(
                    "in uninterruptible sleep (state D): it waits in the kernel and is not sampled; try"
                    " again, or see hangwatch dump"
                )
            time.sleep(0.02)
        if order.command.native and state in "Tt":
            raise PySpyError(
                f"stopped (state {state}): it uses no time, and hangwatch dump shows where it stopped"
            )
        with contextlib.suppress(ProcessLookupError):  # the process has ended, which py-spy reports
            if not permission.may_read_memory(order.pid):
                raise PySpyError(permission.format_refusal(pyspy.proc), is_permanent=True)
        with tempfile.TemporaryDirectory(prefix="hangwatch-record-") as folder:
            output = Path(folder, "samples")
            began = time.monotonic()
            stop_reason = self._run_recording(order, output)
            took_s = time.monotonic() - began
            return self._read_recording(output, order, took_s, stop_reason)

    def _run_recording(self, order: RecordingOrder, output: Path) -> str:
        """Runs py-spy. Returns why it was ended early; empty if it was not. Raises PySpyError."""
        pyspy = self._pyspy
        messages = output.with_name("stderr")
        with messages.open("wb") as stderr:
            try:
                process = subprocess.Popen(
                    build_command(pyspy.require_path(), order, output),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            except OSError as error:
                raise pyspy.explain_start_failure(error) from error
        limit_s = order.command.seconds + MAX_OVERRUN_S
        if order.command.native:
            limit_s = order.command.seconds + MAX_NATIVE_OVERRUN_S
        began = time.monotonic()
        stop_reason = ""
        try:
            with contextlib.suppress(OSError):  # py-spy has ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            while process.poll() is None and time.monotonic() - began < limit_s:
                if not stop_reason:
                    stop_reason = self._stop_reason
                    if stop_reason:
                        process.send_signal(signal.SIGINT)  # py-spy then writes its samples
                        limit_s = time.monotonic() - began + WRITE_TIMEOUT_S
                time.sleep(_POLL_INTERVAL_S)
        finally:
            is_late = process.poll() is None
            if is_late:
                process.kill()
            process.wait()
            if order.command.native and process.returncode:
                processes.continue_stopped(order.pid, order.start_ticks, pyspy.proc)
        if is_late and not stop_reason:
            raise PySpyError(
                f"py-spy took more than {limit_s:g} s and was killed; the host may be overloaded: try"
                " a lower --rate"
            )
        if stop_reason and not output.exists():
            raise PySpyError(f"{stop_reason} before there was a sample")
        if process.returncode and not output.exists():
            with messages.open(errors="replace") as stderr_text:
                raise explain_failure(stderr_text.read(1 << 16), pyspy.proc)
        return stop_reason

    def _read_recording(
        self, output: Path, order: RecordingOrder, took_s: float, stop_reason: str
    ) -> RecordingReply:
        command = order.command
        is_alive = (
            processes.read_live_stat(order.pid, order.start_ticks, self._pyspy.proc) is not None
        )
        try:
            if output.stat().st_size > MAX_OUTPUT_BYTES:
                raise PySpyError(
                    f"py-spy's samples take more than {MAX_OUTPUT_BYTES >> 20} MiB: request fewer with"
                    " --seconds or --rate"
                )
            with output.open(encoding="utf-8", errors="replace") as lines:
                profile = parse_pyspy_raw((line.rstrip("\n") for line in lines), order.pid)
        except (OSError, ValueError) as error:
            ended = "" if is_alive else "; the process has ended"
            raise PySpyError(f"py-spy's output is not understood ({error}){ended}") from error
        seconds: float = command.seconds
        if stop_reason or not is_alive:
            seconds = min(took_s, seconds)
        note = ""
        sample_count = next((t.sample_count for t in profile.threads if t.is_main), 0)
        requested_count = command.rate * command.seconds
        if stop_reason:
            note = f"ended after {seconds:.1f} of {command.seconds} s: {stop_reason}"
        elif not is_alive:
            note = f"the process ended after {seconds:.1f} s"
        elif not command.gil and sample_count < _MIN_SAMPLE_SHARE * requested_count:
            note = (
                f"only {sample_count} of {requested_count} samples were taken: the host is busy, or"
                " stacks changed while they were read"
            )
        profile_text = pack_profile(profile)
        return replace(order.reply, seconds=round(seconds, 2), profile=profile_text, note=note)


def build_command(path: str, order: RecordingOrder, output: Path) -> list[str]:
    command = order.command
    arguments = [path, "record", "--pid", str(order.pid)]
    arguments += ["--duration", str(command.seconds), "--rate", str(command.rate)]
    arguments += ["--format", "raw", "--full-filenames", "--threads", "--output", str(output)]
    arguments.append("--gil" if command.gil else "--idle")
    arguments.append("--native" if command.native else "--nonblocking")
    return arguments
