"""A modelled distributed job: executes the programs of its ranks, completes their calls as a backend
does, and applies faults. Time advances in steps of a tenth of a second.

`CompletionModel` knows what really blocks each rank, with which a diagnosis made from heartbeats is
compared.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from hangwatch.model.calls import (
    Call,
    Signature,
    Site,
    StreamKind,
    extend_chain,
    with_agreement_hash,
)
from hangwatch.model.groups import Group, pack_ranks, unpack_ranks
from hangwatch.model.operators import OPERATIONS, MustMatch
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle, ThreadStack

STEP_S = 0.1
_TORCH_FILE = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
FOREVER_S = float("inf")
_MUST_MATCH = {op: spec.must_match for op, spec in OPERATIONS.items()}


@dataclass(frozen=True, slots=True)
class ModelStream:
    """One call stream: of a group, a channel or the set-up."""

    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class EnterCall:
    """A rank makes a call; ``event`` names it for a later `AwaitEvent`."""

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
    """The signature that the recorder makes for this operation."""
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


def remove_event(program: list[Instruction], event: int) -> list[Instruction]:
    return [i for i in program if not (isinstance(i, (EnterCall, AwaitEvent)) and i.event == event)]


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
    waiting: bool = False  # in `AwaitEvent`, rather than in the call itself
    blocked_since: float = 0.0
    lifecycle: Lifecycle = Lifecycle.STARTING
    calls: dict[ModelStream, list[ModelCall]] = field(default_factory=dict)
    # Calls that are not complete, each with its number in the stream.
    open_calls: list[tuple[ModelStream, int]] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class CompletionModel:
    """``eager``: a send, and a root's part of a one-sided collective, completes immediately.
    ``mismatch_hangs``: a collective completes only if all members make the same call.
    """

    ranks: Mapping[int, ModelRank]
    eager: bool
    mismatch_hangs: bool

    def find_unmet_ranks(self, rank: int, stream: ModelStream, seq: int) -> tuple[set[int], bool]:
        """The ranks without which this call cannot complete, and whether a single one of
        them is sufficient.
        """
        if stream.kind in (StreamKind.SEND, StreamKind.RECV):
            return self._find_unmet_peer(rank, stream, seq)
        members = set(stream.group.ranks)
        signature = self.ranks[rank].calls[stream][seq - 1].signature
        if stream.kind is StreamKind.SETUP:
            concerned = _setup_members(signature)
            members = members if concerned is None else concerned if rank in concerned else set()
        else:
            members = _needed_members(signature, stream.group, rank, self.eager)
        unmet = set()
        for member in members - {rank}:
            calls = self.ranks[member].calls.get(stream, []) if member in self.ranks else []
            other_call = calls[seq - 1] if len(calls) >= seq else None
            has_ended = (
                other_call is not None and not other_call.done and not self.ranks[member].is_running
            )
            if (
                other_call is None
                or has_ended
                or (self.mismatch_hangs and other_call.signature.agree != signature.agree)
            ):
                unmet.add(member)
        return unmet, False

    def _find_unmet_peer(self, rank: int, stream: ModelStream, seq: int) -> tuple[set[int], bool]:
        group, tag = stream.group, stream.tag
        if stream.kind is StreamKind.SEND:
            assert stream.peer is not None
            if self.eager:
                return set(), False
            receives = self._list_calls(stream.peer, ModelStream(StreamKind.RECV, group, rank, tag))
            any_source_count = len(
                self._list_calls(stream.peer, ModelStream(StreamKind.RECV, group, -1, tag))
            )
            own_order = self.ranks[rank].calls[stream][seq - 1].order
            earlier_count = sum(
                message.order < own_order
                for _, message in self._iter_sent_messages(stream.peer, group, tag)
            )
            return (
                set() if len(receives) >= seq or earlier_count < any_source_count else {stream.peer}
            ), False
        if stream.peer == -1:
            has_message = len(list(self._iter_sent_messages(rank, group, tag))) >= seq
            return (set() if has_message else set(group.ranks) - {rank}), True
        sends = self._list_calls(
            stream.peer if stream.peer is not None else -1,
            ModelStream(StreamKind.SEND, group, rank, tag),
        )
        return (set() if len(sends) >= seq else {stream.peer or 0}), False

    def _list_calls(self, rank: int, stream: ModelStream) -> list[ModelCall]:
        return self.ranks[rank].calls.get(stream, []) if rank in self.ranks else []

    def _iter_sent_messages(
        self, to: int, group: Group, tag: int | None
    ) -> Iterator[tuple[int, ModelCall]]:
        for rank in self.ranks:
            for message in self._list_calls(rank, ModelStream(StreamKind.SEND, group, to, tag)):
                yield rank, message


def _setup_members(made: Signature) -> set[int] | None:
    return None if made.detail is None else set(unpack_ranks(made.detail.removeprefix("ranks=")))


def _needed_members(made: Signature, group: Group, rank: int, eager: bool) -> set[int]:
    """The members without which a collective does not complete on ``rank``."""
    root = None if made.root is None else group.ranks[made.root % len(group.ranks)]
    if made.op in ("broadcast", "scatter"):
        if rank != root:
            return {root} if root is not None else set()
        return set() if eager else set(group.ranks)
    if made.op in ("reduce", "gather") and rank != root:
        return set() if eager or root is None else {root}
    return set(group.ranks)


@dataclass(slots=True)
class ModelJob:
    """``eager`` and ``mismatch_hangs`` are those of `CompletionModel`. ``visible``: making calls uses
    CPU time.
    """

    programs: dict[int, list[Instruction]]
    hosts: dict[int, str]
    seed: int = 0
    eager: bool = True
    visible: bool = True
    mismatch_hangs: bool = True
    peers_raise: bool = False  # ranks that wait for a dead one fail soon
    launcher_kills: bool = False  # a second after the first failure
    nothing_moves: bool = False  # from now on no call completes
    now: float = 0.0
    ranks: dict[int, ModelRank] = field(default_factory=dict)
    _rng: Random = field(init=False)
    _completion: CompletionModel = field(init=False)
    _call_count: int = 0

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self.ranks = {r: ModelRank(r, self.hosts[r], list(p)) for r, p in self.programs.items()}
        self._completion = CompletionModel(
            self.ranks, eager=self.eager, mismatch_hangs=self.mismatch_hangs
        )

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
            stream, seq = rank.blocked_call
            if not rank.calls[stream][seq - 1].done:
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

    def _enter_call(self, rank: ModelRank, instruction: EnterCall) -> None:
        calls = rank.calls.setdefault(instruction.stream, [])
        before = calls[-1].chain if calls else 0
        self._call_count += 1
        calls.append(
            ModelCall(
                instruction.signature,
                self.now,
                instruction.event,
                instruction.blocking,
                self._call_count,
                extend_chain(before, instruction.signature.agree),
            )
        )
        rank.open_calls.append((instruction.stream, len(calls)))
        if not instruction.free:
            rank.blocked_call, rank.waiting, rank.blocked_since = (
                (instruction.stream, len(calls)),
                instruction.blocking is None,
                self.now,
            )

    def _await_event(self, rank: ModelRank, event: int) -> None:
        for stream, calls in rank.calls.items():
            for seq, call in enumerate(calls, 1):
                if call.event == event and not call.done:
                    rank.blocked_call, rank.waiting, rank.blocked_since = (
                        (stream, seq),
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
        is_any_completed = False
        if self.nothing_moves:
            return False
        for rank in self.ranks.values():
            completed = [
                position
                for position in rank.open_calls
                if rank.is_running
                and self._is_next_in_order(rank, *position)
                and not self._completion.find_unmet_ranks(rank.number, *position)[0]
            ]
            for stream, seq in completed:
                rank.calls[stream][seq - 1].done = is_any_completed = True
                rank.open_calls.remove((stream, seq))
        return is_any_completed

    def _is_next_in_order(self, rank: ModelRank, stream: ModelStream, seq: int) -> bool:
        """A backend completes the collectives of a group in order."""
        return (
            stream.kind is not StreamKind.COLLECTIVE or seq == 1 or rank.calls[stream][seq - 2].done
        )

    def _apply_failures(self) -> None:
        """Ends the ranks that fail because of ended ones."""
        dead = [r for r in self.ranks.values() if r.exit is not None]
        failed = [r for r in dead if r.exit is not None and r.exit.has_failed]
        for rank in self.ranks.values():
            if not rank.is_running:
                continue
            if self.peers_raise and rank.blocked_call is not None and rank.fails_at is None:
                on = self._completion.find_unmet_ranks(rank.number, *rank.blocked_call)[0]
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

    def find_needed_ranks(self) -> dict[int, tuple[set[int], bool]]:
        """The ranks that each blocked rank waits for, and whether any one of them is sufficient."""
        return {
            r.number: self._completion.find_unmet_ranks(r.number, *r.blocked_call)
            for r in self.ranks.values()
            if r.is_running and r.blocked_call is not None
        }

    def is_settled(self) -> bool:
        """Whether the job's state can no longer change."""
        return all(
            not r.is_running
            or r.blocked_call is not None
            or (r.work is not None and r.busy_until == FOREVER_S)
            or r.next_instruction >= len(r.program)
            for r in self.ranks.values()
        ) and not any(r.fails_at is not None and r.is_running for r in self.ranks.values())

    # What a node agent can observe.

    def make_stack(self, rank: int) -> ThreadStack:
        """The main thread's stack, as py-spy shows it."""
        model_rank = self.ranks[rank]
        user = Frame(function="train", file="/home/me/train.py", line=20, text="loss = step(batch)")
        if model_rank.blocked_call is not None:
            stream, seq = model_rank.blocked_call
            wait = Frame(
                function="wait"
                if model_rank.waiting
                else model_rank.calls[stream][seq - 1].signature.op,
                file=_TORCH_FILE,
                line=9,
            )
            return ThreadStack(thread="MainThread", main=True, frames=(wait, user))
        turn = int(self.now * 10) % 7 if model_rank.work is not None and model_rank.work.busy else 0
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
