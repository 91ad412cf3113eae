"""The data that a reader returns from a ring."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hangwatch.model.calls import Call, Loss

from .layout import DeviceStatusState
from .parts import DeviceEntry, StreamDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState(StreamDescription):
    """The position of one stream. Times are ages in seconds."""

    uid: int
    entered: int
    completed: int | None
    chain: int
    entered_s: float
    pending_s: float | None
    loss: Loss | None = None
    read_ns: int = 0  # when it was read; 0: at the time of its snapshot

    def get_entered_ns(self, now_ns: int) -> float:
        """The time at which its newest call was entered; ``now_ns`` is the time of its snapshot."""
        return (self.read_ns or now_ns) - self.entered_s * 1e9

    def update_ages(self, now_ns: int) -> StreamState:
        """The state with its ages at a later time."""
        age_s = (now_ns - self.read_ns) / 1e9 if self.read_ns else 0.0
        if age_s <= 0.0:
            return self
        pending_s = None if self.pending_s is None else self.pending_s + age_s
        return replace(self, entered_s=self.entered_s + age_s, pending_s=pending_s, read_ns=now_ns)


@dataclass(frozen=True, slots=True)
class StreamStates:
    """The streams of a ring. ``dormant`` ones have no unfinished call, and their ages are those of the
    time at which each was read. ``dormant_chunks`` has the same streams, in parts that each stay the
    same object as long as none of its streams changes.
    """

    active: tuple[StreamState, ...]
    dormant: tuple[StreamState, ...]
    dormant_chunks: tuple[tuple[StreamState, ...], ...]
    torn_count: int  # streams left out because they kept changing or are invalid


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
    streams: tuple[StreamState, ...]  # the dormant ones come last
    exception: dict[str, Any] | None = None
    faults: tuple[str, ...] = ()
    device_status: DeviceStatusState = DeviceStatusState.UNKNOWN
    device_entries: tuple[DeviceEntry, ...] = ()
    dormant_streams: tuple[StreamState, ...] = ()  # see `StreamStates`
    dormant_chunks: tuple[tuple[StreamState, ...], ...] = ()
    read_ns: int = 0
    opened: int = 0  # streams ever opened; 0: the writer is older and does not say
    torn_parts: int = 0  # parts left out because they kept changing while they were read

    @property
    def active_streams(self) -> tuple[StreamState, ...]:
        """The streams that are not dormant."""
        return self.streams[: len(self.streams) - len(self.dormant_streams)]

    def get_newest_call_s(self) -> float:
        """The age of the newest call; infinite if there is none."""
        now_ns = self.read_ns
        newest_ns = max(
            [state.get_entered_ns(now_ns) for state in self.streams if state.entered],
            default=-inf,
        )
        return (now_ns - newest_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A thread that makes calls."""

    thread: int  # the operating system's id
    uids: tuple[int, ...]  # the streams whose newest call it made


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDelta:
    """The calls recorded since an earlier read. Dictionaries are keyed by stream uid."""

    next_index: int  # index of the record at which the next read starts
    chains: dict[int, dict[int, int]]  # running hash after each call, oldest first
    newest_ops: dict[int, str]  # operation of the newest call
    # Sequence number of the first call with `RecordFlag.SHARED`.
    first_concurrent: dict[int, int] = field(default_factory=dict)
    records: tuple[tuple[int, ...], ...] = ()  # unpacked with `RECORD_STRUCT`
    # The (uid, seq) of retracted calls among these records and some before them, by the index of the
    # record. These calls are in none of the fields above.
    retracted: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class RecordEntry:
    """One decoded record."""

    uid: int
    entered_ns: int
    # Calls of its stream that were complete when it was entered; None if not observable.
    completed: int | None
    call: Call
    # An upper bound of the call's duration in seconds, see `hangwatch.ring.tracing`; None if it may
    # be unfinished.
    within_s: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the call is known to be unfinished."""
        return self.within_s is None and self.completed is not None
