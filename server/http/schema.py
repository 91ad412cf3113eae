"""The HTTP schema of jobs, incidents and dumps: it validates requests, and describes responses in
``/openapi.json``.

The server's own model is in `hangwatch.model.incidents` and `server.core.job_views`. Responses are
encoded from their documents, and a test checks that these match the schema.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import AwareDatetime, ConfigDict, Field

from hangwatch.model.incidents import IncidentStatus, Resolution
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import RankState
from hangwatch.model.recoveries import AbortResult, RecoveryScope, RecoveryState

from ..core.api_model import ApiModel, Frame, GroupName
from ..core.job_views import JobState

T = TypeVar("T")


class Page(ApiModel, Generic[T]):
    """A page of a list; ``next`` is the URL of the next page."""

    items: list[T]
    next: str | None = None


class Site(ApiModel):
    file: str
    line: int
    function: str


class Stack(ApiModel):
    """One stack, innermost frame first, or the ``error`` why there is none."""

    ranks: list[int]
    thread: str | None = None
    source: str
    taken_at: AwareDatetime
    frames: list[Frame] = Field(default=[])
    native: bool = False
    error: str | None = None


class Exception_(ApiModel):
    model_config = ConfigDict(title="Exception", frozen=True)

    type: str
    message: str
    site: Site | None = None


class Process(ApiModel):
    rank: int
    host: str | None = None
    pid: int | None = None
    state: str = "?"
    exit_status: int | None = None
    signal: int | None = None
    exception: Exception_ | None = None


class DevicePosition(ApiModel):
    """How far a rank's device has come in the collectives of a group, by the backend's counters."""

    rank: int
    group: str
    enqueued: int  # the host has queued this many of the backend's collectives
    started: int | None = None  # null: the backend does not record starts
    completed: int
    source: str
    age_s: float  # of the counters, when they became evidence


class CallClass(ApiModel):
    """The ranks that made the same call."""

    ranks: list[int]
    seq: int
    op: str
    shapes: list[list[int]] = Field(default=[])
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None  # the rank within the group, as torch reports it
    peer: int | None = None
    splits: list[list[int]] | None = None
    detail: str | None = None
    site: Site | None = None


class AlignedCall(ApiModel):
    op: str
    shapes: list[list[int]] = Field(default=[])
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None  # the rank within the group, as torch reports it
    detail: str | None = None
    raised: bool = False  # it ended with an exception
    site: Site | None = None


class AlignedRow(ApiModel):
    """One call of each side, or null if that side made no corresponding call."""

    seq: list[int | None]
    calls: list[AlignedCall | None]
    omitted: int = 0  # rows before this one, in which both sides agree


class Side(ApiModel):
    ranks: list[int]


class Divergence(ApiModel):
    """The last calls of two sides of a group, aligned: a call that one side added, omitted or made
    in another order has a row of its own.
    """

    group: GroupName
    since_seq: int | None = None  # the first call that only one side made, if that is certain
    note: str = ""
    sides: list[Side]
    rows: list[AlignedRow]


class Wait(ApiModel):
    """``rank`` waits for rank ``for``."""

    rank: int
    for_: int = Field(alias="for")
    group: str
    seq: int


class End(ApiModel):
    """A rank that was to be ended for an incident."""

    rank: int
    host: str
    pid: int
    ordered_at: AwareDatetime
    result: AbortResult = "ordered"
    ended_at: AwareDatetime | None = None
    signal: int | None = None  # the signal that it was sent
    error: str | None = None  # why it failed


class Recovery(ApiModel):
    """What --on-hang abort does about an incident."""

    state: RecoveryState
    scope: RecoveryScope
    ranks: list[int]
    number: int  # of the job's recoveries, from 1
    limit: int
    planned_at: AwareDatetime
    due_at: AwareDatetime  # at the earliest: later if ranks make progress or do not report
    announced_at: AwareDatetime | None = None
    done_at: AwareDatetime | None = None
    why: str = ""  # the reason if it is withheld
    ends: list[End] = Field(default=[])


class Incident(ApiModel):
    """One root cause, regardless of how many ranks wait."""

    id: str
    job: str
    attempt: int
    kind: VerdictKind
    severity: Severity
    status: IncidentStatus
    onset_at: AwareDatetime
    opened_at: AwareDatetime
    resolved_at: AwareDatetime | None = None
    resolution: Resolution | None = None  # why it was resolved
    summary: str
    advice: str
    culprits: list[int]
    waiting: list[int]
    group: GroupName | None = None
    seq: int | None = None
    fields: list[str] = Field(default=[])
    site: Site | None = None
    calls: list[CallClass] = Field(default=[])
    divergence: Divergence | None = None
    waits: list[Wait] = Field(default=[])
    processes: list[Process] = Field(default=[])
    device: list[DevicePosition] = Field(default=[])
    stacks: list[Stack] = Field(default=[])
    recovery: Recovery | None = None  # if --on-hang abort applies to it


class RankDevice(ApiModel):
    """How far a rank's device has come in the collectives of a group, by the backend's counters.
    They count a coalesced block of calls once, so they may differ from the rank's own count.
    """

    enqueued: int
    started: int | None = None  # null: the backend does not record starts
    completed: int
    source: str
    age_s: float


class RankGroup(ApiModel):
    """A rank's progress in one of its process groups."""

    name: str
    desc: str
    ranks: list[int]
    entered: int
    completed: int | None = None
    op: str = ""
    device: RankDevice | None = None  # null: the backend does not report it


class Rank(ApiModel):
    job: str
    attempt: int
    rank: int
    host: str | None = None
    pid: int | None = None
    local_rank: int | None = None
    state: RankState
    phase: str | None = None
    step: int | None = None
    last_seen_s: float | None = None
    waiting_s: float | None = None
    groups: list[RankGroup] = Field(default=[])


class Member(ApiModel):
    rank: int
    entered: int
    completed: int | None = None
    op: str = ""


class Group(ApiModel):
    """A process group and the progress of each member."""

    job: str
    attempt: int
    name: str
    desc: str
    backend: str
    generation: int
    ranks: list[int]
    members: list[Member]


class Job(ApiModel):
    job: str
    attempt: int
    state: JobState
    world_size: int
    heard_of: int
    hosts: list[str]
    states: dict[RankState, int]
    open_incidents: int
    step: int | None = None  # the smallest of its ranks
    steps_per_s: float | None = None  # over the last minute
    summary: str = ""  # its status in one sentence
    age_s: float
    last_seen_s: float


class Attempt(ApiModel):
    """One run of a job in the history, which survives restarts of the server."""

    job: str
    attempt: int
    server: str | None = None  # if several share one history
    state: JobState
    world_size: int
    hosts: list[str]
    opened_at: AwareDatetime
    last_seen_at: AwareDatetime
    restart: int = 0  # the launcher's count


class DumpRequest(ApiModel):
    """``job`` may be omitted if only one is known."""

    model_config = ConfigDict(strict=True)

    job: str | None = None
    ranks: list[int] = Field(min_length=1, max_length=65536)
    native: bool = False


class DumpedRank(ApiModel):
    rank: int
    status: Literal["pending", "done", "failed"]
    error: str | None = None
    stacks: list[Stack] = Field(default=[])


class Dump(ApiModel):
    id: str
    job: str
    attempt: int
    native: bool
    status: Literal["pending", "done"]
    created_at: AwareDatetime
    ranks: list[DumpedRank]
