"""Reads a ring and validates everything in it. `hangwatch.ring.layout` documents the layout.

The position of a stream is in the stream table, as of the recorder's last poll, and in records.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from hangwatch.model.calls import Call, JsonObject, Loss, LossReason, Signature, Site, decode_fields

from . import communicators, layout, parts
from .layout import DeviceStatusState, LiveWord, RecordFlag, RingError, unpack_loss
from .parts import CHAIN, COMPLETED, ENTERED_NS, FLAGS, SEQ, SIGNATURE, STAMP, THREAD, UID, Record

# The flags that are read of every record.
_RETRACTED = RecordFlag.RETRACTED
_SHARED = RecordFlag.SHARED
# A stream is dormant as long as all its calls are complete. Where completion is unknown, it is once
# its newest call is that old: by then the call has been reported as one that may be unfinished.
DORMANT_AFTER_S = 10.0
_CHUNK_SLOTS = 16
_CHUNK_SLOT_BYTES = _CHUNK_SLOTS * layout.STREAMS.slot.size
_CHUNK_LOSS_BYTES = _CHUNK_SLOTS * layout.LOSSES.slot.size
# The last records that are read again, since a call may be retracted after it was read.
_RETRACTION_WINDOW = 64
_MAX_LAST_CALLS = 64  # the limit for each stream of a rank that has exited
_MAX_KNOWN = 1024  # signatures and sites each; beyond that, all are parsed again

Interned = TypeVar("Interned")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState(parts.StreamDescription):
    """The position of one stream. Times are ages in seconds."""

    uid: int
    entered: int
    completed: int | None
    chain: int
    entered_s: float
    pending_s: float | None
    loss: Loss | None = None
    read_ns: int = 0  # when it was read; 0: at the time of its snapshot

    @property
    def is_dormant(self) -> bool:
        """Whether the stream has no unfinished call, as far as is known."""
        if self.completed is not None or not self.entered:
            return self.pending_s is None
        return self.entered_s >= DORMANT_AFTER_S

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


StreamStates = tuple[StreamState, ...]
DeviceEntries = tuple[parts.DeviceEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSnapshot:
    """The content of a ring at one moment, without its calls. Times are ages in seconds."""

    identity: JsonObject = field(default_factory=dict)
    lifecycle: int = 0
    step: int | None = None
    pulse_s: float = 0.0
    phase: str | None = None
    phase_s: float = 0.0
    phase_limit_s: float | None = None
    dropped: int = 0
    streams: StreamStates = ()
    exception: JsonObject | None = None  # the one that ended the program
    handled_exception: JsonObject | None = None  # the one that a waiting thread is handling
    faults: tuple[str, ...] = ()
    device_status: DeviceStatusState = DeviceStatusState.UNKNOWN
    device_entries: DeviceEntries = ()
    active_streams: StreamStates = ()  # the first of ``streams``, which may have an unfinished call
    # The other streams, with ages as of their ``read_ns``: in parts, by the number of the part, that stay
    # the same object as long as none of its streams changes.
    dormant_chunks: Mapping[int, StreamStates] = field(default_factory=dict)
    read_ns: int = 0
    opened: int = 0  # streams ever opened
    torn_parts: int = 0  # streams left out because they kept changing or are invalid

    def get_newest_call_s(self) -> float:
        """The age of the newest call; infinite if there is none."""
        now_ns = self.read_ns
        entered_ns = [state.get_entered_ns(now_ns) for state in self.streams if state.entered]
        return (now_ns - max(entered_ns, default=-inf)) / 1e9


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
    records: tuple[Record, ...] = ()
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
    # The call's duration in seconds at most (see `agent.node.requests.traces`); None: maybe unfinished.
    within_s: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the call is known to be unfinished."""
        return self.within_s is None and self.completed is not None


