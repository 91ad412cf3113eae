"""A job whose calls a test makes one by one, and whose heartbeats are applied directly to the state
that the diagnosis reads. Pure.

The node agent's own `hangwatch.agent.node.reporting.updates` composes the heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hangwatch.agent.node.reporting.acked import UnackedHistory
from hangwatch.agent.node.reporting.updates import compose_update
from hangwatch.diagnosis import Diagnosis, diagnose
from hangwatch.model.calls import (
    GRAPH_REPLAY,
    Call,
    Loss,
    LossReason,
    Signature,
    Site,
    StreamKind,
    extend_chain,
    with_agreement_hash,
)
from hangwatch.model.groups import Group, pack_ranks
from hangwatch.model.kernels import Kernel
from hangwatch.model.limits import Limits
from hangwatch.model.operators import MustMatch
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle, ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat as wire
from hangwatch.ring.parts import DeviceEntry
from hangwatch.ring.reader import RingDelta, StreamState
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from .rings import encode_exception, make_snapshot

LIMITS = Limits(stall_after_s=10.0, slow_limit_s=60.0)


ALL_FIELDS = MustMatch.DTYPE | MustMatch.SHAPE | MustMatch.REDUCE_OP | MustMatch.ROOT


def make_signature(
    op: str, *, shape: tuple[int, ...] = (64,), dtype: str = "float32", reduce_op: str | None = "sum", root: int | None = None,
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Signature:  # fmt: skip
    numel = 1
    for n in shape:
        numel *= n
    signature = Signature(
        op=op,
        shapes=(shape,),
        dtype=dtype,
        reduce_op=reduce_op,
        root=root,
        splits=splits,
        numel=numel,
    )
    return with_agreement_hash(signature, ALL_FIELDS, (1, numel))


@dataclass
class ScriptedStream:
    """One rank's calls in one stream."""

    uid: int
    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None
    calls: list[Call] = field(default_factory=list)
    completed: int = 0
    entered_at: list[float] = field(default_factory=list)
    # How far the device has come, where the backend counts that instead of completed calls.
    device: wire.DeviceStatus | None = None
    is_in_call: bool = False  # the backend does not count the newest call yet, as with a full queue
    lost_from_seq: int = 0  # calls from here on have uncertain numbers; 0: none was lost

    @property
    def counted_calls(self) -> int:
        """The number of calls that a backend counts."""
        return sum(call.signature.op != GRAPH_REPLAY for call in self.calls)

    def list_calls(self, now: float) -> list[Call]:
        """The calls, with their ages at a time."""
        return [
            replace(call, entered_s=now - entered_at)
            for call, entered_at in zip(self.calls, self.entered_at, strict=True)
        ]

    def make_state(self, calls: list[Call], *, reports_completion: bool) -> StreamState:
        """What its ring shows. ``calls`` are its calls with their ages."""
        completed = self.completed if reports_completion and self.device is None else None
        is_pending = completed is not None and completed < len(calls)
        return StreamState(
            uid=self.uid,
            kind=self.kind,
            group=self.group,
            peer=self.peer,
            tag=self.tag,
            entered=len(calls),
            completed=completed,
            chain=calls[-1].chain,
            entered_s=calls[-1].entered_s,
            pending_s=calls[self.completed].entered_s if is_pending else None,
            loss=Loss(self.lost_from_seq, LossReason.FAULT) if self.lost_from_seq else None,
        )

    def list_device_entries(self, now: float) -> list[DeviceEntry]:
        """The counters of its device, if they are reported."""
        if self.device is None:
            return []
        return [
            DeviceEntry(
                uid=self.uid,
                enqueued=self.counted_calls - self.is_in_call,
                started=self.device.started,
                completed=self.device.completed,
                read_ns=int((now - self.device.read_s) * 1e9),
            )
        ]


@dataclass
class ScriptedRank:
    """What one rank does, and the calls that it made."""

    number: int
    host: str = "node0"
    agent: str = ""  # empty: that of its host
    master: str = ""  # its MASTER_ADDR:MASTER_PORT, if it has not that of the job
    world_size: int = 0  # likewise
    pid: int = 0  # 0: one more than its number
    alive: bool = True
    lifecycle: Lifecycle = Lifecycle.INITIALISED
    state: str = "S"
    idle: bool = True
    busy_until: float = 0.0
    exit: ExitInfo | None = None
    exited_at: float = 0.0
    exception: ExceptionInfo | None = None
    exception_at: float = 0.0
    handling: ExceptionInfo | None = None
    phase: str | None = None
    pulse_at: float | None = None
    cpu_s: float = 0.0
    is_reporting: bool = True  # its agent reports it
    has_old_calls: bool = True  # the calls that the server requests are still recorded
    streams: dict[str, ScriptedStream] = field(default_factory=dict)
    dropped: int = 0  # calls that were not recorded in any stream
    opened: int = 0  # streams ever opened, if not only the reported ones


