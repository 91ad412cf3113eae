"""A job of tensor, pipeline and data parallelism that is only computed: its shape, its steps and its
faults. Pure.

Every rank makes 64 tensor-parallel calls a second, 3.2 sends and receives each way, and 16
data-parallel calls at the end of a step of 10 seconds. Ranks are numbered as Megatron-LM does by
default: tensor, then pipeline, then data. A host has the 8 ranks of one tensor-parallel group. A
fault stops the job as a real one does: its neighbours at their next call, the other replicas at the
end of the step. `parallel_streams` computes the calls of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.kinds import VerdictKind

TENSOR_PARALLEL_SIZE = 8  # ranks of a tensor-parallel group, and of a host
STEP_S = 10.0
# The part of a step after which the replicas exchange gradients, which begins at 0.9.
EXCHANGE_STARTED_AT = 0.96
NEIGHBOURS_WAIT_AFTER_S, REPLICAS_WAIT_AFTER_S = 0.2, 2.0  # after a fault
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
# No rank waits because of these at first.
HARMLESS_KINDS = frozenset({VerdictKind.CONCURRENT_USE, VerdictKind.GROUP_MISMATCH})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    pipeline: int  # stages
    data: int  # replicas
    backend: str = "gloo"

    @classmethod
    def largest_within(cls, ranks: int, backend: str = "gloo") -> JobShape:
        """The largest job of at most ``ranks`` ranks with 5 or 10 stages."""
        pipeline = 10 if ranks >= 10_000 else 5
        data = max(2, ranks // (TENSOR_PARALLEL_SIZE * pipeline))
        return cls(pipeline=pipeline, data=data, backend=backend)

    @property
    def queues_calls(self) -> bool:
        """Whether a call only queues work for the device, and nothing reports its completion."""
        return self.backend == "nccl"

    @property
    def hosts(self) -> int:
        return self.pipeline * self.data

    @property
    def ranks(self) -> int:
        return TENSOR_PARALLEL_SIZE * self.hosts


@dataclass(frozen=True, slots=True)
class HostPosition:
    stage: int
    replica: int

    @classmethod
    def of_host(cls, shape: JobShape, host: int) -> HostPosition:
        return cls(stage=host % shape.pipeline, replica=host // shape.pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    kind: VerdictKind
    rank: int
    starts_at: float  # on the machine's monotonic clock
    ends_at: float = float("inf")

    @property
    def host(self) -> int:
        return self.rank // TENSOR_PARALLEL_SIZE

    def is_active(self, now: float) -> bool:
        return self.starts_at <= now < self.ends_at

    def list_culprits(self) -> set[int]:
        """The ranks that the verdict must name."""
        if self.kind is VerdictKind.NO_PROGRESS:
            return set()
        if self.kind is VerdictKind.LOST_NODE:
            first = self.host * TENSOR_PARALLEL_SIZE
            return set(range(first, first + TENSOR_PARALLEL_SIZE))
        if self.kind is VerdictKind.DEADLOCK:
            return {self.rank, self.rank + TENSOR_PARALLEL_SIZE}
        return {self.rank}


@dataclass(slots=True, kw_only=True)
class JobRun:
    """One attempt of the job, with ``faults`` one after the other."""

    name: str = "fleet"
    shape: JobShape
    number: int
    started_at: float
    faults: list[SimulatedFault] = field(default_factory=list)
    ended_at: float = float("inf")

    def count_steps(self, now: float) -> float:
        """Steps done by then. A fault stops all ranks; after it comes the end of a step, for which
        the replicas have waited.
        """
        done, resumed_at = 0.0, self.started_at
        for fault in self.faults:
            if fault.kind in HARMLESS_KINDS or fault.starts_at > now:
                continue
            done += max(0.0, fault.starts_at - resumed_at) / STEP_S
            resumed_at = min(now, fault.ends_at)
            if now >= fault.ends_at:
                done = int(done) + EXCHANGE_STARTED_AT
        return done + max(0.0, now - resumed_at) / STEP_S

    def active_fault(self, now: float) -> SimulatedFault | None:
        """The fault that blocks the job."""
        for fault in self.faults:
            if fault.is_active(now) and fault.kind not in HARMLESS_KINDS:
                return fault
        return None

    def is_singled_out(self, rank: int, now: float) -> bool:
        """Whether its calls may differ from those of the other ranks of its host."""
        return any(
            fault.starts_at <= now and rank in (fault.rank, fault.rank + TENSOR_PARALLEL_SIZE)
            for fault in self.faults
        )

    def suffers_fault(self, kind: VerdictKind, rank: int, now: float) -> bool:
        return any(
            fault.kind is kind and fault.rank == rank and fault.is_active(now)
            for fault in self.faults
        )
