"""A modelled distributed job: ranks, groups and channels, calls that complete as a backend's do, and
faults.

Time advances in steps of a tenth of a second. The model knows what really blocks each rank, so
that a diagnosis made from heartbeats alone can be compared with it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group, pack_ranks, unpack_ranks
from hangwatch.model.operator_spec import MustMatch
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.model.signatures import extend_chain, with_agreement_hash
from hangwatch.model.threads import Frame, ThreadStack

STEP_S = 0.1
FOREVER_S = float("inf")
_MUST_MATCH = {op: spec.must_match for op, spec in OPERATIONS.items()}
_TORCH_FILE = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


@dataclass(frozen=True, slots=True)
class ModelStream:
    """One call stream: of a group, a channel or the set-up."""

    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class EnterCall:
    """A rank makes a call; ``event`` names it for a later `Wait`."""

    stream: ModelStream
    signature: Signature
    event: int
    blocking: bool | None = True  # as in the recorder: None for a send or a receive
    free: bool = False  # the thread continues immediately


@dataclass(frozen=True, slots=True)
class AwaitEvent:
    event: int


@dataclass(frozen=True, slots=True)
class RunOwnCode:
    """The rank's own code. ``busy`` uses the CPU; ``stuck`` is what a fault plants."""

    seconds: float
    busy: bool = False
    phase: str | None = None
    limit: float | None = None
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class BeginLifecycle:
    """A stage of its life: ``STARTING`` before torch is used."""

    lifecycle: Lifecycle


@dataclass(frozen=True, slots=True)
class EndProcess:
    status: int | None = None
    signal: int | None = None
    exception_type: str | None = None


@dataclass(frozen=True, slots=True)
class StopProcess:
    """SIGSTOP."""


Instruction: TypeAlias = (
    EnterCall | AwaitEvent | RunOwnCode | BeginLifecycle | EndProcess | StopProcess
)


def make_signature(
    op: str,
    *,
    numel: int = 64,
    dtype: str = "float32",
    reduce_op: str | None = None,
    root: int | None = None,
) -> Signature:
    """As the recorder makes it for this operation."""
    made = Signature(
        op=op,
        shapes=((numel,),) if op != "barrier" else (),
        dtype=dtype,
        reduce_op=reduce_op,
        root=root,
        numel=numel,
    )
    return with_agreement_hash(made, _MUST_MATCH[op], (1, numel))


def make_setup_signature(op: str, members: tuple[int, ...] | None = None) -> Signature:
    detail = None if members is None else f"ranks={pack_ranks(members)}"
    return with_agreement_hash(Signature(op=op, detail=detail), MustMatch.NOTHING, ())


@dataclass(slots=True)
class ModelCall:
    """A call that was made."""

    signature: Signature
    entered_at: float
    event: int
    blocking: bool | None
    order: int
    chain: int
    done: bool = False


@dataclass(slots=True)
class ModelRank:
    number: int
    host: str
    program: list[Instruction]
    next_instruction: int = 0  # index of the next instruction
    busy_until: float = 0.0  # busy with its own code
    work: RunOwnCode | None = None
    blocked_call: tuple[ModelStream, int] | None = None  # the call that its thread is blocked in
    waiting: bool = False  # in `Wait`, rather than in the call itself
    blocked_since: float = 0.0
    lifecycle: Lifecycle = Lifecycle.STARTING
    calls: dict[ModelStream, list[ModelCall]] = field(default_factory=dict)
    open_calls: list[tuple[ModelStream, int]] = field(
        default_factory=list
    )  # calls that are not complete
    ran_at: float = 0.0  # when its main thread last used the CPU
    stopped_at: float | None = None
    exit: ExitInfo | None = None
    exited_at: float = 0.0
    exception: ExceptionInfo | None = None
    exception_at: float = 0.0
    fails_at: float | None = None

    @property
    def is_running(self) -> bool:
        return self.exit is None and self.stopped_at is None


