"""The call streams of the ranks of a `parallel_job`: how far each is at a time. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group, unpack_ranks
from hangwatch.model.kinds import VerdictKind
from hangwatch.ring.reader import StreamState

from .parallel_job import (
    NEIGHBOURS_WAIT_AFTER_S,
    REPLICAS_WAIT_AFTER_S,
    STEP_S,
    TENSOR_PARALLEL_SIZE,
    HostPosition,
    JobRun,
    JobShape,
    SimulatedFault,
)

# The streams of a rank, by uid.
SETUP, WORLD, TP, DP, SEND_NEXT, RECV_PREV, SEND_PREV, RECV_NEXT = range(1, 9)
OPS = {
    SETUP: "new_group",
    WORLD: "barrier",
    TP: "all_reduce",
    DP: "reduce_scatter_tensor",
    SEND_NEXT: "send",
    SEND_PREV: "send",
    RECV_NEXT: "recv",
    RECV_PREV: "recv",
}
TP_CALLS, DP_CALLS, PP_CALLS = 640, 16, 32  # of a step
EXCHANGE_FROM = 0.9  # the part of a step after which replicas exchange gradients
GROUPS_CREATED, WORLD_CALLS = 3, 2  # calls of the set-up, and of the whole world
_MASK, _HASH_MULTIPLIER, _CHANGE_MULTIPLIER = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F


@dataclass(slots=True)
class SimulatedStream:
    """How far a rank is in one stream."""

    uid: int
    entered: int
    completed: int | None  # None: nothing reports completion
    op: str
    last_call_at: float  # when the newest call that is not pending was made
    hash_change: int = 0  # makes the running hash differ from those of other ranks
    changed_from: int = 0  # the first call with that hash; 0: the newest
    pending_since: float = 0.0  # when the pending call was entered; 0 if there is none

    @property
    def entered_at(self) -> float:
        return self.pending_since or self.last_call_at

    def make_state(self, target: StreamTarget, now: float) -> StreamState:
        """What a node agent reads of it in the rank's ring."""
        pending_s = None
        if self.completed is not None and self.completed < self.entered:
            pending_s = now - self.pending_since if self.pending_since else 0.002
        return StreamState(
            uid=self.uid,
            kind=target.kind,
            group=target.group,
            peer=target.peer,
            tag=target.tag,
            entered=self.entered,
            completed=self.completed,
            chain=self.find_hash(self.entered),
            entered_s=max(0.002, now - self.entered_at),
            pending_s=pending_s,
        )

    def make_call(self, seq: int, now: float, thread: int) -> Call:
        is_queued = self.completed is None
        is_changed = seq >= (self.changed_from or self.entered)
        return Call(
            seq=seq,
            signature=Signature(
                op=self.op if is_changed else OPS[self.uid],
                shapes=((4096,),),
                dtype="bfloat16",
                numel=4096,
                agree=77 + self._find_hash_change(seq),
            ),
            site=Site(file="/u/train.py", line=50 + self.uid, function="step"),
            chain=self.find_hash(seq),
            entered_s=max(0.0, now - self.entered_at),
            blocking=True if self.uid in (SETUP, WORLD, TP, DP) and not is_queued else None,
            thread=thread,
        )

    def find_hash(self, seq: int) -> int:
        """The running hash after a call."""
        return running_hash(seq, self._find_hash_change(seq))

    def _find_hash_change(self, seq: int) -> int:
        return self.hash_change if seq >= (self.changed_from or self.entered) else 0


def running_hash(seq: int, hash_change: int = 0) -> int:
    return (seq * _HASH_MULTIPLIER ^ hash_change * _CHANGE_MULTIPLIER) & _MASK


def make_queued_stream(uid: int, calls: int, last_call_at: float) -> SimulatedStream:
    return SimulatedStream(uid, calls, None, OPS[uid], last_call_at)


