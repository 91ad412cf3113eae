"""The verdicts of the diagnosis and their parts, and how far the devices of ranks have come."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .calls import Call, Site
from .groups import DeviceCounters, Group
from .kinds import KINDS, Severity, VerdictKind
from .ranks import Ranks

DEVICE_SOURCE = "flight recorder"  # what counts the progress of devices
_OF_KIND: Any = None  # the default of `Verdict.severity`


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Rank ``rank`` is blocked until ``on_rank`` enters call ``seq`` of ``group``."""

    rank: int
    on_rank: int
    group: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallClass:
    """The ranks that made the same call."""

    ranks: Ranks
    call: Call  # one of these equal calls


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPair:
    """One row of two aligned streams: a call of each, None if a side has no corresponding call."""

    calls: tuple[Call | None, Call | None]
    omitted: int = 0  # number of equal rows omitted before this one

    @property
    def seqs(self) -> tuple[int | None, int | None]:
        """The numbers of the calls."""
        first, second = (None if call is None else call.seq for call in self.calls)
        return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The last calls of two sides of a group, aligned: a call that one side added, omitted or made
    in another order has a row of its own.

    The culprits' side is the second one.
    """

    group: Group
    since_seq: int | None = None  # the first call that only one side made, if that is certain
    note: str = ""
    sides: tuple[Side, ...]
    rows: tuple[AlignedPair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A conclusion; unless ``is_confirmed``, a suspicion for which evidence is being collected."""

    kind: VerdictKind
    severity: Severity = _OF_KIND  # that of the kind, unless another one is given
    culprits: Ranks
    waiting: Ranks
    group: Group | None = None
    seq: int | None = None
    differing_fields: tuple[str, ...] = ()
    calls: tuple[CallClass, ...] = ()
    waits: tuple[Wait, ...] = ()
    began_at: float = 0.0  # start of the condition, in seconds on the caller's monotonic clock
    is_confirmed: bool = True
    summary: str = ""
    advice: str = ""
    site: Site | None = None  # the culprit's current line, if known
    divergence: Divergence | None = None

    def __post_init__(self) -> None:
        if self.severity is _OF_KIND:
            object.__setattr__(self, "severity", KINDS[self.kind].severity)

    @property
    def is_alert(self) -> bool:
        return self.severity is Severity.ALERT

    @property
    def involved_ranks(self) -> Ranks:
        """The culprits, then the ranks that wait."""
        return (*self.culprits, *self.waiting)

    def list_fields(self) -> dict[str, Any]:
        """The fields of the verdict, also of one that is an incident."""
        return {field.name: getattr(self, field.name) for field in fields(Verdict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProgress(DeviceCounters):
    """A rank's counters in one group, as the server knows them."""

    read_at: float  # when the counters were read, in seconds on the server's monotonic clock

    def list_counters(self, now: float) -> dict[str, Any]:
        """The counters and their source, with their age at time ``now``."""
        return {
            "enqueued": self.enqueued,
            "started": self.started,
            "completed": self.completed,
            "source": DEVICE_SOURCE,
            "age_s": round(max(0.0, now - self.read_at), 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePosition(DeviceCounters):
    """The device progress of one rank in one group, as evidence of an incident."""

    rank: int
    group: str  # the name of the group
    started: int | None = None
    source: str = DEVICE_SOURCE
    age_s: float = 0.0  # the age of the counters when they became evidence
