"""A job of tensor, pipeline and data parallelism that exists only as numbers: what each rank has
done by a given time. Pure.

Every rank makes 64 tensor-parallel calls a second, 3.2 sends and receives each way, and 16
data-parallel calls at the end of a step of 10 seconds. Ranks are numbered as Megatron-LM does by
default: tensor, then pipeline, then data. A host has the 8 ranks of one tensor-parallel group. A
fault stops the job as a real one does: its neighbours at their next call, the other replicas at the
end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.kinds import VerdictKind
from hangwatch.protocol.heartbeat import MAX_CHECKPOINTS

TENSOR_PARALLEL_SIZE = 8  # ranks of a tensor-parallel group, and of a host
STEP_S = 10.0
CALLS_PER_STEP = {"tp": 640, "dp": 16, "pp": 32}
SETUP, WORLD, TP, DP, SEND_NEXT, RECV_PREV, SEND_PREV, RECV_NEXT = range(
    1, 9
)  # the sequences of a rank, by uid
OPS = {
    SETUP: "new_group",
    WORLD: "barrier",
    TP: "all_reduce",
    DP: "reduce_scatter_tensor",
    SEND_NEXT: "send",
    SEND_PREV: "send",
}
GROUPS_CREATED, WORLD_CALLS = 3, 2  # calls of the set-up, and of the whole world
# of a step: by then the replicas have begun to exchange gradients, which they do from 0.9 on
EXCHANGE_STARTED_AT = 0.96
NEIGHBOURS_WAIT_AFTER_S, REPLICAS_WAIT_AFTER_S = 0.2, 2.0  # seconds after a fault
_MASK, _HASH_MULTIPLIER = (1 << 64) - 1, 0x9E3779B97F4A7C15
IMMEDIATE_KINDS = frozenset(
    {
        VerdictKind.MISMATCH,
        VerdictKind.GROUP_MISMATCH,
        VerdictKind.DEADLOCK,
        VerdictKind.DEAD_RANK,
        VerdictKind.EXITED_RANK,
        VerdictKind.FROZEN_RANK,
        VerdictKind.CONCURRENT_USE,
    }
)
HARMLESS_KINDS = frozenset(
    {VerdictKind.CONCURRENT_USE, VerdictKind.GROUP_MISMATCH}
)  # nobody waits because of it, at first


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    pipeline: int
    data: int

    @classmethod
    def largest_within(cls, ranks: int) -> JobShape:
        """The largest job of at most ``ranks`` ranks with 5 or 10 stages."""
        pipeline = 10 if ranks >= 10_000 else 5
        return cls(pipeline=pipeline, data=max(2, ranks // (TENSOR_PARALLEL_SIZE * pipeline)))

    @property
    def hosts(self) -> int:
        return self.pipeline * self.data

    @property
    def ranks(self) -> int:
        return TENSOR_PARALLEL_SIZE * self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    kind: VerdictKind
    rank: int
    starts_at: float  # on the machine's monotonic clock
    ends_at: float = float("inf")

    @property
    def host(self) -> int:
        return self.rank // TENSOR_PARALLEL_SIZE

    def expected_culprits(self, shape: JobShape) -> set[int]:
        if self.kind is VerdictKind.NO_PROGRESS:
            return set()
        if self.kind is VerdictKind.LOST_NODE:
            return set(
                range(self.host * TENSOR_PARALLEL_SIZE, (self.host + 1) * TENSOR_PARALLEL_SIZE)
            )
        return (
            {self.rank, self.rank + TENSOR_PARALLEL_SIZE}
            if self.kind is VerdictKind.DEADLOCK
            else {self.rank}
        )


@dataclass(slots=True, kw_only=True)
class JobRun:
    """One attempt of the job: it was started at ``began`` and suffers ``faults`` in turn."""

    shape: JobShape
    number: int
    started_at: float
    faults: list[SimulatedFault] = field(default_factory=list)
    ended_at: float = float("inf")

    def count_steps(self, now: float) -> float:
        """Steps done by then: a fault holds up all of them. Behind it comes the end of a step, for
        which the replicas waited.
        """
        done, at = 0.0, self.started_at
        for fault in [
            f for f in self.faults if f.kind not in HARMLESS_KINDS and f.starts_at <= now
        ]:
            done += max(0.0, fault.starts_at - at) / STEP_S
            at = min(now, fault.ends_at)
            if now >= fault.ends_at:
                done = int(done) + EXCHANGE_STARTED_AT
        return done + max(0.0, now - at) / STEP_S

    def active_fault(self, now: float) -> SimulatedFault | None:
        """The one that the job stands still for."""
        return next(
            (
                f
                for f in self.faults
                if f.starts_at <= now < f.ends_at and f.kind not in HARMLESS_KINDS
            ),
            None,
        )

    def is_singled_out(self, rank: int, now: float) -> bool:
        """It may be elsewhere than the other ranks of its host."""
        return any(
            f.starts_at <= now and rank in (f.rank, f.rank + TENSOR_PARALLEL_SIZE)
            for f in self.faults
        )

    def suffers_fault(self, kind: VerdictKind, rank: int, now: float) -> bool:
        return any(
            f.kind is kind and f.rank == rank and f.starts_at <= now < f.ends_at
            for f in self.faults
        )


@dataclass(slots=True)
class SimulatedStream:
    """A rank's place in one sequence, as a heartbeat tells it."""

    uid: int
    entered: int
    completed: int
    op: str
    last_call_at: float  # when its newest call was made, but for one that stands
    hash_change: int = 0  # makes its running hash another from the others'
    pending_since: float = 0.0  # when the pending call was entered

    @property
    def entered_at(self) -> float:
        return self.pending_since or self.last_call_at

    def encode_update(self, after: int, now: float, blocked: bool) -> dict[str, Any]:
        told: dict[str, Any] = {
            "uid": self.uid, "entered": self.entered, "completed": self.completed, "op": self.op,
            "entered_s": round(max(0.002, now - self.entered_at), 4),
        }  # fmt: skip
        if self.uid <= DP:
            told["chain"] = running_hash(self.entered, self.hash_change)
        if self.uid <= DP and after < self.entered:
            step = 1
            while self.entered // step - after // step > MAX_CHECKPOINTS:
                step *= 2
            seqs = range((after // step + 1) * step, self.entered + 1, step)
            told["checkpoints"] = [
                (n, running_hash(n, self.hash_change if n == self.entered else 0)) for n in seqs
            ]
        if self.completed < self.entered:
            told["pending_s"] = round(now - self.pending_since, 4) if self.pending_since else 0.002
        if blocked:
            told["calls"] = [self.encode_call(self.entered, now)]
        return told

    def encode_call(self, seq: int, now: float) -> dict[str, Any]:
        twist = self.hash_change if seq == self.entered else 0
        op = self.op if seq == self.entered else OPS.get(self.uid, "recv")
        blocking = True if self.uid in (SETUP, WORLD, TP, DP) else None
        return {
            "seq": seq, "signature": {"op": op, "shapes": [[4096]], "dtype": "bfloat16", "numel": 4096, "agree": 77 + twist},
            "site": {"file": "/u/train.py", "line": 50 + self.uid, "function": "step"}, "chain": running_hash(seq, twist),
            "entered_s": max(0.0, now - self.entered_at), "blocking": blocking, "thread": 1,
        }  # fmt: skip


def running_hash(seq: int, hash_change: int = 0) -> int:
    return (seq * _HASH_MULTIPLIER ^ hash_change * 0xC2B2AE3D27D4EB4F) & _MASK


def host_coordinates(shape: JobShape, host: int) -> tuple[int, int]:
    """(pipeline stage, replica)."""
    return host % shape.pipeline, host // shape.pipeline


def iter_stream_identities(shape: JobShape, rank: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of each of its sequences: the group, and the peer of a channel."""
    stage, replica = host_coordinates(shape, rank // TENSOR_PARALLEL_SIZE)
    first, lane = rank // TENSOR_PARALLEL_SIZE * TENSOR_PARALLEL_SIZE, rank % TENSOR_PARALLEL_SIZE
    width = TENSOR_PARALLEL_SIZE * shape.pipeline
    line = f"{replica * width + lane}-{replica * width + lane + TENSOR_PARALLEL_SIZE * (shape.pipeline - 1)}:{TENSOR_PARALLEL_SIZE}"
    peers = f"{stage * TENSOR_PARALLEL_SIZE + lane}-{stage * TENSOR_PARALLEL_SIZE + lane + width * (shape.data - 1)}:{width}"
    everyone = f"0-{shape.ranks - 1}"
    yield SETUP, {"kind": "setup", "name": "setup", "desc": "set-up", "ranks": everyone}
    yield (
        WORLD,
        {
            "kind": "collective",
            "name": "0",
            "desc": "default_pg",
            "ranks": everyone,
            "backend": "gloo",
        },
    )
    yield (
        TP,
        {
            "kind": "collective",
            "name": f"tp{first}",
            "desc": "tp",
            "ranks": f"{first}-{first + TENSOR_PARALLEL_SIZE - 1}",
            "backend": "gloo",
        },
    )
    yield (
        DP,
        {
            "kind": "collective",
            "name": f"dp{stage}.{lane}",
            "desc": "dp",
            "ranks": peers,
            "backend": "gloo",
        },
    )
    channel = {
        "name": f"pp{replica}.{lane}",
        "desc": "pp",
        "ranks": line,
        "backend": "gloo",
        "tag": 0,
    }
    if stage + 1 < shape.pipeline:
        yield SEND_NEXT, {**channel, "kind": "send", "peer": rank + TENSOR_PARALLEL_SIZE}
        yield RECV_NEXT, {**channel, "kind": "recv", "peer": rank + TENSOR_PARALLEL_SIZE}
    if stage:
        yield SEND_PREV, {**channel, "kind": "send", "peer": rank - TENSOR_PARALLEL_SIZE}
        yield RECV_PREV, {**channel, "kind": "recv", "peer": rank - TENSOR_PARALLEL_SIZE}


def count_groups_created(run: JobRun, now: float) -> int:
    """By each rank: one more for each such fault, one of them with other members."""
    return GROUPS_CREATED + sum(
        f.kind is VerdictKind.GROUP_MISMATCH and now >= f.starts_at for f in run.faults
    )


def list_streams(run: JobRun, rank: int, now: float) -> list[SimulatedStream]:
    """Where a rank is, in all its sequences."""
    shape, fault = run.shape, run.active_fault(now)
    if fault is not None and fault.kind is VerdictKind.STARTUP_STALL:
        return (
            [
                SimulatedStream(
                    SETUP,
                    1,
                    0,
                    "init_process_group",
                    fault.starts_at,
                    pending_since=fault.starts_at,
                )
            ]
            if rank != fault.rank
            else []
        )
    steps = run.count_steps(now)
    whole, part = int(steps), steps % 1.0
    tp, pp = int(steps * CALLS_PER_STEP["tp"]), int(steps * CALLS_PER_STEP["pp"])
    dp = CALLS_PER_STEP["dp"] * whole + int(CALLS_PER_STEP["dp"] * max(0.0, part - 0.9) / 0.1)
    stage, _ = host_coordinates(shape, rank // TENSOR_PARALLEL_SIZE)
    created, twisted = (
        count_groups_created(run, now),
        int(run.suffers_fault(VerdictKind.GROUP_MISMATCH, rank, now)),
    )
    grouped = max(
        [
            f.starts_at
            for f in run.faults
            if f.kind is VerdictKind.GROUP_MISMATCH and f.starts_at <= now
        ],
        default=run.started_at,
    )
    moved = fault.starts_at if fault is not None else now
    exchanged = moved if part >= 0.9 else max(run.started_at, moved - part * STEP_S)
    found = [
        SimulatedStream(SETUP, created, created, OPS[SETUP], grouped, hash_change=twisted), SimulatedStream(WORLD, WORLD_CALLS, WORLD_CALLS, OPS[WORLD], run.started_at),
        SimulatedStream(TP, tp, tp, OPS[TP], moved), SimulatedStream(DP, dp, dp, OPS[DP], exchanged),
    ]  # fmt: skip
    if stage + 1 < shape.pipeline:
        found += [
            SimulatedStream(SEND_NEXT, pp, pp, "send", moved),
            SimulatedStream(RECV_NEXT, pp, pp, "recv", moved),
        ]
    if stage:
        found += [
            SimulatedStream(SEND_PREV, pp, pp, "send", moved),
            SimulatedStream(RECV_PREV, pp, pp, "recv", moved),
        ]
    if fault is not None and (uid := _find_blocked_stream(run, fault, rank, now)):
        place = next(p for p in found if p.uid == uid)
        place.entered += 1
        place.pending_since = fault.starts_at + (
            REPLICAS_WAIT_AFTER_S if uid == DP else NEIGHBOURS_WAIT_AFTER_S
        )
        if fault.kind is VerdictKind.MISMATCH and rank == fault.rank:
            place.op, place.hash_change = "broadcast", 1
    return found


def _find_blocked_stream(run: JobRun, fault: SimulatedFault, rank: int, now: float) -> int:
    """The sequence in whose next call a rank waits because of a fault; 0 where it does not."""
    stage, replica = host_coordinates(run.shape, rank // TENSOR_PARALLEL_SIZE)
    at, its = host_coordinates(run.shape, fault.host)
    if now < fault.starts_at + (
        NEIGHBOURS_WAIT_AFTER_S if replica == its else REPLICAS_WAIT_AFTER_S
    ):
        return 0
    if replica != its:
        return DP
    if fault.kind is VerdictKind.DEADLOCK and rank in fault.expected_culprits(run.shape):
        return RECV_NEXT if rank == fault.rank else RECV_PREV
    if stage == at or (fault.kind is VerdictKind.DEADLOCK and stage == at + 1):
        return (
            TP
            if rank != fault.rank or fault.kind in (VerdictKind.MISMATCH, VerdictKind.NO_PROGRESS)
            else 0
        )
    return RECV_NEXT if stage < at else RECV_PREV