class RunningHashes(dict[int, int]):
    """The running hashes of a stream's calls after ``after``, each computed when it is read: a
    heartbeat has few of thousands. Only the first and the last are among the keys.
    """

    def __init__(self, stream: SimulatedStream, after: int) -> None:
        super().__init__({seq: stream.find_hash(seq) for seq in (after + 1, stream.entered)})
        self._stream, self._after = stream, after

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, int) and self._after < seq <= self._stream.entered

    def __missing__(self, seq: int) -> int:
        return self._stream.find_hash(seq)


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """Whom the calls of a stream reach."""

    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None


@functools.cache  # all members share a group
def _make_group(name: str, desc: str, ranks: str, backend: str = "") -> Group:
    return Group(name=name, desc=desc, ranks=unpack_ranks(ranks), backend=backend)


def map_stream_targets(shape: JobShape, rank: int) -> dict[int, StreamTarget]:
    """Whom a rank's streams reach, by uid."""
    position = HostPosition.of_host(shape, rank // TENSOR_PARALLEL_SIZE)
    lane = rank % TENSOR_PARALLEL_SIZE
    stage, replica = position.stage, position.replica
    replica_size = TENSOR_PARALLEL_SIZE * shape.pipeline
    last_stage = TENSOR_PARALLEL_SIZE * (shape.pipeline - 1)
    all_ranks = f"0-{shape.ranks - 1}"
    tp_first = rank - lane
    tp_ranks = f"{tp_first}-{tp_first + TENSOR_PARALLEL_SIZE - 1}"
    dp_first = stage * TENSOR_PARALLEL_SIZE + lane
    dp_ranks = f"{dp_first}-{dp_first + replica_size * (shape.data - 1)}:{replica_size}"
    pp_first = replica * replica_size + lane
    pp_ranks = f"{pp_first}-{pp_first + last_stage}:{TENSOR_PARALLEL_SIZE}"
    pipeline = _make_group(f"pp{replica}.{lane}", "pp", pp_ranks, shape.backend)
    following, previous = rank + TENSOR_PARALLEL_SIZE, rank - TENSOR_PARALLEL_SIZE
    targets = {SETUP: StreamTarget(StreamKind.SETUP, _make_group("setup", "set-up", all_ranks))}
    for uid, group in (
        (WORLD, ("0", "default_pg", all_ranks)),
        (TP, (f"tp{tp_first}", "tp", tp_ranks)),
        (DP, (f"dp{stage}.{lane}", "dp", dp_ranks)),
    ):
        targets[uid] = StreamTarget(StreamKind.COLLECTIVE, _make_group(*group, shape.backend))
    if stage + 1 < shape.pipeline:
        targets[SEND_NEXT] = StreamTarget(StreamKind.SEND, pipeline, following, 0)
        targets[RECV_NEXT] = StreamTarget(StreamKind.RECV, pipeline, following, 0)
    if stage:
        targets[SEND_PREV] = StreamTarget(StreamKind.SEND, pipeline, previous, 0)
        targets[RECV_PREV] = StreamTarget(StreamKind.RECV, pipeline, previous, 0)
    return targets


def list_group_faults(run: JobRun, now: float) -> list[SimulatedFault]:
    """The faults so far in which a rank creates a group with other members."""
    return [
        fault
        for fault in run.faults
        if fault.kind is VerdictKind.GROUP_MISMATCH and fault.starts_at <= now
    ]


def count_groups_created(run: JobRun, now: float) -> int:
    """The number of groups of each rank: all create one more at each fault of groups."""
    return GROUPS_CREATED + len(list_group_faults(run, now))


def make_setup_stream(run: JobRun, rank: int, now: float) -> SimulatedStream:
    """The stream of the calls that create groups."""
    created_at = max(
        [group_fault.starts_at for group_fault in list_group_faults(run, now)],
        default=run.started_at,
    )
    calls = count_groups_created(run, now)
    setup = SimulatedStream(SETUP, calls, calls, OPS[SETUP], created_at)
    setup.hash_change = int(run.suffers_fault(VerdictKind.GROUP_MISMATCH, rank, now))
    return setup


def list_blocking_streams(run: JobRun, rank: int, now: float) -> list[SimulatedStream]:
    """How far a rank is in all its streams, where calls block and their completion is known."""
    fault = run.active_fault(now)
    streams = _list_completed_streams(run, rank, now)
    blocked_uid = _find_blocked_stream(run, fault, rank, now) if fault is not None else 0
    if fault is None or not blocked_uid:
        return streams
    blocked = next(stream for stream in streams if stream.uid == blocked_uid)
    blocked.entered += 1
    wait_after_s = REPLICAS_WAIT_AFTER_S if blocked_uid == DP else NEIGHBOURS_WAIT_AFTER_S
    blocked.pending_since = fault.starts_at + wait_after_s
    if fault.kind is VerdictKind.MISMATCH and rank == fault.rank:
        blocked.op, blocked.hash_change = "broadcast", 1
    return streams


def list_streams_at_startup(fault: SimulatedFault, rank: int) -> list[SimulatedStream]:
    """All ranks but the culprit wait in `init_process_group`."""
    if rank == fault.rank:
        return []
    began_at = fault.starts_at
    return [SimulatedStream(SETUP, 1, 0, "init_process_group", began_at, pending_since=began_at)]


def _list_completed_streams(run: JobRun, rank: int, now: float) -> list[SimulatedStream]:
    """The streams without the calls in which a fault makes ranks wait."""
    fault = run.active_fault(now)
    steps = run.count_steps(now)
    step_part = steps % 1.0
    moved_at = fault.starts_at if fault is not None else now
    exchanged_at = moved_at
    if step_part < EXCHANGE_FROM:
        exchanged_at = max(run.started_at, moved_at - step_part * STEP_S)
    exchanged_part = max(0.0, step_part - EXCHANGE_FROM) / 0.1
    dp_calls = DP_CALLS * int(steps) + int(DP_CALLS * exchanged_part)

    def make_stream(uid: int, calls: int, last_call_at: float) -> SimulatedStream:
        return SimulatedStream(uid, calls, calls, OPS[uid], last_call_at)

    streams = [
        make_setup_stream(run, rank, now),
        make_stream(WORLD, WORLD_CALLS, run.started_at),
        make_stream(TP, int(steps * TP_CALLS), moved_at),
        make_stream(DP, dp_calls, exchanged_at),
    ]
    pp_calls = int(steps * PP_CALLS)
    stage = HostPosition.of_host(run.shape, rank // TENSOR_PARALLEL_SIZE).stage
    if stage + 1 < run.shape.pipeline:
        streams += [make_stream(uid, pp_calls, moved_at) for uid in (SEND_NEXT, RECV_NEXT)]
    if stage:
        streams += [make_stream(uid, pp_calls, moved_at) for uid in (SEND_PREV, RECV_PREV)]
    return streams


def _find_blocked_stream(run: JobRun, fault: SimulatedFault, rank: int, now: float) -> int:
    """The stream in whose next call a rank waits because of a fault; 0 if it does not wait."""
    position = HostPosition.of_host(run.shape, rank // TENSOR_PARALLEL_SIZE)
    culprit = HostPosition.of_host(run.shape, fault.host)
    is_same_replica = position.replica == culprit.replica
    wait_after_s = NEIGHBOURS_WAIT_AFTER_S if is_same_replica else REPLICAS_WAIT_AFTER_S
    if now < fault.starts_at + wait_after_s:
        return 0
    if not is_same_replica:
        return DP
    is_deadlock = fault.kind is VerdictKind.DEADLOCK
    if is_deadlock and rank in fault.list_culprits():
        return RECV_NEXT if rank == fault.rank else RECV_PREV
    if position.stage == culprit.stage or (is_deadlock and position.stage == culprit.stage + 1):
        enters_call = fault.kind in (VerdictKind.MISMATCH, VerdictKind.NO_PROGRESS)
        return TP if rank != fault.rank or enters_call else 0
    return RECV_NEXT if position.stage < culprit.stage else RECV_PREV
