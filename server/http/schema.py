"""The HTTP schema of jobs, ranks, groups and dumps: it validates requests, and describes responses
in ``/openapi.json``.

The server's own model is in `server.core.job_views`. Responses are encoded from its documents, and
a test checks that these match the schema. `incident_schema` has the schema of incidents.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import AwareDatetime, ConfigDict, Field

from hangwatch.model.ranks import RankState

from ..core.api_model import ApiModel
from ..core.job_views import JobState
from .incident_schema import Stack

T = TypeVar("T")


class Page(ApiModel, Generic[T]):
    """A page of a list; ``next`` is the URL of the next page."""

    items: list[T]
    next: str | None = None


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
