"""A job of any size that trains or hangs, as the messages of its node agents show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle, ThreadStack
from hangwatch.protocol import heartbeat

LATE_FRAME = Frame(
    function="load_batch", file="/u/train.py", line=44, text="return self._ready.get()"
)
WAITING_FRAME = Frame(function="step", file="/u/train.py", line=52, text="dist.all_reduce(grad)")
OUTER_FRAME = Frame(function="main", file="/u/train.py", line=60)
_FIRST_PID, _FIRST_START_TICKS = 1000, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroup:
    name: str
    desc: str
    ranks: str  # see `hangwatch.model.groups.pack_ranks`


@dataclass(slots=True, kw_only=True)
class SimulatedJob:
    """Each rank makes a step a second, with one call in each of its groups. Late ranks do not enter
    the call in which the others then wait. All texts can be set.
    """

    ranks: int
    # The groups of a rank; None: one group of all ranks.
    groups: Callable[[int], list[SimulatedGroup]] | None = None
    ranks_per_host: int = 8
    name: str = "run7"
    host: str = "node{}"  # formatted with the host's index
    restart: int = 0
    op: str = "all_reduce"
    phase: str | None = None
    late_frame: Frame = LATE_FRAME
    exception: ExceptionInfo | None = None  # late ranks end with it; None: they stay alive
    late_ranks: set[int] = field(default_factory=set)
    late_since: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    steps_before: int = 0  # steps and calls that were done at the start
    calls_before: int = 0

    @property
    def hosts(self) -> range:
        return range(-(-self.ranks // self.ranks_per_host))

    def hang_ranks(self, *ranks: int) -> None:
        self.late_ranks, self.late_since = set(ranks), time.monotonic()

    def resume_training(self) -> None:
        self.late_ranks = set()

    def list_groups(self, rank: int) -> list[SimulatedGroup]:
        if self.groups is not None:
            return self.groups(rank)
        return [SimulatedGroup(name="0", desc="default_pg", ranks=f"0-{self.ranks - 1}")]

    def make_process_updates(self, host: int, *, full: bool) -> tuple[heartbeat.ProcessUpdate, ...]:
        """Updates of the host's ranks; full ones carry the identities."""
        first = host * self.ranks_per_host
        local_ranks = range(first, min(self.ranks, first + self.ranks_per_host))
        return tuple(self.make_process_update(rank, full=full) for rank in local_ranks)

    def make_process_update(self, rank: int, *, full: bool) -> heartbeat.ProcessUpdate:
        has_failed = rank in self.late_ranks and self.exception is not None
        streams = [
            self._make_stream_update(uid, group, rank, full)
            for uid, group in enumerate(self.list_groups(rank), 1)
        ]
        return heartbeat.ProcessUpdate(
            key=self._make_key(rank),
            identity=self._make_identity(rank) if full else None,
            lifecycle=Lifecycle.INITIALISED,
            step=self.steps_before + self._count_steps(),
            phase=self.phase,
            pulse_s=0.1,
            state="S",
            idle_s=self._hung_s,
            ended=ExitInfo(exit_status=1) if has_failed else None,
            raised=self.exception if has_failed else None,
            streams=tuple(streams),
        )

    def take_sample(self, command: dict[str, Any]) -> heartbeat.StackReply:
        """The reply to a command that requests the stacks of a rank."""
        rank = int(command["key"].partition("-")[0]) - _FIRST_PID
        inner_frame = self.late_frame if rank in self.late_ranks else WAITING_FRAME
        thread = ThreadStack(thread="MainThread", frames=(inner_frame, OUTER_FRAME), main=True)
        return heartbeat.StackReply(
            key=command["key"], request=command["id"], source="py-spy", threads=(thread,)
        )

    @property
    def _hung_s(self) -> float:
        return time.monotonic() - self.late_since if self.late_ranks else 0.0

    def _count_steps(self) -> int:
        """Steps since the start that all ranks have completed."""
        until = self.late_since if self.late_ranks else time.monotonic()
        return int(until - self.started_at)

    def _make_key(self, rank: int) -> str:
        return f"{_FIRST_PID + rank}-{_FIRST_START_TICKS + self.restart}"

    def _make_identity(self, rank: int) -> heartbeat.ProcessIdentity:
        return heartbeat.ProcessIdentity(
            job=self.name,
            restart=self.restart,
            rank=rank,
            world_size=self.ranks,
            local_rank=rank % self.ranks_per_host,
            pid=_FIRST_PID + rank,
            start_ticks=_FIRST_START_TICKS + self.restart,
            started_s=time.monotonic() - self.started_at,
        )

    def _make_stream_update(
        self, uid: int, group: SimulatedGroup, rank: int, full: bool
    ) -> heartbeat.StreamUpdate:
        is_waiting = bool(self.late_ranks) and rank not in self.late_ranks
        completed = self.calls_before + self._count_steps() + 1
        entered = completed + 1 if is_waiting else completed
        identity = heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE,
            name=group.name,
            desc=group.desc,
            ranks=group.ranks,
            backend="gloo",
        )
        return heartbeat.StreamUpdate(
            uid=uid,
            identity=identity if full else None,
            entered=entered,
            completed=completed,
            op=self.op,
            entered_s=self._hung_s,
            pending_s=self._hung_s if is_waiting else None,
            calls=(self._make_call(entered),) if is_waiting else (),
        )

    def _make_call(self, seq: int) -> Call:
        signature = Signature(
            op=self.op, shapes=((64,),), dtype="float32", reduce_op="sum", agree=5
        )
        site = Site(
            file=WAITING_FRAME.file, line=WAITING_FRAME.line, function=WAITING_FRAME.function
        )
        return Call(seq=seq, signature=signature, site=site, entered_s=self._hung_s, blocking=True)


def make_hung_job(
    *, hung_for_s: float = 2.0, name: str = "run7", host: str = "node1"
) -> SimulatedJob:
    """Four ranks on one host; rank 2 has not entered call 7 for `hung_for_s`, at step 812."""
    hung_since = time.monotonic() - hung_for_s
    return SimulatedJob(
        ranks=4,
        name=name,
        host=host,
        late_ranks={2},
        late_since=hung_since,
        started_at=hung_since,
        steps_before=812,
        calls_before=5,
    )
