"""Jobs, attempts, ranks and process groups as the server shows them at one moment.

The fields are those of the JSON documents: these are encoded without a conversion, and described in
``/openapi.json`` from here. `ResultCache` keeps what is computed once for all readers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeVar

from hangwatch.model.groups import DeviceCounters
from hangwatch.model.ranks import RankState

JobState = Literal["starting", "running", "stalled", "finished", "failed", "lost"]

T = TypeVar("T")

# The least lifetime of a cached result, as a multiple of the time that its computation took.
LIFETIME_COST_FACTOR = 25.0  # so no result takes more than a 25th of one core
MIN_LIFETIME_S = 0.4
MAX_CACHED_RESULTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeviceView(DeviceCounters):
    """The position of a rank's device in the collectives of a group, by the backend's counters.
    These count a coalesced block of calls once, so they may differ from the rank's own count.
    """

    source: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossView:
    """A rank's calls of a group are not completely recorded from call ``since`` on: its count and
    what follows from it are not certain.
    """

    since: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroupView:
    """A rank's position in one of its process groups."""

    name: str
    desc: str
    ranks: Sequence[int]
    # The members that are not ranks of the attempt, in a group that numbers its members by itself.
    outside: Sequence[str] = ()
    entered: int
    completed: int | None = None
    op: str = ""
    device: RankDeviceView | None = None  # None: the backend does not report it
    incomplete: LossView | None = None  # None: all calls were recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
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
    unrecorded: int = 0  # the number of lost calls and streams whose place is not known
    groups: Sequence[RankGroupView] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemberView:
    rank: int
    entered: int
    completed: int | None = None
    op: str = ""
    incomplete: LossView | None = None  # see `RankGroupView`


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A process group and each member's position in it."""

    job: str
    attempt: int
    name: str
    desc: str
    backend: str
    generation: int
    ranks: Sequence[int]
    outside: Sequence[str] = ()  # see `RankGroupView`
    members: Sequence[GroupMemberView]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    job: str
    attempt: int
    state: JobState
    world_size: int
    reported_ranks: int  # ranks that have been reported
    hosts: Sequence[str]
    states: dict[RankState, int]
    open_incidents: int
    step: int | None = None  # the smallest of its ranks
    steps_per_s: float | None = None  # over the last minute
    summary: str = ""  # the job's condition and how that is known, in one sentence
    age_s: float
    last_seen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One run of a job, as recorded in the history."""

    job: str
    attempt: int
    server: str | None = None  # None: only one server uses the database
    state: JobState
    world_size: int
    hosts: Sequence[str]
    opened_at: datetime
    last_seen_at: datetime
    restart: int = 0  # the launcher's count


@dataclass(slots=True)
class ResultCache:
    """Results by key. A key must contain everything that its result depends on except the time."""

    # The results, and when each expires.
    _results: dict[Hashable, tuple[Any, float]] = field(default_factory=dict)

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result for ``key``, computed again if it is too old. Exceptions are not kept."""
        started_at = time.monotonic()
        cached, expires_at = self._results.get(key, (None, started_at))
        if started_at < expires_at:
            return cached  # type: ignore[no-any-return] # under one key there is one type
        value = compute()
        finished_at = time.monotonic()
        self._results.pop(key, None)
        lifetime_s = max(MIN_LIFETIME_S, LIFETIME_COST_FACTOR * (finished_at - started_at))
        self._results[key] = value, finished_at + lifetime_s
        while len(self._results) > MAX_CACHED_RESULTS:
            del self._results[next(iter(self._results))]
        return value
