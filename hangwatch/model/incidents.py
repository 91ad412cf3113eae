"""Incidents: a verdict over time, with the evidence that was gathered for it, and what
``--on-hang abort`` does about it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from .calls import IntLists
from .hardware import HostObservation, MissingEvidence
from .kernels import RankKernels
from .ranks import ExceptionInfo, Frames, Ranks
from .verdicts import DevicePosition, Verdict

IncidentStatus = Literal["open", "resolved"]


class Resolution(str, enum.Enum):
    """Why an incident was resolved. CONTRACT: each name is public."""

    PROGRESS = "progress"  # the job made progress
    ENDED = "ended"  # the job ended
    RESTARTED = "restarted"  # a later attempt of the job runs
    NOT_REPORTING = "not_reporting"  # no node agent reports the job any more
    # The job ended after hangwatch had aborted ranks of it, and no later attempt followed soon.
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """The process of a rank when it was last reported. ``state`` is the letter of /proc/PID/stat."""

    rank: int
    host: str | None = None
    pid: int | None = None
    state: str = "?"
    exit_status: int | None = None
    signal: int | None = None
    exception: ExceptionInfo | None = None
    handling: ExceptionInfo | None = None  # the exception that a thread is handling while it waits
    flight_file: FlightFile | None = None  # written by its watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStack:
    """One stack, innermost frame first, or the ``error`` why there is none.

    All of ``ranks`` have it.
    """

    ranks: Ranks
    thread: str | None = None
    source: str
    taken_at: datetime
    frames: Frames = ()
    native: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Verdict):
    """One root cause, regardless of how many ranks wait.

    It is a verdict over time, whose summary and culprits become more precise while evidence is
    collected.
    """

    id: str
    job: str
    attempt: int
    status: IncidentStatus
    onset_at: datetime
    opened_at: datetime
    resolved_at: datetime | None = None
    resolution: Resolution | None = None
    processes: tuple[ProcessSnapshot, ...] = ()
    stacks: tuple[MergedStack, ...] = ()
    kernels: tuple[RankKernels, ...] = ()
    device: tuple[DevicePosition, ...] = ()  # the devices of the members of its groups
    hardware: tuple[HostObservation, ...] = ()  # the observations that may explain it
    hardware_missing: tuple[MissingEvidence, ...] = ()
    recovery: Recovery | None = None  # None unless --on-hang abort applies

    @property
    def is_open(self) -> bool:
        return self.status == "open"


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
    ranks: Ranks
    number: int  # counts the recoveries of the job, from 1
    limit: int
    planned_at: datetime
    due_at: datetime  # the earliest time; later while a rank still moves or does not report
    announced_at: datetime | None = None
    done_at: datetime | None = None
    why: str = ""  # why it is withheld
    aborts: tuple[RankAbort, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedCall:
    """The first collective of a group that had not completed when the file was written."""

    group: str
    desc: str = ""
    seq: int
    op: str
    shapes: IntLists = ()  # the shapes of the inputs
    state: str = ""  # torch's word: "scheduled" or "started"
    waited_s: float  # the time from its call to the writing of the file
    timeout_s: float | None = None

    @property
    def has_timed_out(self) -> bool:
        return self.timeout_s is not None and self.waited_s >= self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFile:
    """The Flight Recorder file of one rank, on the rank's host, and its unfinished calls. torch's watchdog
    writes it when a collective times out. ``error`` is the reason why it could not be read.
    """

    path: str
    calls: tuple[UnfinishedCall, ...] = ()  # the one that waited longest is first
    error: str | None = None
