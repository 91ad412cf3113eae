"""Executes the server's commands. If the server permits it, a request for them is kept open."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import Call
from hangwatch.model.hardware import UnavailableSource
from hangwatch.model.kernels import CORE_DUMP
from hangwatch.protocol import codec
from hangwatch.protocol.commands import Command, CommandKind, RecordingReply, allows_abort
from hangwatch.protocol.heartbeat import (
    COMMANDS_PATH,
    AbortReply,
    CallsReply,
    KernelsReply,
    StackReply,
)
from hangwatch.ring.reader import Caller

from ...transport.client import ServerTarget, SignedClient
from ..discovery.watched import WatchedByKey, WatchedProcess, list_live_pids
from ..hardware.monitor import HardwareMonitor, HardwareOrder, refuse_reading
from ..reporting.uplink import CommandReply, Outbox, compute_pause_s
from ..stacks.cuda_gdb import KernelOrder, KernelReader, make_kernels_reply
from ..stacks.faulthandler_dumps import FaulthandlerRegistration
from ..stacks.gpu_core import REQUIRED_BYTES, GpuCore, GpuCoreError
from ..stacks.sampler import SampleOrder, StackSampler, make_stack_reply
from ..system.runtime import AgentLog
from .recordings import RecordingOrder, RecordingWorker
from .traces import UNKNOWN_PROCESS, TraceRequests

_POLL_TIMEOUT_S = 5.0  # limits the connection, and the reply once the server has waited
# The least time between the beginnings of two requests for commands: a server may answer immediately.
_MIN_POLL_INTERVAL_S = 0.25
ABORT_SIGNAL = signal.SIGKILL
_EXIT_TIMEOUT_S = 5  # a signal without effect is reported after this time
# How long a core dump of a GPU may take. The server gives an order up after `REQUEST_EXPIRES_S`.
_CORE_TIMEOUT_S = 4


@dataclass(slots=True)
class CommandExecutor:
    """Executes each command once: the server repeats a command until its reply has arrived. The
    replies are added to the outbox, now or when the parts that make them have finished.
    """

    watched: WatchedByKey
    sampler: StackSampler
    recordings: RecordingWorker
    kernels: KernelReader
    hardware: HardwareMonitor
    traces: TraceRequests
    outbox: Outbox
    log: AgentLog
    abort_tracker: AbortTracker = field(default_factory=lambda: AbortTracker())
    _executed_ids: deque[str] = field(default_factory=lambda: deque(maxlen=codec.MAX_COMMANDS))

    def execute_command(self, command: Command, now_ns: int) -> None:
        """Starts to execute a command, unless that was done before."""
        if command.id in self._executed_ids:
            return
        self._executed_ids.append(command.id)
        process = self.watched.get(command.key)
        reply: CommandReply | None = None
        if command.kind is CommandKind.TRACE:
            self.traces.add_request(command, now_ns)
        elif command.kind is CommandKind.ABORT:
            self.log.info(f"the server orders to end process {command.key}")
            reply = self.abort_tracker.abort_process(command, process, now_ns)
        elif command.kind is CommandKind.CALLS:
            reply = _read_calls(command, process, now_ns)
        elif command.kind is CommandKind.HARDWARE:
            pids = list_live_pids(self.watched.values())
            onset_ns = now_ns - int(command.since_s * 1e9)
            order = HardwareOrder(pids=pids, command=command, onset_ns=onset_ns)
            if not self.hardware.submit_order(order):
                refused = UnavailableSource(source="all", reason="too many readings are queued")
                reply = refuse_reading(command, refused)
        elif command.kind is CommandKind.KERNELS:
            reply = self._order_kernels(command, process, now_ns)
        elif command.stops:
            self.recordings.stop_recording(command.stops)
        else:
            reply = self._order_stacks(command, process)
        if reply is not None:  # otherwise it comes with the result
            self.outbox.add_reply(reply, now_ns)

    def collect_results(self) -> None:
        """Adds the replies of what has been finished to the outbox."""
        for result in self.sampler.take_results():
            process = self.watched.get(result.key)
            if process is not None and result.refusal:
                fault = result.refusal
                if find_faulthandler_registration(process) is not None:
                    fault += " (until then stacks come from faulthandler)"
                process.faults["stacks"] = fault
                self.log.warn_once(result.refusal)
            if result.sample is not None:
                self.outbox.add_reply(result.sample, result.taken_ns)
        for kernels, taken_ns in self.kernels.take_results():
            self.outbox.add_reply(kernels, taken_ns)
        for reply, taken_ns in self.hardware.take_results():
            self.outbox.add_reply(reply, taken_ns)
        now_ns = time.monotonic_ns()
        for recording in self.recordings.take_results():
            self.outbox.add_reply(recording, now_ns)
        for outcome in self.abort_tracker.check_exits(self.watched, now_ns):
            self.outbox.add_reply(outcome, now_ns)

    def _order_kernels(
        self, command: Command, process: WatchedProcess | None, now_ns: int
    ) -> KernelsReply | None:
        """Orders a reading of kernels. Returns a reply if there will be none."""
        if process is None:
            return make_kernels_reply(command, UNKNOWN_PROCESS)
        if process.exit is not None:
            return make_kernels_reply(command, "the process has ended")
        if process.identity is None or not process.identity.gpu_stacks:
            problem = "it needs HANGWATCH_GPU_STACKS=1 in the job's environment"
            return make_kernels_reply(command, problem)
        order = KernelOrder(
            command=command,
            pid=process.pid,
            start_ticks=process.start_ticks,
            ordered_ns=now_ns,
        )
        if self.kernels.submit_order(order):
            return None
        return make_kernels_reply(command, "too many processes are to be read on this node")

    def _order_stacks(
        self, command: Command, process: WatchedProcess | None
    ) -> StackReply | RecordingReply | None:
        """Orders a sample or a recording. Returns a reply if there will be none."""
        is_recording = command.kind is CommandKind.RECORD
        if process is None:
            problem = UNKNOWN_PROCESS
        elif process.exit:
            problem = "the process has ended"
        elif is_recording:
            order = RecordingOrder(
                command=command, pid=process.pid, start_ticks=process.start_ticks
            )
            if self.recordings.submit_order(order):
                return None
            problem = "too many recordings are queued on this node: try again later"
        else:
            if self.sampler.submit_order(make_sample_order(process, command)):
                return None
            problem = "too many stack dumps are queued on this node: try again later"
        if is_recording:
            return RecordingReply(key=command.key, request=command.id, error=problem)
        return make_stack_reply(command, problem)


def _read_calls(command: Command, process: WatchedProcess | None, now_ns: int) -> CallsReply:
    calls: list[Call] = []
    if process is not None:
        calls = process.read_window(
            now_ns,
            command.uid,
            command.from_seq,
            command.to_seq,
            command.step,
        )
        process.history.add_reply(command.uid, calls)
    first = command.from_seq
    if len(calls) > command.max_calls:
        calls = calls[-command.max_calls :]
        first = calls[0].seq
    return CallsReply(
        key=command.key,
        request=command.id,
        uid=command.uid,
        calls=tuple(calls),
        from_seq=first,
        to_seq=command.to_seq,
        step=command.step,
    )


def make_sample_order(process: WatchedProcess, command: Command | None = None) -> SampleOrder:
    """An order for the stacks of a process; without a command, to check whether py-spy works."""
    callers: tuple[Caller, ...] = ()
    newest_call = ""
    if command is not None and process.reader is not None:
        with contextlib.suppress(Exception):  # the ring is corrupt, which `read_state` reports
            callers = process.reader.read_callers()
            call = process.reader.read_newest_call(time.monotonic_ns())
            if call is not None:
                newest_call = call.signature.op
                if call.site:
                    newest_call += f" at {call.site}"
    return SampleOrder(
        command=command,
        key=process.key,
        pid=process.pid,
        start_ticks=process.start_ticks,
        ring_path=process.ring.path if process.ring else None,
        registration=find_faulthandler_registration(process),
        callers=callers,
        newest_call=newest_call,
    )


def find_faulthandler_registration(process: WatchedProcess) -> FaulthandlerRegistration | None:
    if process.snapshot is None:
        return None
    return FaulthandlerRegistration.from_identity(process.snapshot.identity)


class CommandPoll:
    """A thread that keeps one request open while the server permits it, so that commands need not wait
    for the reply to the next heartbeat. ``wake`` is called when `take_commands` has something.
    """

    def __init__(self, agent: str, wake: Callable[[], None]) -> None:
        self._body = json.dumps({"agent": agent}).encode()
        self._target: ServerTarget | None = None  # the server that permitted it last
        self._client: SignedClient | None = None  # used by the thread
        self._wake = wake
        self._wait_s = 0.0
        self._is_permitted = threading.Event()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def permit(self, wait_s: float | None, target: ServerTarget) -> None:
        """The server waits up to ``wait_s`` seconds for commands; None: it does not."""
        if wait_s is None:
            self._is_permitted.clear()
            return
        self._wait_s = wait_s
        self._target = target
        self._is_permitted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="commands", daemon=True)
            self._thread.start()

    def take_commands(self) -> list[Command]:
        if self._client is not None:
            self._client.enforce_deadline()
        return [self._commands.get_nowait() for _ in range(self._commands.qsize())]

    def close(self) -> None:
        self._closing.set()
        self._is_permitted.set()
        if self._thread is not None:
            if (client := self._client) is not None:
                client.abort()
            self._thread.join(1.0)

    def _run(self) -> None:
        target = client = None
        while True:
            self._is_permitted.wait()
            if self._closing.is_set():
                break
            if client is None or self._target is not target:
                if client is not None:
                    client.close()
                target = self._target
                assert target is not None  # `permit` has set it
                self._client = client = SignedClient(target, _POLL_TIMEOUT_S)
            commands: tuple[Command, ...] | None = None
            began_at, began_cpu_s = time.monotonic(), time.thread_time()
            with contextlib.suppress(Exception):  # no reply, or a malformed one
                reply = client.send_request(
                    "POST",
                    COMMANDS_PATH,
                    self._body,
                    {"Content-Type": "application/json"},
                    read_timeout_s=self._wait_s + _POLL_TIMEOUT_S,
                )
                if reply.status == 200:
                    commands = codec.decode_commands(reply.parse_json()["commands"])
            if commands is None or (commands and not client.is_server_known):
                # The next reply to a heartbeat permits another attempt.
                self._is_permitted.clear()
            elif commands:
                for command in commands:
                    self._commands.put(command)
                self._wake()
            pause_s = compute_pause_s(began_cpu_s)
            pause_s = max(pause_s, began_at + _MIN_POLL_INTERVAL_S - time.monotonic())
            if self._closing.wait(pause_s):
                break
        if client is not None:
            client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abort:
    """An order whose process was sent the signal, or a request for a core dump of its GPUs."""

    command: Command
    since_ns: int
    core: GpuCore | None = None
    is_signalled: bool = True


@dataclass(slots=True)
class AbortTracker:
    """Ends ranks by order of the server, and keeps each order until it has a result.

    The signal is SIGKILL, without SIGTERM before it. A rank that hangs is in native code, where a
    Python handler for SIGTERM never runs; if a handler did run, it might communicate (to write a last
    checkpoint) and hang again, or exit with status 0, which every launcher takes for success. SIGABRT
    can be handled as well, and writes a core dump of all the rank's memory. SIGKILL also ends stopped
    processes, and always counts as a failure: torchrun sees -9, a shell, Kubernetes and Slurm see 137.
    No evidence is lost: it was stored before.

    A job may want a core dump of its GPUs (HANGWATCH_GPU_CORE). Its driver writes one and then ends the
    process by SIGABRT; if it does not in time, the signal follows.
    """

    warn_once: Callable[[str], None] = lambda _: None
    _aborts: dict[str, _Abort] = field(default_factory=dict)  # the keys are those of processes

    def __bool__(self) -> bool:
        return bool(self._aborts)

    def abort_process(
        self, command: Command, process: WatchedProcess | None, now_ns: int
    ) -> AbortReply | None:
        """Ends a process if it is watched. Returns a reply if it will not be ended."""
        reply = AbortReply(key=command.key, request=command.id)
        if process is None:
            return replace(reply, error="this node agent watches no such process")
        if process.exit is not None:
            return replace(reply, ended=process.exit)
        on_hang = process.identity.on_hang if process.identity is not None else ""
        problem = ""
        core: GpuCore | None = None
        if not allows_abort(on_hang):
            state = f"HANGWATCH_ON_HANG={on_hang}" if on_hang else "no HANGWATCH_ON_HANG"
            problem = (
                f"{state} in its environment does not allow that: start the job with"
                " HANGWATCH_ON_HANG=abort"
            )
        elif process.pidfd is None:
            problem = (
                "this kernel has no pidfd (Linux 5.3 has), so the signal could hit another process"
                " that has the same pid by now"
            )
        else:
            core = self._request_core(process)
            if core is None:
                problem = _send_signal(process)
        if problem:
            return replace(reply, error=problem)
        self._aborts[command.key] = _Abort(
            command=command, since_ns=now_ns, core=core, is_signalled=core is None
        )
        return None

    def _request_core(self, process: WatchedProcess) -> GpuCore | None:
        """Has the driver of a process write a core dump of its GPUs, if the job wants that."""
        if process.ring is None:
            return None
        core = GpuCore(folder=process.ring.path.parent, pid=process.pid)
        core_count = 1 + sum(abort.core is not None for abort in self._aborts.values())
        try:
            return core if core.request_core(REQUIRED_BYTES * core_count) else None
        except GpuCoreError as error:
            self.warn_once(str(error))
            return None

    def check_exits(self, watched: WatchedByKey, now_ns: int) -> list[AbortReply | KernelsReply]:
        """The replies for the processes that have ended or whose time is up, after those with the kernels
        in their core dumps.
        """
        replies: list[AbortReply | KernelsReply] = []
        for key, abort in list(self._aborts.items()):
            process = watched.get(key)
            exit_info = process.exit if process is not None else None
            if process is not None and exit_info is None:
                limit_s = _EXIT_TIMEOUT_S if abort.is_signalled else _CORE_TIMEOUT_S
                if now_ns - abort.since_ns < limit_s * 1_000_000_000:
                    continue
                if not abort.is_signalled:
                    _send_signal(process)  # a failure is reported if the process remains
                    self._aborts[key] = replace(abort, since_ns=now_ns, is_signalled=True)
                    continue
            error = None
            if exit_info is None:
                state = process.activity.state if process is not None else "?"
                error = (
                    f"still there {_EXIT_TIMEOUT_S} s after {ABORT_SIGNAL.name}, in state {state}"
                )
                if state == "D":
                    error += (
                        ": it ends when its system call returns, from a file system or device that"
                        " is stuck"
                    )
            if abort.core is not None:
                replies += self._read_core(abort.command, abort.core)
            reply = AbortReply(
                key=key,
                request=abort.command.id,
                signal=ABORT_SIGNAL if abort.is_signalled else signal.SIGABRT,
                ended=exit_info,
                error=error,
            )
            replies.append(reply)
            del self._aborts[key]
        return replies

    def _read_core(self, command: Command, core: GpuCore) -> list[KernelsReply]:
        """The kernels in a core dump, as a reply to the order to end its process."""
        try:
            kernels = core.take_kernels()
        except GpuCoreError as error:
            self.warn_once(str(error))
            return []
        reply = KernelsReply(key=command.key, request=command.id, source=CORE_DUMP, kernels=kernels)
        return [reply]


def _send_signal(process: WatchedProcess) -> str:
    """Ends a process that has a pidfd. Returns why that failed; empty if it did not."""
    assert process.pidfd is not None
    try:
        signal.pidfd_send_signal(process.pidfd, ABORT_SIGNAL)
    except ProcessLookupError:
        pass  # the process has just ended: `AbortTracker.check_exits` will find that
    except OSError as refusal:
        return f"{ABORT_SIGNAL.name} could not be sent: {refusal.strerror}"
    return ""
