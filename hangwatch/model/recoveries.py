"""What ``--on-hang abort`` does about an incident."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

RecoveryState = Literal["planned", "withheld", "announced", "ordered", "done"]
RecoveryScope = Literal["culprits", "job"]
# gone: the process had already ended. left: it was sent no signal, because the job made progress
# or was no longer reported.
AbortResult = Literal["ordered", "ended", "gone", "left", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAbort:
    """The order to end one rank, and its result."""

    rank: int
    host: str
    pid: int
    ordered_at: datetime
    result: AbortResult = "ordered"
    ended_at: datetime | None = None
    signal: int | None = None  # the signal that was sent
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The plan to end ranks for an incident, and how far it was carried out."""

    state: RecoveryState
    scope: RecoveryScope
    ranks: tuple[int, ...]
    number: int  # its number among the recoveries of the job, from 1
    limit: int
    planned_at: datetime
    due_at: datetime  # the earliest time; later while a rank still moves or does not report
    announced_at: datetime | None = None
    done_at: datetime | None = None
    why: str = ""  # why it is withheld
    ends: tuple[RankAbort, ...] = ()
