"""Executes the server's commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hangwatch.model.calls import Call
from hangwatch.model.hardware import UnavailableSource
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.hardware import HardwareReply
from hangwatch.protocol.heartbeat import CallsReply, StackReply

from ..discovery.watched import WatchedProcess, list_live_pids
from ..hardware.monitor import HardwareMonitor, HardwareOrder
from ..reporting.outbox import Outbox
from ..stacks.callers import describe_newest_call, read_callers
from ..stacks.faulthandler_dumps import FaulthandlerRegistration
from ..stacks.sampler import SampleOrder, StackSampler
from ..system.log import AgentLog
from .aborts import AbortTracker
from .live import LiveRequests

_MAX_REMEMBERED_COMMANDS = 1024
_NO_LIMIT = 1 << 63  # no sequence number is as high


class CommandExecutor:
    """Executes each command once: the server repeats a command until its reply has arrived."""

    def __init__(
        self,
        sampler: StackSampler,
        outbox: Outbox,
        abort_tracker: AbortTracker,
        live_requests: LiveRequests,
        hardware: HardwareMonitor,
        log: AgentLog,
    ) -> None:
        self._sampler = sampler
        self._outbox = outbox
        self._abort_tracker = abort_tracker
        self._live_requests = live_requests
        self._hardware = hardware
        self._log = log
        self._executed_ids: deque[str] = deque(maxlen=_MAX_REMEMBERED_COMMANDS)

    def execute_command(
        self, command: Command, watched: Mapping[str, WatchedProcess], now_ns: int
    ) -> bool:
        """Returns True if a reply is ready to be sent now."""
        if command.id in self._executed_ids:
            return False
        self._executed_ids.append(command.id)
        process = watched.get(command.key)
        if command.ask in (CommandKind.TRACE, CommandKind.RECORD):
            self._live_requests.execute_command(command, process, now_ns)
            return False
        if command.ask is CommandKind.CALLS:
            self._read_calls(command, process, now_ns)
            return True
        if command.ask is CommandKind.ABORT:
            self._log.info(f"the server orders to end process {command.key}")
            self._abort_tracker.abort_process(command, process, now_ns)
            return True
        if command.ask is CommandKind.HARDWARE:
            return self._order_hardware(command, watched, now_ns)
        return not self._order_stacks(command, process, now_ns)

    def _read_calls(self, command: Command, process: WatchedProcess | None, now_ns: int) -> None:
        calls: list[Call] = []
        if process is not None:
            calls = process.read_window(
                now_ns,
                command.uid,
                command.from_seq,
                command.to_seq or _NO_LIMIT,
                command.step,
            )
        first, last = command.from_seq, command.to_seq
        if len(calls) > command.most:
            calls = calls[-command.most :]
            first = calls[0].seq
        if not last and calls:
            last = calls[-1].seq
        reply = CallsReply(
            key=command.key,
            request=command.id,
            uid=command.uid,
            calls=tuple(calls),
            from_seq=first,
            to_seq=last,
            step=command.step,
        )
        self._outbox.add_calls(reply)

    def _order_hardware(
        self, command: Command, watched: Mapping[str, WatchedProcess], now_ns: int
    ) -> bool:
        """Returns True if too many readings are queued, which the outbox then says."""
        order = HardwareOrder(
            pids=list_live_pids(watched.values()),
            key=command.key,
            request_id=command.id,
            onset_ns=now_ns - int(command.since_s * 1e9),
        )
        if self._hardware.request_reading(order):
            return False
        refused = UnavailableSource(source="all", reason="too many readings are queued")
        reply = HardwareReply(key=command.key, request=command.id, unavailable=(refused,))
        self._outbox.add_hardware(reply, now_ns)
        return True

    def _order_stacks(self, command: Command, process: WatchedProcess | None, now_ns: int) -> bool:
        """Returns False if no stacks will come; then the outbox has the reason."""
        if process is None:
            problem = "this node agent knows no such process"
        elif process.exit:
            problem = "the process has ended"
        elif self._sampler.submit_order(make_sample_order(process, command.id, command.native)):
            return True
        else:
            problem = "too many stack dumps are queued on this node: try again later"
        failed = StackReply(
            key=command.key,
            request=command.id,
            source="py-spy",
            native=command.native,
            error=problem,
        )
        self._outbox.add_sample(failed, now_ns)
        return False


def make_sample_order(
    process: WatchedProcess, request_id: str | None = None, native: bool = False
) -> SampleOrder:
    """An order for the stacks of a process; without a request, to check whether py-spy works."""
    return SampleOrder(
        key=process.key,
        pid=process.pid,
        start_ticks=process.start_ticks,
        request_id=request_id,
        native=native,
        ring_path=process.ring.path if process.ring else None,
        registration=find_faulthandler_registration(process),
        callers=read_callers(process.reader) if request_id is not None else (),
        newest_call=describe_newest_call(process.reader) if request_id is not None else "",
    )


def find_faulthandler_registration(process: WatchedProcess) -> FaulthandlerRegistration | None:
    if process.snapshot is None:
        return None
    return FaulthandlerRegistration.from_identity(process.snapshot.identity)
