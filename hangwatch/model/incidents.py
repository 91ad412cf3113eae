"""Incidents: a verdict over time, with the evidence that was gathered for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from .calls import Site
from .device import DevicePosition
from .flight_dumps import FlightFile
from .groups import Group
from .hardware import HostObservation, MissingEvidence
from .kind_spec import Severity
from .kinds import VerdictKind
from .ranks import ExceptionInfo
from .recoveries import Recovery
from .threads import Frame
from .verdicts import Verdict

IncidentStatus = Literal["open", "resolved"]


class Resolution(str, enum.Enum):
    """Why an incident was resolved. CONTRACT: each name is public."""

    PROGRESS = "progress"  # the job made progress
    ENDED = "ended"  # the job ended
    RESTARTED = "restarted"  # a later attempt of the job runs
    UNHEARD = "unheard"  # no node agent reports the job any more
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
    flight_file: FlightFile | None = None  # written by its watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStack:
    """One stack that ``ranks`` have in common, innermost frame first, or the ``error`` that
    explains why there is none.
    """

    ranks: tuple[int, ...]
    thread: str | None = None
    source: str
    taken_at: datetime
    frames: tuple[Frame, ...] = ()
    native: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One root cause, however many ranks wait. The verdict's summary and culprits become more
    precise while evidence is collected.
    """

    id: str
    job: str
    attempt: int
    status: IncidentStatus
    onset_at: datetime
    opened_at: datetime
    resolved_at: datetime | None = None
    resolution: Resolution | None = None
    verdict: Verdict
    processes: tuple[ProcessSnapshot, ...] = ()
    stacks: tuple[MergedStack, ...] = ()
    device: tuple[DevicePosition, ...] = ()  # of the members of its groups
    hardware: tuple[HostObservation, ...] = ()  # of the hosts that may explain it
    hardware_missing: tuple[MissingEvidence, ...] = ()
    recovery: Recovery | None = None  # None unless --on-hang abort applies

    @property
    def is_open(self) -> bool:
        return self.status == "open"

    @property
    def kind(self) -> VerdictKind:
        return self.verdict.kind

    @property
    def severity(self) -> Severity:
        return self.verdict.severity

    @property
    def summary(self) -> str:
        return self.verdict.summary

    @property
    def advice(self) -> str:
        return self.verdict.advice

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.verdict.culprits

    @property
    def waiting(self) -> tuple[int, ...]:
        return self.verdict.waiting

    @property
    def group(self) -> Group | None:
        return self.verdict.group

    @property
    def seq(self) -> int | None:
        return self.verdict.seq

    @property
    def site(self) -> Site | None:
        return self.verdict.site
