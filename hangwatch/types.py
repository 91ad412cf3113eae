"""The shared language: what a rank, a call, a process group, a wait and a verdict are.

Everything here is plain data. The names are the field's own; ``../README.md`` shows how they fit together.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class RankState(str, enum.Enum):
    """What a rank is doing, as shown to people. The order is that of concern, the worst last."""

    RUNNING = "running"
    EXITED = "exited"
    STARTING = "starting"  # before its process group exists
    WAITING = "waiting"  # inside a call that others have not entered or finished
    SLOW = "slow"
    MISSING = "missing"  # expected by WORLD_SIZE, never heard of
    LOST = "lost"
    FROZEN = "frozen"
    STALLED = "stalled"
    DEAD = "dead"


class Lifecycle(enum.IntEnum):
    """How far a training process has come, as it says itself in its ring."""

    ALIVE = 0  # known from /proc only: it has not imported torch
    STARTING = 1  # torch is imported, init_process_group not yet called
    INITIALISING = 2  # inside init_process_group
    INITIALISED = 3
    DESTROYED = 4  # destroy_process_group has returned
    EXITING = 5  # the interpreter runs its exit handlers


class Kind(str, enum.Enum):
    """The kinds of verdict. CONTRACT: each name is public."""

    MISMATCH = "mismatch"
    GROUP_MISMATCH = "group_mismatch"
    DEADLOCK = "deadlock"
    DEAD_RANK = "dead_rank"
    EXITED_RANK = "exited_rank"
    FROZEN_RANK = "frozen_rank"
    LOST_NODE = "lost_node"
    STARTUP_STALL = "startup_stall"
    MISSING_RANK = "missing_rank"
    NO_PROGRESS = "no_progress"
    SLOW_RANK = "slow_rank"
    CONCURRENT_USE = "concurrent_use"
    REPLICA_DIVERGENCE = "replica_divergence"
    NONFINITE = "nonfinite"


class Severity(str, enum.Enum):
    WARNING = "warning"
    ALERT = "alert"


class Resolution(str, enum.Enum):
    """Why an incident is over. CONTRACT: each name is public."""

    PROGRESS = "progress"  # the job went on
    ENDED = "ended"  # the job did
    RESTARTED = "restarted"  # a later attempt of the job runs
    UNHEARD = "unheard"  # nobody has spoken for the job any more
    ABORTED = "aborted"  # the job ended after hangwatch had ended ranks of it, and no later attempt came soon


class SequenceKind(str, enum.Enum):
    """What orders a sequence of calls."""

    COLLECTIVE = "collective"  # the calls of one process group: the same on every member
    SETUP = "setup"  # init_process_group, new_group, destroy_process_group: the same on every rank of a world
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

    ``shapes`` are those of the tensors that the call is about (see `hangwatch.operators`); a long list is cut and ends
    with an empty shape. ``agree`` is the 64-bit hash of what must be equal on every rank of the group.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (sent to, received from) each member, in elements; one number: evenly
    detail: str | None = None  # anything else that must agree, such as the ranks of a group that is being created
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
    blocking: bool | None = None  # the calling thread waits inside it; None where torch does not say
    thread: int = 0
    peer: int | None = None  # the other end's global rank, of a point-to-point call
    raised: bool = False  # it ended by an exception


GroupKey = tuple[int, str, tuple[int, ...], int]
DECLARED = "declared"  # the backend of a group that only hangwatch.collective knows of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group: a torch name is only unique together with its members and the world that it was made in.

    Each init_process_group makes a world and starts torch's names anew. ``world`` is its size and ``generation`` counts those of
    that size: some ranks may have been in worlds of another size meanwhile, others not.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str = ""
    generation: int = 1
    world: int = 0  # 0 where it is not told

    @property
    def key(self) -> GroupKey:
        return (self.generation, self.name, self.ranks, self.world)

    @property
    def declared(self) -> bool:
        return self.backend == DECLARED


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    function: str
    file: str
    line: int
    text: str | None = None  # the source line, where the node agent could read it; told for the innermost frames
    handler: str | None = None  # the ``except`` line of the exception handler that this line is in, likewise
    polls: str | None = None  # the ``while`` line of a loop around it that goes on until a Work is complete, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread's stack, innermost frame first."""

    thread: str
    frames: tuple[Frame, ...]
    main: bool = False
    active: bool | None = None  # on the CPU when sampled; None where the source cannot tell
    holds_gil: bool | None = None
    pid: int | None = None  # of a child process that the rank waits for; None: the rank's own thread
    error: str | None = None  # why there are no frames of that child, with the remedy
    tid: int | None = None  # the system's number of it
    cpu_s: float | None = None  # CPU time that it has used; of a child that the rank started itself, with all that it started in turn
    ready_s: float | None = None  # for which it was ready to run and had no CPU, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended. ``exit_status`` and ``signal`` are both None where nobody could tell."""

    exit_status: int | None = None
    signal: int | None = None

    @property
    def failed(self) -> bool:
        return bool(self.signal) or bool(self.exit_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that ended a rank's Python, or would have."""

    type: str
    message: str
    site: Site | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Rank ``rank`` cannot go on before ``on`` enters call ``seq`` of ``group``."""

    rank: int
    on: int
    group: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallClass:
    """The ranks that made equal calls, side by side with those that made another."""

    ranks: tuple[int, ...]
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """One row of two sequences side by side: a call of each, None where one side has nothing that corresponds."""

    calls: tuple[Call | None, Call | None]
    omitted: int = 0  # rows left out before this one, in which both sides agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the calls of two sides of a group part, the others' first and the culprits' second."""

    group: Group
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    rows: tuple[Aligned, ...]
    since_seq: int | None = None  # the first call that only one side made, where that is certain
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the diagnosis claims. ``due`` is False while it is only suspected, so that evidence is gathered first."""

    kind: Kind
    severity: Severity
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    group: Group | None = None
    seq: int | None = None
    fields: tuple[str, ...] = ()
    calls: tuple[CallClass, ...] = ()
    waits: tuple[Wait, ...] = ()
    since: float = 0.0  # when it began, on the caller's monotonic clock, in seconds
    due: bool = True
    summary: str = ""
    advice: str = ""
    site: Site | None = None  # the culprit's own line, where it is known
    divergence: Divergence | None = None


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as people write them: ``0, 2-3``."""
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs(sorted(set(ranks))))


def runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each unbroken run in an ascending list."""
    found: list[tuple[int, int]] = []
    for rank in ordered:
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def pack_ranks(ranks: Sequence[int]) -> str:
    """Members in their order as ``first-last`` or ``first-last:step`` runs, so that 16,384 of them take a few bytes.

    >>> pack_ranks([0, 8, 16, 24, 3])
    '0-24:8,3'
    """
    parts: list[str] = []
    i = 0
    while i < len(ranks):
        j = i + 1
        if j < len(ranks):
            step = ranks[j] - ranks[i]
            while j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == step:
                j += 1
            if step > 0 and (j - i >= 2 or step == 1):
                parts.append(f"{ranks[i]}-{ranks[j]}" + (f":{step}" if step > 1 else ""))
                i = j + 1
                continue
        parts.append(str(ranks[i]))
        i += 1
    return ",".join(parts)


class Members(tuple[int, ...]):
    """Ranks of a group, hashed once: else each look-up of a group would take longer the more members it has."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@functools.lru_cache(maxsize=256)
def unpack_ranks(text: str, limit: int = 1 << 20) -> tuple[int, ...]:
    """The inverse of `pack_ranks`. Raises ValueError for anything else, or for more than ``limit`` ranks.

    Each member of a group tells of all: without a memory, 16,384 ranks would be 16,384 tuples of so many.
    """
    members: list[int] = []
    for part in text.split(",") if text else []:
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        chunk = range(int(first), int(last) + 1, int(step or 1)) if dash else range(int(first), int(first) + 1)
        if len(members) + (chunk.stop - chunk.start) // chunk.step > limit:  # len() overflows on what anybody may send
            raise ValueError(f"more than {limit} ranks")
        members.extend(chunk)
    return Members(members)


# Node agents and the server go by the same.
STANDING = 1.0  # seconds: a younger wait is everyday life
STOPPED = frozenset("Tt")
STILL = STOPPED | {"D"}  # states in which a thread runs nothing
FROZEN_AFTER = 3.0  # seconds


@dataclass(slots=True, kw_only=True)
class Limits:
    """When a wait becomes a verdict, in seconds. One place for what the server's settings and the diagnosis share."""

    stall_after: float = 60.0
    slow_limit: float = 360.0
    settle: float = 1.5  # after a first death, others' last words may still be on their way
    heard_every: float = 0.5  # of a host; the more of them there are the longer, so that one server can hear them all

    @property
    def lost_after(self) -> float:
        """Without a word from a node agent, when what it said before is no longer taken for the present."""
        return max(min(10.0, self.stall_after / 2), 2 * self.heard_every)
