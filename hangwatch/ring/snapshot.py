"""The data that a reader returns from a ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.losses import Loss

from .devices import DeviceEntry
from .layout import DeviceStatusState


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """The position of one stream. Times are ages in seconds."""

    uid: int
    kind: StreamKind
    group: Group
    # Global rank, or number in a foreign group; -1: any source; None: a stream of collectives
    peer: int | None
    tag: int | None
    entered: int
    completed: int | None
    chain: int
    entered_s: float
    pending_s: float | None
    loss: Loss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSnapshot:
    """The content of a ring at one moment, without its calls. Times are ages in seconds."""

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
    device_status: DeviceStatusState = DeviceStatusState.UNKNOWN
    device_entries: tuple[DeviceEntry, ...] = ()
    opened: int = 0  # streams ever opened; 0: of an older writer
    torn_parts: int = 0  # parts left out because they kept changing while they were read


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A thread that makes calls."""

    thread: int  # the operating system's id
    uids: tuple[int, ...]  # of the streams whose newest call it made


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDelta:
    """The calls recorded since an earlier read. Dictionaries are keyed by stream uid."""

    next_index: int  # index of the record at which the next read starts
    chains: dict[int, dict[int, int]]  # running hash after each call, oldest first
    newest_ops: dict[int, str]  # operation of the newest call
    # Sequence number of the first call with `RecordFlag.SHARED`.
    first_concurrent: dict[int, int] = field(default_factory=dict)
    records: tuple[tuple[int, ...], ...] = ()  # unpacked with `RECORD_STRUCT`
    # By index of the record: (uid, seq) of calls that were retracted, which are in none of the
    # above, among these records and some before them.
    retracted: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One decoded record."""

    index: int
    uid: int
    entered_ns: int
    # Calls of its stream that were complete when it was entered; None if not observable.
    completed: int | None
    call: Call
