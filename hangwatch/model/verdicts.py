"""The verdicts of the diagnosis and their parts."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import Call, Site
from .groups import Group
from .kind_spec import Severity
from .kinds import VerdictKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Rank ``rank`` is blocked until ``on_rank`` enters call ``seq`` of ``group``."""

    rank: int
    on_rank: int
    group: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallClass:
    """The ranks that made equal calls at a position, with one of these calls."""

    ranks: tuple[int, ...]
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPair:
    """One row of two aligned streams: a call of each, None if a side has no corresponding call."""

    calls: tuple[Call | None, Call | None]
    omitted: int = 0  # number of equal rows omitted before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the calls of two sides of a group diverge. The culprits' side is the second one."""

    group: Group
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    rows: tuple[AlignedPair, ...]
    since_seq: int | None = None  # the first call that only one side made, if that is certain
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A conclusion of the diagnosis. While ``is_confirmed`` is False it is only suspected, and
    evidence is still being collected.
    """

    kind: VerdictKind
    severity: Severity
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
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
