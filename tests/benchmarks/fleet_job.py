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

TENSOR = 8  # ranks of a tensor-parallel group, and of a host
STEP_S = 10.0
PER_STEP = {"tp": 640, "dp": 16, "pp": 32}
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
CREATED, GREETED = 3, 2  # calls of the set-up, and of the whole world
# of a step: by then the replicas have begun to exchange gradients, which they do from 0.9 on
EXCHANGED = 0.96
NEIGHBOURS_WAIT, REPLICAS_WAIT = 0.2, 2.0  # seconds after a fault
_MASK, _ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15
AT_ONCE = frozenset(
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
HARMLESS = frozenset(
    {VerdictKind.CONCURRENT_USE, VerdictKind.GROUP_MISMATCH}
)  # nobody waits because of it, at first


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    pipeline: int
    data: int

    @classmethod
    def of(cls, ranks: int) -> Shape:
        """The largest job of at most ``ranks`` ranks with 5 or 10 stages."""
        pipeline = 10 if ranks >= 10_000 else 5
        return cls(pipeline=pipeline, data=max(2, ranks // (TENSOR * pipeline)))

    @property
    def hosts(self) -> int:
        return self.pipeline * self.data

    @property
    def ranks(self) -> int:
        return TENSOR * self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: VerdictKind
    rank: int
    at: float  # on the machine's monotonic clock
    until: float = float("inf")

    @property
    def host(self) -> int:
        return self.rank // TENSOR

    def culprits(self, shape: Shape) -> set[int]:
        if self.kind is VerdictKind.NO_PROGRESS:
            return set()
        if self.kind is VerdictKind.LOST_NODE:
            return set(range(self.host * TENSOR, (self.host + 1) * TENSOR))
        return {self.rank, self.rank + TENSOR} if self.kind is VerdictKind.DEADLOCK else {self.rank}


@dataclass(slots=True, kw_only=True)
class Run:
    """One attempt of the job: it was started at ``began`` and suffers ``faults`` in turn."""

    shape: Shape
    number: int
    began: float
    faults: list[Fault] = field(default_factory=list)
    ended_at: float = float("inf")

    def steps(self, now: float) -> float:
        """Steps done by then: a fault holds up all of them. Behind it comes the end of a step, for
        which the replicas waited.
        """
        done, at = 0.0, self.began
        for fault in [f for f in self.faults if f.kind not in HARMLESS and f.at <= now]:
            done += max(0.0, fault.at - at) / STEP_S
            at = min(now, fault.until)
            if now >= fault.until:
                done = int(done) + EXCHANGED
        return done + max(0.0, now - at) / STEP_S

    def fault(self, now: float) -> Fault | None:
        """The one that the job stands still for."""
        return next(
            (f for f in self.faults if f.at <= now < f.until and f.kind not in HARMLESS), None
        )

    def singled_out(self, rank: int, now: float) -> bool:
        """It may be elsewhere than the other ranks of its host."""
        return any(f.at <= now and rank in (f.rank, f.rank + TENSOR) for f in self.faults)

    def suffers(self, kind: VerdictKind, rank: int, now: float) -> bool:
        return any(f.kind is kind and f.rank == rank and f.at <= now < f.until for f in self.faults)


@dataclass(slots=True)
class Place:
    """A rank's place in one sequence, as a heartbeat tells it."""

    uid: int
    entered: int
    completed: int
    op: str
    made: float  # when its newest call was made, but for one that stands
    twist: int = 0  # makes its running hash another from the others'
    since: float = 0.0  # when the pending call was entered

    @property
    def entered_at(self) -> float:
        return self.since or self.made

    def told(self, after: int, now: float, stands: bool) -> dict[str, Any]:
        told: dict[str, Any] = {
            "uid": self.uid, "entered": self.entered, "completed": self.completed, "op": self.op,
            "entered_s": round(max(0.002, now - self.entered_at), 4),
        }  # fmt: skip
        if self.uid <= DP:
            told["chain"] = chain(self.entered, self.twist)
        if self.uid <= DP and after < self.entered:
            step = 1
            while self.entered // step - after // step > MAX_CHECKPOINTS:
                step *= 2
            seqs = range((after // step + 1) * step, self.entered + 1, step)
            told["checkpoints"] = [
                (n, chain(n, self.twist if n == self.entered else 0)) for n in seqs
            ]
        if self.completed < self.entered:
            told["pending_s"] = round(now - self.since, 4) if self.since else 0.002
        if stands:
            told["calls"] = [self.call(self.entered, now)]
        return told

    def call(self, seq: int, now: float) -> dict[str, Any]:
        twist = self.twist if seq == self.entered else 0
        op = self.op if seq == self.entered else OPS.get(self.uid, "recv")
        blocking = True if self.uid in (SETUP, WORLD, TP, DP) else None
        return {
            "seq": seq, "signature": {"op": op, "shapes": [[4096]], "dtype": "bfloat16", "numel": 4096, "agree": 77 + twist},
            "site": {"file": "/u/train.py", "line": 50 + self.uid, "function": "step"}, "chain": chain(seq, twist),
            "entered_s": max(0.0, now - self.entered_at), "blocking": blocking, "thread": 1,
        }  # fmt: skip


def chain(seq: int, twist: int = 0) -> int:
    return (seq * _ODD ^ twist * 0xC2B2AE3D27D4EB4F) & _MASK


def coordinates(shape: Shape, host: int) -> tuple[int, int]:
    """(pipeline stage, replica)."""
    return host % shape.pipeline, host // shape.pipeline


def identities(shape: Shape, rank: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of each of its sequences: the group, and the peer of a channel."""
    stage, replica = coordinates(shape, rank // TENSOR)
    first, lane = rank // TENSOR * TENSOR, rank % TENSOR
    width = TENSOR * shape.pipeline
    line = f"{replica * width + lane}-{replica * width + lane + TENSOR * (shape.pipeline - 1)}:{TENSOR}"
    peers = f"{stage * TENSOR + lane}-{stage * TENSOR + lane + width * (shape.data - 1)}:{width}"
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
            "ranks": f"{first}-{first + TENSOR - 1}",
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
        yield SEND_NEXT, {**channel, "kind": "send", "peer": rank + TENSOR}
        yield RECV_NEXT, {**channel, "kind": "recv", "peer": rank + TENSOR}
    if stage:
        yield SEND_PREV, {**channel, "kind": "send", "peer": rank - TENSOR}
        yield RECV_PREV, {**channel, "kind": "recv", "peer": rank - TENSOR}


def groups_created(run: Run, now: float) -> int:
    """By each rank: one more for each such fault, one of them with other members."""
    return CREATED + sum(f.kind is VerdictKind.GROUP_MISMATCH and now >= f.at for f in run.faults)


def places(run: Run, rank: int, now: float) -> list[Place]:
    """Where a rank is, in all its sequences."""
    shape, fault = run.shape, run.fault(now)
    if fault is not None and fault.kind is VerdictKind.STARTUP_STALL:
        return (
            [Place(SETUP, 1, 0, "init_process_group", fault.at, since=fault.at)]
            if rank != fault.rank
            else []
        )
    steps = run.steps(now)
    whole, part = int(steps), steps % 1.0
    tp, pp = int(steps * PER_STEP["tp"]), int(steps * PER_STEP["pp"])
    dp = PER_STEP["dp"] * whole + int(PER_STEP["dp"] * max(0.0, part - 0.9) / 0.1)
    stage, _ = coordinates(shape, rank // TENSOR)
    created, twisted = (
        groups_created(run, now),
        int(run.suffers(VerdictKind.GROUP_MISMATCH, rank, now)),
    )
    grouped = max(
        [f.at for f in run.faults if f.kind is VerdictKind.GROUP_MISMATCH and f.at <= now],
        default=run.began,
    )
    moved = fault.at if fault is not None else now
    exchanged = moved if part >= 0.9 else max(run.began, moved - part * STEP_S)
    found = [
        Place(SETUP, created, created, OPS[SETUP], grouped, twist=twisted), Place(WORLD, GREETED, GREETED, OPS[WORLD], run.began),
        Place(TP, tp, tp, OPS[TP], moved), Place(DP, dp, dp, OPS[DP], exchanged),
    ]  # fmt: skip
    if stage + 1 < shape.pipeline:
        found += [Place(SEND_NEXT, pp, pp, "send", moved), Place(RECV_NEXT, pp, pp, "recv", moved)]
    if stage:
        found += [Place(SEND_PREV, pp, pp, "send", moved), Place(RECV_PREV, pp, pp, "recv", moved)]
    if fault is not None and (uid := _waits_in(run, fault, rank, now)):
        place = next(p for p in found if p.uid == uid)
        place.entered += 1
        place.since = fault.at + (REPLICAS_WAIT if uid == DP else NEIGHBOURS_WAIT)
        if fault.kind is VerdictKind.MISMATCH and rank == fault.rank:
            place.op, place.twist = "broadcast", 1
    return found


def _waits_in(run: Run, fault: Fault, rank: int, now: float) -> int:
    """The sequence in whose next call a rank waits because of a fault; 0 where it does not."""
    stage, replica = coordinates(run.shape, rank // TENSOR)
    at, its = coordinates(run.shape, fault.host)
    if now < fault.at + (NEIGHBOURS_WAIT if replica == its else REPLICAS_WAIT):
        return 0
    if replica != its:
        return DP
    if fault.kind is VerdictKind.DEADLOCK and rank in fault.culprits(run.shape):
        return RECV_NEXT if rank == fault.rank else RECV_PREV
    if stage == at or (fault.kind is VerdictKind.DEADLOCK and stage == at + 1):
        return (
            TP
            if rank != fault.rank or fault.kind in (VerdictKind.MISMATCH, VerdictKind.NO_PROGRESS)
            else 0
        )
    return RECV_NEXT if stage < at else RECV_PREV
