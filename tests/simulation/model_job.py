"""A modelled distributed job: executes the programs of its ranks, completes their calls as a backend
does, and applies faults. Time advances in steps of a tenth of a second.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from random import Random

from hangwatch.model.calls import Call, Site, StreamKind, extend_chain
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, ThreadStack

from .model_completion import CompletionModel
from .model_programs import (
    FOREVER_S,
    AwaitEvent,
    BeginLifecycle,
    EndProcess,
    EnterCall,
    Instruction,
    ModelStream,
    RunOwnCode,
    StopProcess,
)
from .model_ranks import ModelCall, ModelRank

STEP_S = 0.1
_TORCH_FILE = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


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
        """For each rank whose thread is blocked: the ranks it waits for, and whether any single one of
        them is sufficient.
        """
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
