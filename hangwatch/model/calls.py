"""Recorded calls: signature, call site and position in a stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

Hash64 = Annotated[int, "a hash of 64 bits"]


class StreamKind(str, enum.Enum):
    """The kind of a stream of calls, which determines the calls it must match."""

    COLLECTIVE = "collective"  # the calls of one process group, equal on every member
    # init_process_group, new_group, destroy_process_group: equal on every rank of a world.
    SETUP = "setup"
    SEND = "send"  # to one peer with one tag; each send matches one receive of the peer
    RECV = "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A location in source code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The arguments of a call that may differ from those of another rank.

    ``shapes`` are those of the tensors named in `hangwatch.model.operators`; a long list is
    truncated and ends with an empty shape. ``agree`` is the 64-bit hash of the arguments that must
    be equal on every rank of the group.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None
    # Elements (sent to, received from) each member; a single number means an even split.
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    # Anything else that must be equal, such as the ranks of a group that is being created.
    detail: str | None = None
    numel: int = 0
    agree: Hash64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call. ``seq`` is its sequence number, from 1, in its stream on one rank."""

    seq: int
    signature: Signature
    site: Site | None = None
    chain: Hash64 = 0  # running hash of the stream after this call; 0 if unknown
    entered_s: float = 0.0  # its age in seconds when it was read
    duration_s: float | None = None  # None while it is not known to be complete
    blocking: bool | None = None  # the calling thread waits in it; None if torch does not say
    thread: int = 0  # the operating system's id of the thread that made it
    peer: int | None = None  # of a point-to-point call: the peer's global rank
    raised: bool = False  # it raised an exception
    # A call that raised an exception before it communicated, and would have had this number.
    preceded_by: Call | None = None
