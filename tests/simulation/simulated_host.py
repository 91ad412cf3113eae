"""The ranks of one host of a `parallel_job` as a node agent reads them, with the node agent's own
composer: only what it would read in rings and /proc is computed here.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hangwatch.agent.node.agent import HEARTBEAT_INTERVAL_NS
from hangwatch.agent.node.composer import HeartbeatComposer
from hangwatch.agent.node.discovery.watched import WatchedProcess
from hangwatch.agent.node.discovery.watchlist import Watchlist
from hangwatch.agent.node.reporting import updates
from hangwatch.agent.node.reporting.acked import AckedState
from hangwatch.agent.node.reporting.uplink import HeartbeatOutcome, Outbox
from hangwatch.agent.node.requests.traces import TraceRequests
from hangwatch.agent.node.schedule import ReportSchedule
from hangwatch.agent.node.system.processes import CpuActivity
from hangwatch.agent.node.system.runtime import AgentLog
from hangwatch.model.calls import Call
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExitInfo, Frame, Lifecycle, ThreadStack
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import (
    CallsReply,
    HardwareReply,
    Heartbeat,
    HeartbeatReply,
    ProcessIdentity,
    ProcessUpdate,
    StackReply,
)

from .parallel_job import REPLICAS_WAIT_AFTER_S, TENSOR_PARALLEL_SIZE, JobRun
from .parallel_streams import (
    TP,
    RunningHashes,
    SimulatedStream,
    list_blocking_streams,
    list_streams_at_startup,
    make_setup_stream,
    map_stream_targets,
)
from .queued_streams import list_device_entries, list_queued_streams, waits_for_device
from .rings import make_snapshot

_FIRST_PID = 1000
_MAIN_THREAD, _OTHER_THREAD = 1, 2
_TORCH_FILE = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
# Nothing is found, traced or recorded, so that all hosts can share these.
_NO_FOLDER, _NO_SELECTOR = Path("/nonexistent"), selectors.SelectSelector()
_NO_TRACES = TraceRequests()


def list_streams(run: JobRun, rank: int, now: float) -> list[SimulatedStream]:
    """How far a rank is in all its streams."""
    fault = run.active_fault(now)
    if fault is not None and fault.kind is VerdictKind.STARTUP_STALL:
        return list_streams_at_startup(fault, rank)
    if run.shape.queues_calls:
        return [make_setup_stream(run, rank, now), *list_queued_streams(run, rank, now)]
    return list_blocking_streams(run, rank, now)


class SimulatedProcess(WatchedProcess):
    """The process of one rank.

    Nearly all ranks of a host are in the same position. One of them is read and composed; the others
    have it as their ``twin``, and report the same under their own key. Otherwise the simulation would
    take a whole core for 12,500 hosts.
    """

    def __init__(self, rank: int, get_run: Callable[[], JobRun]) -> None:
        run = get_run()
        super().__init__(
            pid=_FIRST_PID + rank,
            start_ticks=run.number,
            activity=CpuActivity(last_busy_ns=0),
            found_ns=0,
            identity=ProcessIdentity(
                job=run.name,
                restart=run.number,
                rank=rank,
                world_size=run.shape.ranks,
                local_rank=rank % TENSOR_PARALLEL_SIZE,
                pid=_FIRST_PID + rank,
                start_ticks=run.number,
                program="train.py",
                python="3.11.9",
                torch="2.13.0",
                master="node0:29500",
            ),
        )
        self.rank, self._get_run = rank, get_run
        self.twin: SimulatedProcess | None = None
        self._composed: tuple[ProcessUpdate | None, AckedState] | None = None
        self._targets = map_stream_targets(run.shape, rank)

    def compose_update(self, now_ns: int) -> ProcessUpdate | None:
        assert self.identity is not None
        if self.twin is not None and self.twin._composed is not None:
            update, after = self.twin._composed
            if update is None:
                self.composed = self.acked
                return None
            self.composed = replace(after, identity=self.identity)
            return replace(update, key=self.key)
        if self.acked is None:
            started_s = round(max(0.0, now_ns / 1e9 - self._get_run().started_at), 2)
            self.identity = replace(self.identity, started_s=started_s)

        def fetch_calls(uid: int, from_seq: int, max_calls: int) -> list[Call]:
            return self.read_calls(now_ns, uid, from_seq, max_calls)

        self._composed = updates.compose_update(
            self._make_update(now_ns),
            self.snapshot,
            self.acked,
            self.history,
            now_ns,
            fetch_calls,
            {},
        )
        update, self.composed = self._composed
        return update

    def is_acked_like(self, other: SimulatedProcess) -> bool:
        """Whether the server knows the same of both, but for their identities."""
        mine, its = self.acked, other.acked
        return mine is not None and its is not None and mine == replace(its, identity=mine.identity)

    def read_state(self, now_ns: int) -> None:
        run, now = self._get_run(), now_ns / 1e9
        fault = run.active_fault(now)
        fault_at = fault.starts_at if fault is not None else now
        culprit_kind = fault.kind if fault is not None and fault.rank == self.rank else None
        lifecycle = Lifecycle.INITIALISED
        if fault is not None and fault.kind is VerdictKind.STARTUP_STALL:
            lifecycle = Lifecycle.STARTING if culprit_kind else Lifecycle.INITIALISING
        is_frozen = culprit_kind is VerdictKind.FROZEN_RANK
        is_busy = culprit_kind is VerdictKind.SLOW_RANK or now < fault_at + REPLICAS_WAIT_AFTER_S
        if run.shape.queues_calls and culprit_kind is None:
            is_busy = True  # a host polls its device
        self.activity.state = "T" if is_frozen else "S"
        self.activity.last_busy_ns = int(1e9 * (now - 0.01 if is_busy else fault_at))
        self.activity.cpu_s = now - run.started_at
        self._record_end(culprit_kind, fault_at, now)
        streams = list_streams(run, self.rank, now)
        self._record_history(streams, run, now)
        counts_device = run.shape.queues_calls and lifecycle is Lifecycle.INITIALISED
        self.snapshot = make_snapshot(
            *(stream.make_state(self._targets[stream.uid], now) for stream in streams),
            lifecycle=int(lifecycle),
            step=int(run.count_steps(now)),
            pulse_s=now - fault_at if is_frozen else 0.05,
            device_entries=list_device_entries(run, self.rank, now) if counts_device else (),
            read_ns=now_ns,
            opened=len(streams),
        )

    def _record_end(self, culprit_kind: VerdictKind | None, fault_at: float, now: float) -> None:
        run = self._get_run()
        if self.exit is not None:
            return
        if culprit_kind is VerdictKind.DEAD_RANK:
            self.exit, ended_at = ExitInfo(signal=9), fault_at
        elif culprit_kind is VerdictKind.EXITED_RANK:
            self.exit, ended_at = ExitInfo(exit_status=0), fault_at
        elif now >= run.ended_at:
            self.exit, ended_at = ExitInfo(signal=15), now
        else:
            return
        self.exited_at_ns = int(1e9 * ended_at)

    def _record_history(self, streams: list[SimulatedStream], run: JobRun, now: float) -> None:
        acked = self.acked.streams if self.acked is not None else {}
        for stream in streams:
            self.history.newest_ops[stream.uid] = stream.op
            known = acked.get(stream.uid)
            after = known.last_checked_seq if known is not None else 0
            if stream.entered > after and self._targets[stream.uid].peer is None:
                self.history.chains[stream.uid] = RunningHashes(stream, after)
            if stream.uid == TP and run.suffers_fault(VerdictKind.CONCURRENT_USE, self.rank, now):
                self.history.first_concurrent.setdefault(TP, stream.entered)
                self.history.cursor = stream.entered

    def read_calls(self, now_ns: int, uid: int, from_seq: int, max_calls: int) -> list[Call]:
        return self._list_calls(now_ns, uid, from_seq, 0, 1, max_calls)

    def _list_calls(
        self, now_ns: int, uid: int, first: int, last: int, step: int, most: int
    ) -> list[Call]:
        """The newest ``most`` calls from ``first`` to ``last`` (0: all) at multiples of ``step``."""
        now = now_ns / 1e9
        concurrent_seq = self.history.first_concurrent.get(uid)
        for stream in list_streams(self._get_run(), self.rank, now):
            if stream.uid == uid:
                end = min(stream.entered, last or stream.entered)
                seqs = range(-(-max(1, first) // step) * step, end + 1, step)[-most:]
                return [
                    stream.make_call(
                        seq, now, _OTHER_THREAD if seq == concurrent_seq else _MAIN_THREAD
                    )
                    for seq in seqs
                ]
        return []

    def answer_calls(self, command: Command, now_ns: int) -> CallsReply:
        calls = self._list_calls(
            now_ns, command.uid, command.from_seq, command.to_seq, command.step, command.max_calls
        )
        return CallsReply(
            key=self.key,
            request=command.id,
            uid=command.uid,
            calls=tuple(calls),
            from_seq=calls[0].seq if len(calls) == command.max_calls else command.from_seq,
            to_seq=command.to_seq,
            step=command.step,
        )

    def make_stack(self, now: float) -> ThreadStack:
        """The main thread's stack: in a collective while the rank waits, else in its own code."""
        run = self._get_run()
        if any(stream.pending_since for stream in list_streams(run, self.rank, now)):
            inner = Frame(function="all_reduce", file=_TORCH_FILE, line=2810)
        elif run.shape.queues_calls and waits_for_device(run, self.rank, now):
            inner = Frame(
                function="log_loss", file="/u/train.py", line=71, text="total += loss.item()"
            )
        else:
            inner = Frame(
                function="load_batch",
                file="/u/data.py",
                line=44 if run.active_fault(now) else 40,
                text="return self._ready.get()",
            )
        step = Frame(function="step", file="/u/train.py", line=53)
        main = Frame(function="main", file="/u/train.py", line=9)
        return ThreadStack(thread="MainThread", main=True, frames=(inner, step, main))


