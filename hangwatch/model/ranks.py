"""What a rank is doing, how far its process has come, and how it ended."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .calls import Site


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitInfo:
    """How a process ended. ``exit_status`` and ``signal`` are both None where nobody could tell."""

    exit_status: int | None = None
    signal: int | None = None

    @property
    def has_failed(self) -> bool:
        return bool(self.signal) or bool(self.exit_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionInfo:
    """An exception that ended a rank's Python, or would have."""

    type: str
    message: str
    site: Site | None = None


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them: ``0, 2-3``."""
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in find_runs(sorted(set(ranks))))


def find_runs(sorted_ranks: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each unbroken run in an ascending list."""
    found: list[tuple[int, int]] = []
    for rank in sorted_ranks:
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found
