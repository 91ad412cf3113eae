"""The ranks of a modelled job: where each one is in its program, and the calls that it made."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.calls import Signature
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle

from .model_programs import Instruction, ModelStream, RunOwnCode


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
