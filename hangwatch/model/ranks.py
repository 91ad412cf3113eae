"""Ranks: the states of a rank, the lifecycle of its process and how it exited, the stacks of its
threads, and lists of ranks as text.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .bounds import Hash64
from .calls import Site

Ranks = tuple[int, ...]
Run = tuple[int, int]  # the first and the last of consecutive ranks
Place = tuple[str, str, int]  # a function, its file and a line

RECORDER_THREAD_NAME = "hangwatch"  # hangwatch's own thread in the training process
_RANGE_PATTERN = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")  # 4, or 3-5


class AttemptKey(NamedTuple):
    """Identifies one attempt: a job's name and the attempt's number, from 0."""

    job: str
    number: int


class RankState(str, enum.Enum):
    """The state of a rank, as shown to users, in order of increasing severity."""

    RUNNING = "running"
    EXITED = "exited"
    STARTING = "starting"  # the process group does not exist yet
    WAITING = "waiting"  # inside a call that others have not entered or finished
    SLOW = "slow"
    MISSING = "missing"  # expected by WORLD_SIZE, never reported
    LOST = "lost"
    FROZEN = "frozen"
    STALLED = "stalled"
    DEAD = "dead"


class Lifecycle(enum.IntEnum):
    """The lifecycle of a training process, as recorded in its ring."""

    ALIVE = 0  # known from /proc only: it has not imported torch
    STARTING = 1  # torch is imported, init_process_group not yet called
    INITIALISING = 2  # inside init_process_group
    INITIALISED = 3
    DESTROYED = 4  # destroy_process_group has returned
    EXITING = 5  # the interpreter is running its exit handlers


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitInfo:
    """How a process exited. ``exit_status`` and ``signal`` are both None if that is unknown."""

    exit_status: int | None = None
    signal: int | None = None

    @property
    def has_failed(self) -> bool:
        return bool(self.signal) or bool(self.exit_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionInfo:
    """An exception of a rank: the uncaught one that ended its program, or one that it is handling."""

    type: str
    message: str
    site: Site | None = None


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as sorted text with ranges: ``0, 2-3``. Numbers below zero are left out."""
    return format_runs(iter_runs(sorted({rank for rank in ranks if rank >= 0})))


def format_runs(runs: Iterable[Run]) -> str:
    """Runs as ``0, 2-3``."""
    texts = []
    for first, last in runs:
        texts.append(f"{first}" if first == last else f"{first}-{last}")
    return ", ".join(texts)


def iter_runs(sorted_ranks: Sequence[int]) -> Iterator[Run]:
    """The runs in an ascending list."""
    if not sorted_ranks:
        return
    first = last = sorted_ranks[0]
    for rank in sorted_ranks[1:]:
        if rank != last + 1:
            yield first, last
            first = rank
        last = rank
    yield first, last


def parse_rank_ranges(text: str) -> list[Run]:
    """The parts of a list such as ``0, 3-5``. Raises ValueError, whose message names
    the invalid part and shows what is expected.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE_PATTERN.fullmatch(part)
        shown = repr(part.strip()[:40])
        if match is None:
            raise ValueError(f"invalid rank {shown}: write ranks as 0,3-5")
        low = int(match[1])
        high = int(match[2] or low)
        if high < low:
            raise ValueError(f"invalid range {shown}: write it as {high}-{low}")
        ranges.append((low, high))
    return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    function: str
    file: str
    line: int
    # The next three are only set for the innermost frames, if the node agent can read the source.
    text: str | None = None  # the source line
    handler: str | None = None  # the ``except`` line of the enclosing exception handler
    polls: str | None = None  # the ``while`` line of an enclosing loop that waits for a Work

    @property
    def place(self) -> Place:
        return self.function, self.file, self.line


Frames = tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    """One thread's stack, innermost frame first. It has no ``slots``, so that what was found in it can be
    kept with it (`hangwatch.stacks.frames.remember_answer`).
    """

    thread: str
    frames: Frames
    main: bool = False
    active: bool | None = None  # whether it was on a CPU when sampled; None if unknown
    holds_gil: bool | None = None
    pid: int | None = None  # the child process that the rank waits for; None: the rank itself
    error: str | None = None  # why that child's frames are missing, with the remedy
    tid: int | None = None  # the operating system's thread id
    # CPU time used; for a direct child of the rank, including the child's descendants.
    cpu_s: float | None = None
    # Time ready to run but without a CPU, counted like `cpu_s`.
    ready_s: float | None = None
    # Bytes read, written, sent and received since some moment, counted like `cpu_s`; of the connections
    # of a rank, a thread has those that it waits for.
    moved_bytes: int | None = None
    # For a child: the ids of the rank's threads that wait for its end, or for what it has to write, read
    # or release.
    awaited_by: tuple[int, ...] = ()
    # 0 for the thread that made the process's newest call, 1 for the thread whose newest call was
    # the last one before that, and so on; None: no call by it is known.
    call_recency: int | None = None
    called_uids: tuple[int, ...] = ()  # the streams whose newest call it made
    # A hash of the lines and local variables at which it was in the GPU's driver each time it was read;
    # 0: it was elsewhere or moved; None: that was not examined.
    device_hold: Hash64 | None = None