class RingReader(parts.RingParts):
    """Reads a mapped ring. Invalid parts are omitted and counted; an invalid header or a missing
    identity raises RingError.

    ``data`` is bytes-like and can be sliced, usually an mmap of the file with this ``inode``.
    Descriptions, signatures and sites are cached, because uids and numbers are not reused, and so
    are dormant streams: a process may have thousands of channels, of which it uses a few.
    """

    def __init__(self, data: Any, inode: int = 0) -> None:
        super().__init__(data)
        self.inode = inode
        self._communicators = communicators.CommunicatorTable(data, self.communicators_offset)
        # The uid and the description of the stream in each slot of the stream table.
        self._known_streams: dict[int, tuple[int, parts.StreamDescription]] = {}
        # The chunks whose streams are all dormant: the bytes of their slots and losses, and these streams.
        self._dormant: dict[int, tuple[tuple[bytes, bytes], StreamStates]] = {}
        self._dormant_chunks: dict[int, StreamStates] = {}
        self._dormant_streams: StreamStates = ()
        self._chunks_by_uid: dict[int, int] = {}
        self._known_signatures: dict[int, Signature] = {}
        self._known_sites: dict[int, Site | None] = {}

    @property
    def record_capacity(self) -> int:
        """The number of records that the ring can hold."""
        return self.records.count

    def read_snapshot(self, now_ns: int) -> RingSnapshot:
        """Reads everything but the calls. Raises RingError if the identity cannot be read."""
        identity = self.read_note(layout.IDENTITY)
        if identity is None:
            raise RingError("no identity in it: its process is still creating it, or died doing so")
        written = self.count_records()
        words = self.read_live_words()
        active_streams, torn_parts = self._read_streams(written, now_ns)
        active_streams, device_status, device_entries = self._add_communicators(
            active_streams, words, now_ns
        )
        faults = self.read_note(layout.FAULTS) or {}
        exception = self.read_note(layout.EXCEPTION) or None
        is_handled = exception is not None and bool(exception.get("is_handled"))
        phase_number = words[LiveWord.PHASE]  # The phase's name is interned like a site.
        phase = self.read_interned(self.sites, phase_number) if phase_number else None
        step = words[LiveWord.STEP]
        phase_limit_ns = words[LiveWord.PHASE_LIMIT_NS]
        return RingSnapshot(
            identity=identity,
            lifecycle=words[LiveWord.LIFECYCLE],
            step=step - 1 if step else None,
            pulse_s=parts.compute_age_s(now_ns, words[LiveWord.PULSE_NS]),
            phase=str(phase.get("phase")) if phase else None,
            phase_s=parts.compute_age_s(now_ns, words[LiveWord.PHASE_NS]),
            phase_limit_s=phase_limit_ns / 1e9 if phase_limit_ns else None,
            dropped=words[LiveWord.DROPPED],
            streams=(*active_streams, *self._dormant_streams),
            active_streams=active_streams,
            dormant_chunks=self._dormant_chunks,
            exception=None if is_handled else exception,
            handled_exception=exception if is_handled else None,
            faults=(*map(str, faults.get("lines", ())), *self._describe_uncovered()),
            device_status=device_status,
            device_entries=device_entries,
            read_ns=now_ns,
            opened=words[LiveWord.OPENED],
            torn_parts=torn_parts,
        )

    def read_positions(self, now_ns: int) -> tuple[StreamStates, DeviceEntries]:
        """The positions of all streams, and of their devices: a part of what a snapshot has."""
        active_streams, _ = self._read_streams(self.count_records(), now_ns)
        active_streams, _, device_entries = self._add_communicators(
            active_streams, self.read_live_words(), now_ns
        )
        return (*active_streams, *self._dormant_streams), device_entries

    def _add_communicators(
        self, streams: StreamStates, words: tuple[int, ...], now_ns: int
    ) -> tuple[StreamStates, DeviceStatusState, DeviceEntries]:
        """The streams with those of NCCL's communicators that torch does not know, and how far the
        device has come. What NCCL itself reports takes the place of the Flight Recorder's counters,
        which may lack starts.
        """
        status = DeviceStatusState(words[LiveWord.DEVICE_STATUS])
        is_reported = status is DeviceStatusState.REPORTED
        entries = self.read_device_entries() if is_reported else ()
        table = self._communicators
        found = table.read_communicators(now_ns)
        if not found:
            return streams, status, entries
        if table.follows_device:
            entries_by_uid = {entry.uid: entry for entry in entries}
            for communicator in found:
                if not (communicator.lost or communicator.is_closed):
                    entry = communicator.make_device_entry(now_ns)
                    entries_by_uid[entry.uid] = entry
            entries = tuple(entries_by_uid.values())
            status = DeviceStatusState.REPORTED
        others = []
        for communicator in found:
            calls = table.read_calls(communicator) if not communicator.torch_stream else []
            if calls:
                state = StreamState(
                    uid=communicator.uid,
                    kind=communicators.KIND,
                    group=communicator.group,
                    entered=calls[-1].seq,
                    completed=None,
                    chain=calls[-1].chain,
                    entered_s=parts.compute_age_s(now_ns, calls[-1].entered_ns),
                    pending_s=None,
                    read_ns=now_ns,
                )
                others.append(state)
        return (*streams, *others), status, entries

    def _describe_uncovered(self) -> tuple[str, ...]:
        count = self._communicators.count_uncovered()
        if not count:
            return ()
        return (f"{count} NCCL communicators beyond {layout.COMMUNICATOR_SLOTS} are not watched",)

    def _read_communicator_calls(
        self, now_ns: int
    ) -> dict[int, list[communicators.CommunicatorCall]]:
        """The last calls of the communicators that torch does not know, oldest first, by uid."""
        table = self._communicators
        return {
            communicator.uid: table.read_calls(communicator)
            for communicator in table.read_communicators(now_ns)
            if not communicator.torch_stream
        }

    def _read_streams(self, written: int, now_ns: int) -> tuple[StreamStates, int]:
        """The streams that are not dormant, and how many were left out; ``written`` records exist."""
        polled = self.read_live_word(LiveWord.RECORDS)
        # The newest record of each stream since the last poll, by uid.
        newest_records = {
            record[UID]: record
            for record in self.read_records(polled, written)
            if not record[FLAGS] & _RETRACTED
        }
        slot_count = min(self.read_live_word(LiveWord.SEQUENCES), self.streams.count)
        slots = self._copy_bytes(self.streams.offset, slot_count * self.streams.slot.size)
        losses = self._copy_bytes(self.losses.offset, slot_count * self.losses.slot.size)
        chunk_count = -(-slot_count // _CHUNK_SLOTS)
        called = {self._chunks_by_uid.get(uid) for uid in newest_records}
        active: list[StreamState] = []
        torn_count = 0
        has_changed = False
        for number in range(chunk_count):
            content = (
                slots[number * _CHUNK_SLOT_BYTES : (number + 1) * _CHUNK_SLOT_BYTES],
                losses[number * _CHUNK_LOSS_BYTES : (number + 1) * _CHUNK_LOSS_BYTES],
            )
            known_content, _ = self._dormant.get(number, (None, ()))
            if known_content == content and number not in called:
                continue
            has_changed |= self._dormant.pop(number, None) is not None
            states = []
            first = number * _CHUNK_SLOTS
            for slot in range(first, min(first + _CHUNK_SLOTS, slot_count)):
                try:
                    state = self._read_stream(slot, newest_records, now_ns)
                except RingError:
                    torn_count += 1
                    continue
                if state is not None:
                    states.append(state)
            if torn_count or not all(state.is_dormant for state in states):
                active += states
            else:
                self._dormant[number] = content, tuple(states)
                has_changed = True
        if has_changed:
            # Joining thousands of streams takes as long as the whole reading without it.
            self._dormant_chunks = {n: states for n, (_, states) in sorted(self._dormant.items())}
            chunks = self._dormant_chunks.values()
            self._dormant_streams = tuple(itertools.chain.from_iterable(chunks))
        return tuple(active), torn_count

    def _read_stream(
        self, slot: int, newest_records: dict[int, Record], now_ns: int
    ) -> StreamState | None:
        """The stream in a slot, if any. Raises RingError if it is invalid or keeps changing."""
        unpack_stream = self.streams.slot.unpack_from
        offset = self.streams.locate_slot(slot)
        loss_offset = self.losses.locate_slot(slot)
        for _ in range(parts.READ_ATTEMPTS):
            values = unpack_stream(self.data, offset)
            completed, pending_ns, entered, chain, entered_ns, uid, length, heap_offset = values
            if not uid:
                return None
            description = self._find_description(slot, uid, heap_offset, length)
            from_seq, reason = unpack_loss(self._read_word(loss_offset))
            if unpack_stream(self.data, offset) == values:
                break
        else:
            raise RingError("the stream keeps changing")
        newest = newest_records.get(uid)
        if newest is not None and newest[SEQ] > entered:
            entered_ns, entered, chain = newest[ENTERED_NS], newest[SEQ], newest[CHAIN]
            if completed != layout.UNKNOWN_COMPLETED:
                completed = max(completed, newest[COMPLETED])
        pending_s = None
        if completed < entered:
            is_newest_oldest = completed + 1 == entered or not pending_ns
            pending_s = parts.compute_age_s(now_ns, entered_ns if is_newest_oldest else pending_ns)
        return StreamState(
            uid=uid,
            kind=description.kind,
            group=description.group,
            peer=description.peer,
            tag=description.tag,
            entered=entered,
            completed=None if completed == layout.UNKNOWN_COMPLETED else min(completed, entered),
            chain=chain,
            entered_s=parts.compute_age_s(now_ns, entered_ns),
            pending_s=pending_s,
            loss=Loss(from_seq, LossReason(reason)) if from_seq else None,
            read_ns=now_ns,
        )

    def _find_description(
        self, slot: int, uid: int, offset: int, length: int
    ) -> parts.StreamDescription:
        """The stream's description, which is read once. Raises RingError if it is invalid."""
        known_uid, known = self._known_streams.get(slot, (0, None))
        if known is not None and known_uid == uid:
            return known
        description = None
        if offset + length <= self.heap.count:
            raw = self._copy_bytes(self.heap.offset + offset, length)
            description = parts.parse_description(raw)
        if description is None:
            raise RingError("the description of the stream is invalid")
        self._chunks_by_uid.pop(known_uid, None)
        self._chunks_by_uid[uid] = slot // _CHUNK_SLOTS
        self._known_streams[slot] = uid, description
        return description

    def read_signature(self, number: int) -> Signature:
        """The signature of a record; `LOST_SIGNATURE` if it is overwritten or malformed."""
        return self._read_known(
            self._known_signatures, self.signatures, number, Signature, parts.LOST_SIGNATURE
        )

    def _read_known(
        self,
        known: dict[int, Interned],
        table: layout.Table,
        number: int,
        kind: type[Interned],
        lost: Interned,
    ) -> Interned:
        """The signature or site with this number, which is decoded once."""
        if number in known:
            return known[number]
        data = self.read_interned(table, number)
        if data is None:
            return lost
        if len(known) >= _MAX_KNOWN:
            known.clear()
        try:
            known[number] = kind(**decode_fields(kind, data))
        except parts.MALFORMED_ERRORS:
            known[number] = lost
        return known[number]

    def make_call(self, seq: int, signature: int, site: int, **fields: Any) -> Call:
        """A call, from the numbers of its signature and site and the remaining fields of `Call`."""
        found = None
        if site:
            found = self._read_known(self._known_sites, self.sites, site, Site, None)
        return Call(seq=seq, signature=self.read_signature(signature), site=found, **fields)

    def read_calls(
        self,
        uid: int,
        now_ns: int,
        *,
        max_calls: int = 64,
        from_seq: int = 0,
        to_seq: float = inf,
        step: int = 1,
    ) -> list[Call]:
        """The last calls of a stream in the ring up to ``to_seq`` at multiples of ``step``, oldest
        first.
        """
        if uid > communicators.FIRST_UID:
            found = self._read_communicator_calls(now_ns).get(uid, [])
            chosen = [c for c in found if from_seq <= c.seq <= to_seq and c.seq % step == 0]
            return [call.make_call(now_ns) for call in chosen[-max_calls:]]
        calls: list[Call] = []
        for record in self._iter_newest_first():
            if record[UID] != uid:
                continue
            seq = record[SEQ]
            if seq < from_seq:
                break
            if seq % step == 0 and seq <= to_seq:
                if len(calls) >= max_calls and not record[FLAGS] & _RETRACTED:
                    break
                self._add_older_call(calls, record, now_ns)
        calls.reverse()
        return calls

    def read_last_calls(self, now_ns: int) -> dict[int, list[Call]]:
        """The last calls of each stream by uid, oldest first, in one pass, for an exited rank."""
        calls_by_uid: dict[int, list[Call]] = {}
        for record in self._iter_newest_first():
            calls = calls_by_uid.setdefault(record[UID], [])
            if len(calls) < _MAX_LAST_CALLS or record[FLAGS] & _RETRACTED:
                self._add_older_call(calls, record, now_ns)
        last_calls = {uid: calls[::-1] for uid, calls in calls_by_uid.items()}
        for uid, found in self._read_communicator_calls(now_ns).items():
            last_calls[uid] = [call.make_call(now_ns) for call in found]
        return last_calls

    def _add_older_call(self, calls: list[Call], record: Record, now_ns: int) -> None:
        """Adds the call of a record to the later calls of its stream, newest first. A retracted call
        is added to the one that got its number, if any did.
        """
        if not record[FLAGS] & _RETRACTED:
            calls.append(self._decode_record(record, now_ns))
        elif calls and calls[-1].seq == record[SEQ] and calls[-1].preceded_by is None:
            retracted = self._decode_record(record, now_ns)
            calls[-1] = replace(calls[-1], preceded_by=retracted)

    def read_newest_call(self, now_ns: int) -> Call | None:
        """The newest call of all streams; None if there is none in the ring."""
        for record in self._iter_newest_first():
            return self._decode_record(record, now_ns)
        return None

    def read_callers(self) -> tuple[Caller, ...]:
        """The threads that made the calls in the ring; the one of the newest call comes first."""
        uids_by_thread: dict[int, list[int]] = {}
        seen_uids: set[int] = set()
        for record in self._iter_newest_first():
            uids = uids_by_thread.setdefault(record[THREAD], [])
            if record[UID] not in seen_uids:
                seen_uids.add(record[UID])
                uids.append(record[UID])
        return tuple(
            Caller(thread=thread, uids=tuple(uids)) for thread, uids in uids_by_thread.items()
        )

    def _iter_newest_first(self) -> Iterator[Record]:
        """All whole records in the ring."""
        written = self.count_records()
        oldest = max(0, written - self.record_capacity)
        for index in range(written - 1, oldest - 1, -1):
            record = self.read_record(index)
            if record is not None:
                yield record

    def read_delta(self, from_index: int) -> RingDelta:
        """The calls of all streams in the records from ``from_index`` on, in one pass, and the last
        ones of communicators that torch does not know.
        """
        written = self.count_records()
        from_index = max(0, from_index)
        first_index = max(0, from_index - _RETRACTION_WINDOW)
        records = []
        retracted = {}
        for record in self.read_records(first_index, written):
            if record[FLAGS] & _RETRACTED:
                retracted[record[STAMP] - 1] = record[UID], record[SEQ]
            elif record[STAMP] > from_index:
                records.append(record)
        chains: dict[int, dict[int, int]] = {}
        newest_signatures = {}
        first_concurrent: dict[int, int] = {}
        for record in records:
            uid = record[UID]
            chains.setdefault(uid, {})[record[SEQ]] = record[CHAIN]
            newest_signatures[uid] = record[SIGNATURE]
            if record[FLAGS] & _SHARED:
                first_concurrent.setdefault(uid, record[SEQ])
        newest_ops = {
            uid: self.read_signature(number).op for uid, number in newest_signatures.items()
        }
        for uid, calls in self._read_communicator_calls(0).items():
            if calls:
                chains[uid] = {call.seq: call.chain for call in calls}
                newest_ops[uid] = calls[-1].make_call(0).signature.op
        return RingDelta(
            next_index=written,
            chains=chains,
            newest_ops=newest_ops,
            first_concurrent=first_concurrent,
            records=tuple(records),
            retracted=retracted,
        )

    def read_entry(self, index: int, now_ns: int) -> RecordEntry | None:
        """One decoded record; None while it is being written and once it is overwritten."""
        record = self.read_record(index)
        if record is None:
            return None
        completed = None if record[COMPLETED] == layout.UNKNOWN_COMPLETED else record[COMPLETED]
        call = self._decode_record(record, now_ns)
        return RecordEntry(record[UID], record[ENTERED_NS], completed, call)

    def _decode_record(self, record: Record, now_ns: int) -> Call:
        _, entered_ns, done_ns, seq, chain, _, _, _, signature, site, thread, flags, *_ = record
        blocking = None  # The recorder could not find out.
        if flags & RecordFlag.BLOCKING:
            blocking = True
        elif flags & RecordFlag.ASYNC:
            blocking = False
        return self.make_call(
            seq,
            signature,
            site,
            chain=chain,
            entered_s=parts.compute_age_s(now_ns, entered_ns),
            duration_s=max(0, done_ns - entered_ns) / 1e9 if done_ns else None,
            blocking=blocking,
            thread=thread,
            raised=bool(flags & RecordFlag.RAISED),
        )
