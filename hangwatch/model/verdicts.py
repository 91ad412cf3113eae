"""What the diagnosis claims."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import Call, Site
from .groups import Group
from .kinds import Severity, VerdictKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Rank ``rank`` cannot go on before ``on`` enters call ``seq`` of ``group``."""

    rank: int
    on_rank: int
    group: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallClass:
    """The ranks that made equal calls, side by side with those that made another."""

    ranks: tuple[int, ...]
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPair:
    """One row of two sequences side by side: a call of each, None where one side has nothing that
    corresponds.
    """

    calls: tuple[Call | None, Call | None]
    omitted: int = 0  # rows left out before this one, in which both sides agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the calls of two sides of a group part, the others' first and the culprits' second."""

    group: Group
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    rows: tuple[AlignedPair, ...]
    since_seq: int | None = None  # the first call that only one side made, where that is certain
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the diagnosis claims. ``due`` is False while it is only suspected, so that evidence is
    gathered first.
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
    began_at: float = 0.0  # when it began, on the caller's monotonic clock, in seconds
    is_confirmed: bool = True
    summary: str = ""
    advice: str = ""
    site: Site | None = None  # the culprit's own line, where it is known
    divergence: Divergence | None = None