class SimulatedHost:
    """One host with its processes, and the heartbeats that its node agent composes of them."""

    def __init__(self, number: int, get_run: Callable[[], JobRun]) -> None:
        self.number, self._get_run = number, get_run
        self.is_urgent = False  # the last heartbeat is handled before others
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """A new node agent and new processes."""
        processes = [SimulatedProcess(rank, self._get_run) for rank in self.ranks]
        watchlist = Watchlist(_NO_FOLDER, _NO_SELECTOR, AgentLog())
        watchlist.watched.update((process.key, process) for process in processes)
        self._processes = {process.key: process for process in processes}
        self.outbox = Outbox()
        self.schedule = ReportSchedule(0)
        self.composer = HeartbeatComposer(
            watchlist,
            self.outbox,
            _NO_TRACES,
            host=f"{self._get_run().name}-node{self.number}",
            owner="",
            server_count=1,
        )

    @property
    def ranks(self) -> range:
        first = self.number * TENSOR_PARALLEL_SIZE
        return range(first, first + TENSOR_PARALLEL_SIZE)

    def compose_heartbeat(self, now: float) -> Heartbeat:
        self._read_processes(now)
        now_ns = int(now * 1e9)
        heartbeat = self.composer.compose_heartbeat(now_ns)
        next_ns = now_ns + HEARTBEAT_INTERVAL_NS
        self.is_urgent = self.schedule.start_report(self._processes.values(), next_ns)
        return heartbeat

    def scan_processes(self, now: float) -> None:
        """Brings the next heartbeat forward if there is a change to report."""
        self._read_processes(now)
        self.schedule.apply_scan(self._processes.values(), int(now * 1e9), has_urgent_changes=False)

    def _read_processes(self, now: float) -> None:
        now_ns, run = int(now * 1e9), self._get_run()
        first: SimulatedProcess | None = None
        for process in self._processes.values():
            is_singled_out = run.is_singled_out(process.rank, now)
            process.twin = None
            if first is not None and not is_singled_out and process.is_acked_like(first):
                process.twin, process.snapshot = first, first.snapshot
                process.history.newest_ops = first.history.newest_ops
                continue
            process.read_state(now_ns)
            if not is_singled_out:
                first = first or process

    def apply_reply(self, heartbeat: Heartbeat, reply: HeartbeatReply, now: float) -> None:
        """Applies the reply to a heartbeat, as `NodeAgent` does."""
        now_ns = int(now * 1e9)
        self.composer.mark_extras_delivered(heartbeat)
        outcome = HeartbeatOutcome(reply=reply)
        self.composer.apply_outcome(outcome, now_ns)
        self.schedule.apply_reply(reply, self._processes.values(), now_ns, is_steady=False)
        if reply.resync:
            if not self.composer.is_full_due:
                self.schedule.bring_forward(now_ns)
            self.composer.request_full()
        else:
            self.composer.mark_acked(now_ns)

    def execute_command(self, command: Command, now: float) -> None:
        """Has the reply sent with the next heartbeat, immediately."""
        self.schedule.hasten()
        process, now_ns = self._processes.get(command.key), int(now * 1e9)
        if process is None:  # the command was for the attempt before
            return
        if command.kind is CommandKind.HARDWARE:
            self.outbox.add_reply(HardwareReply(key=command.key, request=command.id), now_ns)
        elif command.kind is CommandKind.STACKS:
            threads = (process.make_stack(now),)
            sample = StackReply(
                key=command.key, request=command.id, source="py-spy", threads=threads
            )
            self.outbox.add_reply(sample, now_ns)
        else:
            self.outbox.add_reply(process.answer_calls(command, now_ns), now_ns)
