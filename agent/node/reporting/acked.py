"""What the server has acknowledged of a process, and what it has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hangwatch.protocol.heartbeat import ProcessIdentity
from hangwatch.ring.devices import DeviceEntry
from hangwatch.ring.parts import THREAD
from hangwatch.ring.snapshot import RingDelta, StreamState

from .check_updates import CheckHistory

_MAX_CHAIN_HASHES = 256  # unacknowledged running hashes of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedStream:
    """What the server has acknowledged of one stream."""

    entered: int = -1
    completed: int | None = None
    is_pending: bool = False
    last_checked_seq: int = 0  # up to which running hashes were reported
    last_blocked_seq: int = 0  # the last unfinished call that was reported
    is_concurrency_reported: bool = False
    lost_from_seq: int = 0  # see `Loss`; 0: no call was lost


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedState:
    """What the server has acknowledged of one process."""

    identity: ProcessIdentity | None = None
    status_key: tuple[Any, ...] = ()
    reported_at_ns: int = 0
    last_alive_ns: int = 0  # the latest sign of life that was reported
    streams: Mapping[int, AckedStream] = field(default_factory=dict)
    # All of these were reported, see `StreamStates`.
    dormant_chunks: tuple[tuple[StreamState, ...], ...] = ()
    check_entries: int = 0  # entries of the check table
    device_entries: Mapping[int, DeviceEntry] = field(default_factory=dict)  # by stream uid

    @property
    def includes_exit(self) -> bool:
        """The server knows that the process has exited."""
        return bool(self.status_key) and self.status_key[0] is not None


@dataclass(slots=True)
class UnackedHistory:
    """What was read from a ring's records. Running hashes, by stream and sequence number, are kept
    until the server has acknowledged them; if it is away for long they are thinned, not truncated.
    """

    cursor: int = 0  # records that were read
    chains: dict[int, dict[int, int]] = field(default_factory=dict)
    newest_ops: dict[int, str] = field(default_factory=dict)
    newest_thread: int = 0  # which made the newest call; 0 before the first one
    # By stream: the first call that two threads made at the same time.
    first_concurrent: dict[int, int] = field(default_factory=dict)
    check_history: CheckHistory = field(default_factory=CheckHistory)
    # By stream: the first call that was read, and may have been reported, before it was retracted.
    late_retractions: dict[int, int] = field(default_factory=dict)
    _retracted: frozenset[int] = frozenset()  # indices of records

    def add_delta(self, delta: RingDelta) -> None:
        for index, (uid, seq) in delta.retracted.items():
            if index < self.cursor and index not in self._retracted:
                self.late_retractions[uid] = min(seq, self.late_retractions.get(uid, seq))
        self._retracted = frozenset(delta.retracted)
        self.cursor = delta.next_index
        self.newest_ops.update(delta.newest_ops)
        if delta.records:
            self.newest_thread = delta.records[-1][THREAD]
        self.first_concurrent = delta.first_concurrent | self.first_concurrent
        for uid, fresh in delta.chains.items():
            chains = self.chains.setdefault(uid, {})
            chains.update(fresh)
            step = 1
            while len(chains) > _MAX_CHAIN_HASHES:
                step *= 2
                chains = {seq: chain for seq, chain in chains.items() if seq % step == 0}
            self.chains[uid] = chains

    def mark_acked(self, acked: AckedState) -> None:
        self.check_history.mark_acked(acked.check_entries)
        for uid, chains in list(self.chains.items()):
            stream = acked.streams.get(uid)
            if stream is None:
                continue
            last_seq = stream.last_checked_seq
            if not chains or max(chains) <= last_seq:  # as in most heartbeats of a healthy rank
                del self.chains[uid]
                continue
            self.chains[uid] = {seq: chain for seq, chain in chains.items() if seq > last_seq}

    def forget_streams(self, closed: Iterable[int]) -> None:
        """Drops what is kept of streams that were closed."""
        for uid in closed:
            self.chains.pop(uid, None)
            self.newest_ops.pop(uid, None)
            self.first_concurrent.pop(uid, None)

    def rewind_cursor(self) -> None:
        """Starts again with what the ring still has."""
        self.cursor = 0
        self.chains.clear()
        self.check_history.rewind_cursor()
