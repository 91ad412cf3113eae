"""Recorded calls: signature, call site and position in a stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StreamKind(str, enum.Enum):
    """What orders a sequence of calls."""

    COLLECTIVE = "collective"  # the calls of one process group: the same on every member
    # init_process_group, new_group, destroy_process_group: the same on every rank of a world
    SETUP = "setup"
    SEND = "send"  # to one peer with one tag: the peer's receives, one for one
    RECV = "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in somebody's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One call's arguments, as far as they can part from another rank's.

    ``shapes`` are those of the tensors that the call is about (see `hangwatch.model.operators`); a
    long list is cut and ends with an empty shape. ``agree`` is the 64-bit hash of what must be
    equal on every rank of the group.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = (
        None  # (sent to, received from) each member, in elements; one number: evenly
    )
    detail: str | None = (
        None  # anything else that must agree, such as the ranks of a group that is being created
    )
    numel: int = 0
    agree: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call: the ``seq``-th (from 1) of its sequence on one rank."""

    seq: int
    signature: Signature
    site: Site | None = None
    chain: int = 0  # running hash of the sequence after this call; 0 where unknown
    entered_s: float = 0.0  # seconds since it was entered, when it was read
    duration_s: float | None = None  # None while it is not known to be complete
    blocking: bool | None = (
        None  # the calling thread waits inside it; None where torch does not say
    )
    thread: int = 0
    peer: int | None = None  # the other end's global rank, of a point-to-point call
    raised: bool = False  # it ended by an exception
