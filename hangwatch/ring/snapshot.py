"""What a reader takes out of a ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where one sequence stands. Times are ages in seconds."""

    uid: int
    kind: StreamKind
    group: Group
    peer: int | None  # global rank, -1 for any source; None for a collective sequence
    tag: int | None
    entered: int
    completed: int | None
    chain: int
    entered_s: float
    pending_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSnapshot:
    """What a ring said at one moment."""

    pid: int
    start_ticks: int
    identity: dict[str, Any]
    lifecycle: int
    step: int | None
    pulse_s: float
    phase: str | None
    phase_s: float
    phase_limit_s: float | None
    record_count: int
    dropped: int
    errors: int
    is_disabled: bool
    streams: tuple[StreamState, ...]
    exception: dict[str, Any] | None = None
    faults: tuple[str, ...] = ()
    torn_parts: int = 0  # parts left out because they kept changing while they were read


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDelta:
    """What was recorded since an earlier look, by sequence uid."""

    next_index: int  # records there were: where the next look begins
    chains: dict[int, dict[int, int]]  # running hash after each call, oldest first
    newest_ops: dict[int, str]  # the newest call's operation
    first_concurrent: dict[int, int] = field(
        default_factory=dict
    )  # the first call with `Flag.SHARED`
    records: tuple[tuple[int, ...], ...] = ()  # as `hangwatch.ring.layout.RECORD` has them


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One record."""

    index: int
    uid: int
    entered_ns: int
    completed: (
        int | None
    )  # how far its sequence was complete when it was entered; None where that cannot be told
    call: Call