class ScriptedJob:
    """Ranks make calls at given times; `send_heartbeats` reports all of them, as node agents would."""

    def __init__(
        self,
        world_size: int,
        *,
        name: str = "job",
        limits: Limits = LIMITS,
        reports_completion: bool = True,
        fleet: Fleet | None = None,
        host: str = "node0",
        master: str = "",
    ) -> None:
        self.world_size = world_size
        self.reports_completion = reports_completion  # False: as on NCCL
        self.name = name
        self.limits = limits
        self.now = 100.0
        self.fleet = Fleet() if fleet is None else fleet  # may be shared with another job
        self.master = master
        self.allows_debugger = False  # HANGWATCH_GPU_STACKS is in the environment of its ranks
        self.ranks = {r: ScriptedRank(r, host=host) for r in range(world_size)}
        self.groups: dict[str, tuple[int, ...]] = {"world": tuple(range(world_size))}
        self._heartbeat_numbers: dict[str, int] = {}

    def add_group(self, name: str, ranks: tuple[int, ...]) -> str:
        self.groups[name] = ranks
        return name

    def make_call(
        self, rank: int, op: str = "all_reduce", *, group: str = "world", done: bool = False, blocking: bool | None = True,
        line: int = 10, backend: str = "gloo", thread: int = 0, generation: int = 1, **arguments: Any,
    ) -> None:  # fmt: skip
        """The rank enters a call now, and completes it if ``done``."""
        members = Group(
            name=group,
            desc=group,
            ranks=self.groups[group],
            backend=backend,
            generation=generation,
        )
        stream = self._open_stream(rank, group, StreamKind.COLLECTIVE, members)
        signature = make_signature(op, **arguments)
        self._enter_call(stream, signature, done, blocking, line, thread)

    def make_calls(
        self,
        op: str = "all_reduce",
        *,
        group: str = "world",
        except_ranks: tuple[int, ...] = (),
        done: bool = True,
        **arguments: Any,
    ) -> None:
        for rank in self.groups[group]:
            if rank not in except_ranks:
                self.make_call(rank, op, group=group, done=done, **arguments)

    def replay_graph(
        self,
        rank: int,
        contents: str = "12 collectives (all_reduce), hash 5",
        *,
        group: str = "world",
    ) -> None:
        """The rank replays a CUDA graph that has collectives of the group."""
        members = Group(name=group, desc=group, ranks=self.groups[group], backend="nccl")
        stream = self._open_stream(rank, group, StreamKind.COLLECTIVE, members)
        signature = Signature(op=GRAPH_REPLAY, detail=contents)
        signature = with_agreement_hash(signature, MustMatch.NOTHING, ())
        self._enter_call(stream, signature, False, None, 40)

    def make_foreign_call(
        self, rank: int, number: int, op: str = "broadcast", *, store: str = "store", size: int = 2,
        done: bool = False, kind: StreamKind = StreamKind.COLLECTIVE, peer: int | None = None,
    ) -> None:  # fmt: skip
        """The rank makes a call as member ``number`` of a group that ``store`` identifies."""
        members = Group(
            name="transfer",
            desc="undefined",
            ranks=tuple(range(size)),
            backend="gloo",
            generation=0,
            foreign=store,
            number=number,
        )
        stream = self._open_stream(rank, f"{store} {kind.value} {peer}", kind, members, peer)
        self._enter_call(stream, make_signature(op), done, True, 30)

    def make_p2p_call(
        self,
        rank: int,
        kind: StreamKind,
        peer: int,
        *,
        tag: int = 0,
        done: bool = False,
        blocking: bool | None = None,
        **arguments: Any,
    ) -> None:
        world = Group(name="world", desc="world", ranks=self.groups["world"])
        stream = self._open_stream(rank, f"{kind.value}{peer}/{tag}", kind, world, peer, tag)
        self._enter_call(stream, make_signature(kind.value, **arguments), done, blocking, 20)

    def make_setup_call(
        self, rank: int, op: str = "init_process_group", *, done: bool = True, ranks: tuple[int, ...] | None = None,
        world: int | None = None, nth: int = 1,
    ) -> None:  # fmt: skip
        """The rank sets up the ``nth`` world of that size, which has the first ranks."""
        size = self.world_size if world is None else world
        members = Group(
            name="setup",
            desc="set-up",
            ranks=tuple(range(size)),
            generation=nth,
            world_size=world or 0,
        )
        detail = None if ranks is None else f"ranks={pack_ranks(ranks)}"
        signature = with_agreement_hash(Signature(op=op, detail=detail), MustMatch.NOTHING, ())
        key = "setup" if world is None else f"setup {world}/{nth}"
        stream = self._open_stream(rank, key, StreamKind.SETUP, members)
        self._enter_call(stream, signature, done, True, 1)

    def report_device(
        self, rank: int, completed: int, started: int | None = None, *, group: str = "world"
    ) -> None:
        """Sets the counters of the rank's device; its calls are complete only by these."""
        stream = self.ranks[rank].streams[group]
        stream.device = wire.DeviceStatus(
            uid=stream.uid, enqueued=stream.counted_calls, started=started, completed=completed
        )

    def lose_call(self, rank: int, key: str = "world") -> None:
        """The recorder of the rank fails to record a call of the stream now, and knows it."""
        stream = self.ranks[rank].streams[key]
        stream.lost_from_seq = stream.lost_from_seq or len(stream.calls) + 1

    def complete_calls(self, rank: int, group: str = "world") -> None:
        stream = self.ranks[rank].streams[group]
        stream.completed = len(stream.calls)

    def end_process(
        self,
        rank: int,
        *,
        signal: int | None = None,
        status: int | None = None,
        exception: ExceptionInfo | None = None,
    ) -> None:
        process = self.ranks[rank]
        process.alive = False
        process.exit, process.exited_at = ExitInfo(signal=signal, exit_status=status), self.now
        if exception is not None:
            process.exception, process.exception_at = exception, self.now

    def advance_time(self, seconds: float) -> None:
        self.now += seconds

    def report_stack(self, rank: int, *frames: Frame, cpu_s: float | None = None) -> None:
        """A sample of the rank's main thread shows these frames now, innermost first."""
        self.report_stacks(rank, frames, cpu_s=cpu_s)

    def report_stacks(
        self,
        rank: int,
        *threads: Iterable[Frame],
        device_hold: int | None = None,
        cpu_s: float | None = None,
    ) -> None:
        """A sample of the rank's threads shows these frames now, the main thread first, each with the
        CPU time that it has used. The calls of the ``n``-th thread, from 1, are those that were made
        with ``thread=n``.
        """
        callers = self._list_callers(rank)
        stacks = tuple(
            ThreadStack(
                thread=f"Thread-{n}" if n else "MainThread",
                frames=tuple(frames),
                main=not n,
                call_recency=list(callers).index(n + 1) if n + 1 in callers else None,
                called_uids=tuple(callers.get(n + 1, ())),
                device_hold=device_hold,
                cpu_s=cpu_s,
            )
            for n, frames in enumerate(threads)
        )
        self.apply_heartbeat(
            host=self.ranks[rank].host,
            agent=f"agent-{self.ranks[rank].host}",
            samples=(
                wire.StackReply(key=f"{rank}-1", request="r", source="py-spy", threads=stacks),
            ),
        )

    def report_kernels(self, rank: int, *names: str, error: str | None = None) -> None:
        """The debugger shows kernels of these names, of 2 blocks of 128 threads, on the rank's device now."""
        kernels = tuple(
            Kernel(name=name, device=rank, grid=(2, 1, 1), block=(128, 1, 1)) for name in names
        )
        reply = wire.KernelsReply(
            key=f"{rank}-1", request="k", source="cuda-gdb", kernels=kernels, error=error
        )
        host = self.ranks[rank].host
        self.apply_heartbeat(host=host, agent=f"agent-{host}", kernels=(reply,))

    def _list_callers(self, rank: int) -> dict[int, list[int]]:
        """The threads with numbers that made calls, that of the newest call first, each with the
        uids of the streams whose newest call it made.
        """
        used = [stream for stream in self.ranks[rank].streams.values() if stream.calls]
        used.sort(key=lambda stream: -stream.entered_at[-1])
        callers: dict[int, list[int]] = {}
        for stream in used:
            if thread := stream.calls[-1].thread:
                callers.setdefault(thread, []).append(stream.uid)
        return callers

    def send_heartbeats(self) -> None:
        by_agent: dict[tuple[str, str], list[wire.ProcessUpdate]] = {}
        for rank in self.ranks.values():
            if rank.is_reporting:
                by_agent.setdefault((rank.host, rank.agent or f"agent-{rank.host}"), []).append(
                    self.make_process_update(rank)
                )
        for (host, agent), updates in by_agent.items():
            self.apply_heartbeat(host=host, agent=agent, processes=tuple(updates))

    def make_process_update(self, rank: ScriptedRank) -> wire.ProcessUpdate:
        """What the node agent composes for a server that does not know the process."""
        streams = {stream.uid: stream for stream in rank.streams.values()}
        calls = {uid: stream.list_calls(self.now) for uid, stream in streams.items()}
        history = UnackedHistory()
        history.add_delta(
            RingDelta(
                next_index=0,
                chains={
                    uid: {call.seq: call.chain for call in made} for uid, made in calls.items()
                },
                newest_ops={uid: made[-1].signature.op for uid, made in calls.items()},
            )
        )
        exception = None
        if rank.exception is not None:
            exception = encode_exception(rank.exception, rank.exception_at)
        handled = None
        if rank.handling is not None:
            handled = encode_exception(rank.handling, self.now)
        process = wire.ProcessUpdate(
            key=f"{rank.pid or rank.number}-1",
            identity=wire.ProcessIdentity(
                job=self.name,
                rank=rank.number,
                world_size=rank.world_size or self.world_size,
                pid=rank.pid or rank.number + 1,
                start_ticks=1,
                started_s=self.now - 99.0,
                master=rank.master or self.master,
                gpu_stacks=self.allows_debugger,
            ),
            state=rank.state,
            idle_s=0.0 if not rank.idle else 100.0,
            cpu_s=rank.cpu_s,
            ended=rank.exit,
            ended_s=self.now - rank.exited_at if rank.exit else 0.0,
        )
        snapshot = make_snapshot(
            *(
                stream.make_state(calls[uid], reports_completion=self.reports_completion)
                for uid, stream in streams.items()
            ),
            lifecycle=int(rank.lifecycle),
            pulse_s=0.0 if rank.pulse_at is None else self.now - rank.pulse_at,
            phase=rank.phase,
            dropped=rank.dropped,
            opened=max(rank.opened, len(streams)),
            exception=exception,
            handled_exception=handled,
            device_entries=tuple(
                entry
                for stream in streams.values()
                for entry in stream.list_device_entries(self.now)
            ),
        )

        def fetch_calls(uid: int, first: int, most: int) -> list[Call]:
            return calls[uid][first - 1 : first - 1 + most]

        update, _ = compose_update(
            process, snapshot, None, history, int(self.now * 1e9), fetch_calls, calls
        )
        assert update is not None
        return update

    def run_diagnosis(self) -> Diagnosis:
        return diagnose(self.latest_attempt, self.now, self.limits)

    def list_due_verdicts(self) -> list[Verdict]:
        """The verdicts that are confirmed now, after heartbeats and the requested evidence."""
        self.send_heartbeats()
        for _ in range(4):
            requests = [r for r in self.run_diagnosis().requests if r.stream_uid]
            for request in requests:
                streams = self.ranks[request.rank].streams.values()
                stream = next(s for s in streams if s.uid == request.stream_uid)
                calls = tuple(
                    call
                    for call in stream.list_calls(self.now)
                    if self.ranks[request.rank].has_old_calls
                    and request.from_seq <= call.seq <= request.to_seq
                    and call.seq % request.step == 0
                )
                host = self.ranks[request.rank].host
                self.apply_heartbeat(
                    host=host,
                    agent=f"agent-{host}",
                    calls=(
                        wire.CallsReply(
                            key=f"{request.rank}-1",
                            request="c",
                            uid=request.stream_uid,
                            calls=calls,
                            from_seq=request.from_seq,
                            to_seq=request.to_seq,
                            step=request.step,
                        ),
                    ),
                )
        return [v for v in self.run_diagnosis().verdicts if v.is_confirmed]

    @property
    def latest_attempt(self) -> Attempt:
        attempt = self.fleet.latest_attempt(self.name)
        assert attempt is not None
        return attempt

    def _open_stream(
        self,
        rank: int,
        key: str,
        kind: StreamKind,
        group: Group,
        peer: int | None = None,
        tag: int | None = None,
    ) -> ScriptedStream:
        """The rank's stream with this key, which its first call opens."""
        streams = self.ranks[rank].streams
        return streams.setdefault(
            key, ScriptedStream(len(streams) + 1, kind, group, peer=peer, tag=tag)
        )

    def _enter_call(
        self,
        stream: ScriptedStream,
        signature: Signature,
        done: bool,
        blocking: bool | None,
        line: int,
        thread: int = 0,
    ) -> None:
        chain_before = stream.calls[-1].chain if stream.calls else 0
        stream.calls.append(
            Call(
                seq=len(stream.calls) + 1,
                signature=signature,
                site=Site(file="train.py", line=line, function="step"),
                chain=extend_chain(chain_before, signature.agree),
                blocking=blocking,
                thread=thread,
            )
        )
        stream.entered_at.append(self.now)
        if done:
            stream.completed = len(stream.calls)

    def apply_heartbeat(
        self, host: str = "node0", agent: str = "agent-node0", **parts: object
    ) -> None:
        self._heartbeat_numbers[agent] = number = self._heartbeat_numbers.get(agent, 0) + 1
        beat = wire.Heartbeat(host=host, agent=agent, number=number, **parts)  # type: ignore[arg-type]
        assert self.fleet.apply_heartbeat(beat, self.now)
