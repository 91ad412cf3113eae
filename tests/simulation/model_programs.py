"""The programs of a modelled job's ranks: their instructions, and the signatures of their calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from hangwatch.model.calls import Signature, StreamKind, with_agreement_hash
from hangwatch.model.groups import Group, pack_ranks
from hangwatch.model.operators import OPERATIONS, MustMatch
from hangwatch.model.ranks import Lifecycle

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


def remove_event(program: list[Instruction], event: int) -> list[Instruction]:
    return [i for i in program if not (isinstance(i, (EnterCall, AwaitEvent)) and i.event == event)]


def replace_signature(program: list[Instruction], event: int, made: Signature) -> list[Instruction]:
    return [
        replace(i, signature=made) if isinstance(i, EnterCall) and i.event == event else i
        for i in program
    ]