@dataclass(slots=True)
class ModelJob:
    """``eager``: a send, and a root's part of a one-sided collective, is over at once. ``visible``:
    making calls shows as CPU time.
    """

    programs: dict[int, list[Instruction]]
    hosts: dict[int, str]
    seed: int = 0
    eager: bool = True
    visible: bool = True
    mismatch_hangs: bool = True
    peers_raise: bool = False  # whoever waits for a dead rank fails soon
    launcher_kills: bool = False  # a second after the first failure
    nothing_moves: bool = False  # from now on no call completes
    now: float = 0.0
    ranks: dict[int, ModelRank] = field(default_factory=dict)
    _rng: Random = field(init=False)
    _call_count: int = 0

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self.ranks = {r: ModelRank(r, self.hosts[r], list(p)) for r, p in self.programs.items()}

    # -- what happens
    # ------------------------------------------------------------------------------------------------------

    def run_step(self) -> None:
        self.now += STEP_S
        order = list(self.ranks.values())
        self._rng.shuffle(order)
        moved = True
        while moved:
            moved = False
            for rank in order:
                while rank.is_running and self._execute_next(rank):
                    moved = True
            moved |= self._complete_calls()
        self._apply_failures()

    def _execute_next(self, rank: ModelRank) -> bool:
        """Executes one instruction, if its thread is free to."""
        if rank.blocked_call is not None:
            place, seq = rank.blocked_call
            if not rank.calls[place][seq - 1].done:
                return False
            rank.blocked_call = None
        if self.now < rank.busy_until:
            if rank.work is not None and rank.work.busy:
                rank.ran_at = self.now
            return False
        rank.work = None
        if rank.next_instruction >= len(rank.program):
            return False
        instruction = rank.program[rank.next_instruction]
        rank.next_instruction += 1
        if self.visible:
            rank.ran_at = self.now
        if isinstance(instruction, EnterCall):
            self._enter_call(rank, instruction)
        elif isinstance(instruction, AwaitEvent):
            self._await_event(rank, instruction.event)
        elif isinstance(instruction, RunOwnCode):
            rank.work, rank.busy_until, rank.blocked_since = (
                instruction,
                self.now + instruction.seconds,
                self.now,
            )
            rank.ran_at = self.now
        elif isinstance(instruction, BeginLifecycle):
            rank.lifecycle = instruction.lifecycle
        elif isinstance(instruction, StopProcess):
            rank.stopped_at = self.now
        else:
            self.end_process(rank, instruction)
        return True

    def _enter_call(self, rank: ModelRank, made: EnterCall) -> None:
        calls = rank.calls.setdefault(made.stream, [])
        before = calls[-1].chain if calls else 0
        self._call_count += 1
        calls.append(
            ModelCall(
                made.signature,
                self.now,
                made.event,
                made.blocking,
                self._call_count,
                extend_chain(before, made.signature.agree),
            )
        )
        rank.open_calls.append((made.stream, len(calls)))
        if not made.free:
            rank.blocked_call, rank.waiting, rank.blocked_since = (
                (made.stream, len(calls)),
                made.blocking is None,
                self.now,
            )

    def _await_event(self, rank: ModelRank, event: int) -> None:
        for place, calls in rank.calls.items():
            for seq, made in enumerate(calls, 1):
                if made.event == event and not made.done:
                    rank.blocked_call, rank.waiting, rank.blocked_since = (
                        (place, seq),
                        True,
                        self.now,
                    )

    def end_process(self, rank: ModelRank, how: EndProcess) -> None:
        rank.exit, rank.exited_at = ExitInfo(exit_status=how.status, signal=how.signal), self.now
        rank.blocked_call = rank.work = None
        if how.exception_type is not None:
            rank.exception, rank.exception_at = (
                ExceptionInfo(type=how.exception_type, message="", site=None),
                self.now,
            )

    def _complete_calls(self) -> bool:
        some = False
        if self.nothing_moves:
            return False
        for rank in self.ranks.values():
            done = [
                at
                for at in rank.open_calls
                if rank.is_running
                and self._is_next_in_order(rank, *at)
                and not self.find_unmet_ranks(rank.number, *at)[0]
            ]
            for place, seq in done:
                rank.calls[place][seq - 1].done = some = True
                rank.open_calls.remove((place, seq))
        return some

    def _is_next_in_order(self, rank: ModelRank, place: ModelStream, seq: int) -> bool:
        """A backend completes the collectives of a group in order."""
        return (
            place.kind is not StreamKind.COLLECTIVE or seq == 1 or rank.calls[place][seq - 2].done
        )

    def _apply_failures(self) -> None:
        """What deaths lead to."""
        dead = [r for r in self.ranks.values() if r.exit is not None]
        failed = [r for r in dead if r.exit is not None and r.exit.has_failed]
        for rank in self.ranks.values():
            if not rank.is_running:
                continue
            if self.peers_raise and rank.blocked_call is not None and rank.fails_at is None:
                on = self.find_unmet_ranks(rank.number, *rank.blocked_call)[0]
                if any(self.ranks[o].exit is not None for o in on):
                    rank.fails_at = self.now + 0.2 + 0.3 * self._rng.random()
            if rank.fails_at is not None and self.now >= rank.fails_at:
                self.end_process(rank, EndProcess(status=1, exception_type="RuntimeError"))
            elif (
                self.launcher_kills
                and failed
                and self.now >= min(r.exited_at for r in failed) + 1.0
            ):
                self.end_process(rank, EndProcess(signal=int(signal.SIGTERM)))

    # -- the truth
    # ---------------------------------------------------------------------------------------------------------

    def find_unmet_ranks(self, rank: int, stream: ModelStream, seq: int) -> tuple[set[int], bool]:
        """The ranks without which this call cannot complete, and whether any one of them would do."""
        if stream.kind in (StreamKind.SEND, StreamKind.RECV):
            return self._find_unmet_peer(rank, stream, seq)
        members = set(stream.group.ranks)
        made = self.ranks[rank].calls[stream][seq - 1].signature
        if stream.kind is StreamKind.SETUP:
            concerned = _setup_members(made)
            members = members if concerned is None else concerned if rank in concerned else set()
        else:
            members = _needed_members(made, stream.group, rank, self.eager)
        late = set()
        for member in members - {rank}:
            calls = self.ranks[member].calls.get(stream, []) if member in self.ranks else []
            theirs = calls[seq - 1] if len(calls) >= seq else None
            gone = theirs is not None and not theirs.done and not self.ranks[member].is_running
            if (
                theirs is None
                or gone
                or (self.mismatch_hangs and theirs.signature.agree != made.agree)
            ):
                late.add(member)
        return late, False

    def _find_unmet_peer(self, rank: int, stream: ModelStream, seq: int) -> tuple[set[int], bool]:
        group, tag = stream.group, stream.tag
        if stream.kind is StreamKind.SEND:
            assert stream.peer is not None
            if self.eager:
                return set(), False
            taken = self._list_calls(stream.peer, ModelStream(StreamKind.RECV, group, rank, tag))
            anybody = len(
                self._list_calls(stream.peer, ModelStream(StreamKind.RECV, group, -1, tag))
            )
            mine = self.ranks[rank].calls[stream][seq - 1].order
            ahead = sum(
                m.order < mine for _, m in self._iter_sent_messages(stream.peer, group, tag)
            )
            return (set() if len(taken) >= seq or ahead < anybody else {stream.peer}), False
        if stream.peer == -1:
            enough = len(list(self._iter_sent_messages(rank, group, tag))) >= seq
            return (set() if enough else set(group.ranks) - {rank}), True
        sent = self._list_calls(
            stream.peer if stream.peer is not None else -1,
            ModelStream(StreamKind.SEND, group, rank, tag),
        )
        return (set() if len(sent) >= seq else {stream.peer or 0}), False

    def _list_calls(self, rank: int, place: ModelStream) -> list[ModelCall]:
        return self.ranks[rank].calls.get(place, []) if rank in self.ranks else []

    def _iter_sent_messages(
        self, to: int, group: Group, tag: int | None
    ) -> Iterator[tuple[int, ModelCall]]:
        for rank in self.ranks:
            for made in self._list_calls(rank, ModelStream(StreamKind.SEND, group, to, tag)):
                yield rank, made

    def find_needed_ranks(self) -> dict[int, tuple[set[int], bool]]:
        """Per rank whose thread is blocked: whom it waits for, and whether any one of them would
        do.
        """
        return {
            r.number: self.find_unmet_ranks(r.number, *r.blocked_call)
            for r in self.ranks.values()
            if r.is_running and r.blocked_call is not None
        }

    def is_settled(self) -> bool:
        """Nothing will ever happen again by itself."""
        return all(
            not r.is_running
            or r.blocked_call is not None
            or (r.work is not None and r.busy_until == FOREVER_S)
            or r.next_instruction >= len(r.program)
            for r in self.ranks.values()
        ) and not any(r.fails_at is not None and r.is_running for r in self.ranks.values())

    # -- what can be seen of it
    # --------------------------------------------------------------------------------------------

    def make_stack(self, rank: int) -> ThreadStack:
        """The main thread's, as py-spy shows it."""
        held = self.ranks[rank]
        user = Frame(function="train", file="/home/me/train.py", line=20, text="loss = step(batch)")
        if held.blocked_call is not None:
            place, seq = held.blocked_call
            wait = Frame(
                function="wait" if held.waiting else held.calls[place][seq - 1].signature.op,
                file=_TORCH_FILE,
                line=9,
            )
            return ThreadStack(thread="MainThread", main=True, frames=(wait, user))
        turn = int(self.now * 10) % 7 if held.work is not None and held.work.busy else 0
        inner = Frame(
            function=f"work{turn}",
            file="/home/me/data.py",
            line=30 + turn,
            text="batch = queue.get()",
        )
        return ThreadStack(thread="MainThread", main=True, frames=(inner, user))

    def list_recorded_calls(self, rank: int, stream: ModelStream, first: int = 1) -> list[Call]:
        site = Site(file="/home/me/train.py", line=20, function="train")
        return [
            Call(
                seq=seq, signature=m.signature, site=site, chain=m.chain, entered_s=self.now - m.entered_at, blocking=m.blocking,
                duration_s=0.01 if m.done else None,
            )
            for seq, m in enumerate(self.ranks[rank].calls[stream], 1)
            if seq >= first
        ]  # fmt: skip


def _setup_members(made: Signature) -> set[int] | None:
    return None if made.detail is None else set(unpack_ranks(made.detail.removeprefix("ranks=")))


def _needed_members(made: Signature, group: Group, rank: int, eager: bool) -> set[int]:
    """The members without which a collective does not end on ``rank``."""
    root = None if made.root is None else group.ranks[made.root % len(group.ranks)]
    if made.op in ("broadcast", "scatter"):
        if rank != root:
            return {root} if root is not None else set()
        return set() if eager else set(group.ranks)
    if made.op in ("reduce", "gather") and rank != root:
        return set() if eager or root is None else {root}
    return set(group.ranks)


def remove_event(program: list[Instruction], event: int) -> list[Instruction]:
    return [i for i in program if not (isinstance(i, (EnterCall, AwaitEvent)) and i.event == event)]


def replace_signature(program: list[Instruction], event: int, made: Signature) -> list[Instruction]:
    return [
        replace(i, signature=made) if isinstance(i, EnterCall) and i.event == event else i
        for i in program
    ]
