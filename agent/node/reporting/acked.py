"""What the server has acknowledged of a process, and what was read from its ring and is not
acknowledged yet: running hashes, retracted calls, and the results of checks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hangwatch.model.calls import Call
from hangwatch.protocol.heartbeat import NonfiniteReport, ProcessIdentity
from hangwatch.ring import checks
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.layout import CheckFlag
from hangwatch.ring.parts import THREAD, DeviceEntry, compute_age_s
from hangwatch.ring.reader import RingDelta, RingReader, RingSnapshot, StreamStates
from hangwatch.ring.sampling import thin_checks

_MAX_CHAIN_HASHES = 256  # unacknowledged running hashes of a stream
_MAX_PENDING_ENTRIES = 2048  # unacknowledged entries of the check table
_MIN_STREAMS_DROPPED = 256  # closed streams that are dropped together
# The next two limit one heartbeat. All ranks leave out the same calls of a stream that has more.
_MAX_CHECKSUMS_PER_STREAM = 64
_MAX_NONFINITE_PER_HEARTBEAT = 64

_Checksum = tuple[int, int, int, int]  # see `ProcessUpdate.checksums`


class AckedStream(NamedTuple):
    """What the server has acknowledged of one stream."""

    entered: int = -1
    completed: int | None = None
    is_pending: bool = False
    last_checked_seq: int = 0  # running hashes up to this call were reported
    last_blocked_seq: int = 0  # the last unfinished call that was reported
    is_concurrency_reported: bool = False
    lost_from_seq: int = 0  # see `Loss`; 0: no call was lost


class Retraction(NamedTuple):
    """The first call of a stream that may have been reported before its recorder took it back."""

    seq: int
    record_index: int  # the newest retracted record of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedState:
    """What the server has acknowledged of one process."""

    identity: ProcessIdentity | None = None
    status_key: tuple[Any, ...] = ()  # see `updates`; its first member is the exit
    step: int | None = None
    reported_at_ns: int = 0
    last_alive_ns: int = 0  # the latest sign of life that was reported
    streams: Mapping[int, AckedStream] = field(default_factory=dict)
    # The dormant streams that were reported, see `RingSnapshot`.
    dormant_chunks: Mapping[int, StreamStates] = field(default_factory=dict)
    check_entries: int = 0  # the last entry of the check table that the last update had
    device_entries: Mapping[int, DeviceEntry] = field(default_factory=dict)  # keys: stream uids
    # The retractions that were reported last, by stream uid
    retractions: Mapping[int, Retraction] = field(default_factory=dict)

    @property
    def includes_exit(self) -> bool:
        """The server knows that the process has exited."""
        return bool(self.status_key) and self.status_key[0] is not None


@dataclass(slots=True)
class CheckHistory:
    """Entries of the check table, from reading until they are acknowledged."""

    cursor: int = 0  # entries of the table that were read
    overflows: int = 0
    _entry_count: int = 0
    _pending: deque[tuple[int, CheckEntry, Call | None]] = field(
        default_factory=lambda: deque(maxlen=_MAX_PENDING_ENTRIES)
    )

    def read_entries(self, reader: RingReader, now_ns: int) -> None:
        """Reads the entries that were added to the table since the last time."""
        new_entries, self.cursor = checks.read_check_entries(reader, self.cursor)
        for entry in new_entries:
            self.overflows = max(self.overflows, entry.overflows)
            if not entry.flags & (CheckFlag.CHECKSUM | CheckFlag.NONFINITE):
                continue
            call = None
            if entry.flags & CheckFlag.NONFINITE:
                call = checks.call_from_entry(reader, entry, now_ns)
            self._entry_count += 1
            self._pending.append((self._entry_count, entry, call))

    def build_update_fields(self, now_ns: int) -> tuple[dict[str, Any], int]:
        """Fields of a `ProcessUpdate`, and the last entry that they include; 0 if there is none."""
        nonfinite: list[NonfiniteReport] = []
        checksums_by_uid: dict[int, list[_Checksum]] = defaultdict(list)
        last_entry = 0
        for number, entry, call in self._pending:
            if call is None:
                checksum = (entry.uid, entry.seq, entry.chain, entry.checksum)
                checksums_by_uid[entry.uid].append(checksum)
            elif len(nonfinite) == _MAX_NONFINITE_PER_HEARTBEAT:
                break
            else:
                report = NonfiniteReport(
                    uid=entry.uid,
                    seq=entry.seq,
                    nan=entry.nan,
                    inf=entry.inf,
                    output=bool(entry.flags & CheckFlag.OUTPUT),
                    scaled=bool(entry.flags & CheckFlag.SCALED),
                    first=entry.first,
                    rounds=entry.rounds,
                    at_s=round(compute_age_s(now_ns, entry.entered_ns), 4),
                    call=call,
                )
                nonfinite.append(report)
            last_entry = number
        if not last_entry:
            return {}, 0
        kept: list[_Checksum] = []
        for checksums in checksums_by_uid.values():
            seqs = [seq for _, seq, _, _ in checksums]
            kept_seqs = thin_checks(seqs, _MAX_CHECKSUMS_PER_STREAM)
            kept += [checksum for checksum in checksums if checksum[1] in kept_seqs]
        fields = {
            "checksums": tuple(kept),
            "nonfinite": tuple(nonfinite),
            "overflows": self.overflows,
        }
        return fields, last_entry

    def mark_acked(self, upto_entry: int) -> None:
        while self._pending and self._pending[0][0] <= upto_entry:
            self._pending.popleft()

    def rewind_cursor(self) -> None:
        """Starts again with the entries that are still in the table."""
        self.cursor = 0
        self._pending.clear()


@dataclass(slots=True)
class UnackedHistory:
    """What was read from a ring's records. Running hashes, by stream and sequence number, are kept
    until the server has acknowledged them; if it is away for long they are thinned, not truncated.
    """

    cursor: int = 0  # records that were read
    first_unread: int = 0  # where the next reading starts: at ``cursor``, or at 0 after a resync
    chains: dict[int, dict[int, int]] = field(default_factory=dict)
    newest_ops: dict[int, str] = field(default_factory=dict)
    newest_thread: int = 0  # the thread that made the newest call; 0 before the first one
    # The first call of each stream that two threads made at the same time.
    first_concurrent: dict[int, int] = field(default_factory=dict)
    check_history: CheckHistory = field(default_factory=CheckHistory)
    # The first retracted call of each stream that the server may know and does not know to be retracted.
    retractions: dict[int, Retraction] = field(default_factory=dict)
    # What the server will know once it has the last update.
    composed_streams: Mapping[int, AckedStream] = field(default_factory=dict)
    # The newest call of each stream that a reply to a request had.
    _answered_seqs: dict[int, int] = field(default_factory=dict)
    _retracted: frozenset[int] = frozenset()  # indices of records

    def add_delta(self, delta: RingDelta) -> list[tuple[int, int]]:
        """Adds what was read. Returns (uid, seq) of the calls read earlier and retracted since."""
        late = []
        for index, (uid, seq) in delta.retracted.items():
            if index >= self.first_unread or index in self._retracted:
                continue
            late.append((uid, seq))
            chains = self.chains.get(uid, {})
            for later_seq in [known for known in chains if known >= seq]:
                del chains[later_seq]
            if self.first_concurrent.get(uid) == seq:
                del self.first_concurrent[uid]
            reported_seq = self._answered_seqs.get(uid, 0)
            if uid in self.composed_streams:
                reported_seq = max(reported_seq, self.composed_streams[uid].entered)
            if reported_seq >= seq:
                first_seq = seq
                if uid in self.retractions:
                    first_seq = min(seq, self.retractions[uid].seq)
                self.retractions[uid] = Retraction(first_seq, index)
        self._retracted = frozenset(delta.retracted)
        self.cursor = self.first_unread = delta.next_index
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
        return late

    def add_reply(self, uid: int, calls: Sequence[Call]) -> None:
        """Records that the server is sent these calls, oldest first."""
        if calls:
            answered_seq = self._answered_seqs.get(uid, 0)
            self._answered_seqs[uid] = max(calls[-1].seq, answered_seq)

    def forget_closed_streams(self, ring: RingSnapshot) -> None:
        """Drops what is kept of the streams that the ring no longer has, once there are many."""
        limit = 2 * len(ring.streams) + _MIN_STREAMS_DROPPED
        if ring.torn_parts or len(self.newest_ops) <= limit:
            return
        open_uids = {state.uid for state in ring.streams}
        for uid in list(self.newest_ops):
            if uid not in open_uids and uid <= ring.opened:  # others were opened since it was read
                del self.newest_ops[uid]
                self.chains.pop(uid, None)
                self.first_concurrent.pop(uid, None)
                self._answered_seqs.pop(uid, None)

    def mark_acked(self, acked: AckedState) -> None:
        for uid, retraction in acked.retractions.items():
            if self.retractions.get(uid) == retraction:
                del self.retractions[uid]
                self._answered_seqs.pop(uid, None)
        self.check_history.mark_acked(acked.check_entries)
        for uid, chains in list(self.chains.items()):
            stream = acked.streams.get(uid)
            if stream is None:
                continue
            last_seq = stream.last_checked_seq
            if uid in self.retractions:
                last_seq = min(last_seq, self.retractions[uid].seq - 1)
            if not chains or max(chains) <= last_seq:  # the usual case for a healthy rank
                del self.chains[uid]
                continue
            self.chains[uid] = {seq: chain for seq, chain in chains.items() if seq > last_seq}

    def rewind_cursor(self) -> None:
        """Starts again with what the ring still has."""
        self.first_unread = 0
        self.chains.clear()
        self.retractions.clear()
        self.composed_streams = {}
        self._answered_seqs.clear()
        self.check_history.rewind_cursor()
