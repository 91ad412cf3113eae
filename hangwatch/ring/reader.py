"""Reads a ring and validates everything in it. `hangwatch.ring.layout` documents the layout.

The position of a stream is read from the stream table, which the recorder updates when it polls, and
from the records written since.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from hangwatch.model.calls import Call, Loss, LossReason, Signature, Site

from . import layout, parts
from .layout import STREAM_STRUCT, DeviceStatusState, LiveWord, RecordFlag, RingError, unpack_loss
from .parts import CHAIN, COMPLETED, ENTERED_NS, FLAGS, SEQ, SIGNATURE, STAMP, THREAD, UID, Record

# Plain integers, because the & operator of an enum is slow.
_BLOCKING = int(RecordFlag.BLOCKING)
_ASYNC = int(RecordFlag.ASYNC)
_RAISED = int(RecordFlag.RAISED)
_SHARED = int(RecordFlag.SHARED)
_RETRACTED = int(RecordFlag.RETRACTED)

# A stream is dormant as long as all its calls are complete. Where completion is unknown, it is once
# its newest call is that old: by then the call has been reported as one that may be unfinished.
DORMANT_AFTER_S = 10.0
_CHUNK_SLOTS = 16
_CHUNK_SLOT_BYTES = _CHUNK_SLOTS * STREAM_STRUCT.size
_CHUNK_LOSS_BYTES = _CHUNK_SLOTS * layout.LOSS_STRUCT.size
# The last records that are read again, since a call may be retracted after it was read.
_RETRACTION_WINDOW = 64
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSnapshot:
    """The content of a ring at one moment, without its calls. Times are ages in seconds."""

    identity: dict[str, Any] = field(default_factory=dict)
    lifecycle: int = 0
    step: int | None = None
    pulse_s: float = 0.0
    phase: str | None = None
    phase_s: float = 0.0
    phase_limit_s: float | None = None
    dropped: int = 0
    streams: tuple[StreamState, ...] = ()
    exception: dict[str, Any] | None = None
    faults: tuple[str, ...] = ()
    device_status: DeviceStatusState = DeviceStatusState.UNKNOWN
    device_entries: tuple[parts.DeviceEntry, ...] = ()
    # The last of the streams, which have no unfinished call. Their ages are those of the time at which
    # each was read.
    dormant_streams: tuple[StreamState, ...] = ()
    # The same streams, in parts that stay the same object as long as none of its streams changes.
    dormant_chunks: tuple[tuple[StreamState, ...], ...] = ()
    read_ns: int = 0
    opened: int = 0  # streams ever opened
    torn_parts: int = 0  # streams left out because they kept changing or are invalid

    @property
    def active_streams(self) -> tuple[StreamState, ...]:
        """The streams that are not dormant."""
        return self.streams[: len(self.streams) - len(self.dormant_streams)]

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
    # An upper bound of the call's duration in seconds, see `hangwatch.ring.tracing`; None if it may
    # be unfinished.
    within_s: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the call is known to be unfinished."""
        return self.within_s is None and self.completed is not None


@dataclass(slots=True)
class _Chunk:
    """Adjacent slots. ``dormant`` has their streams if all are, while ``content`` is the same."""

    content: tuple[bytes, bytes] = (b"", b"")  # the bytes of the slots and of their losses
    dormant: tuple[StreamState, ...] | None = None


class RingReader(parts.RingParts):
    """Reads a mapped ring. Invalid parts are omitted and counted; an invalid header or a missing
    identity raises RingError.

    ``data`` is any bytes-like object that supports slicing, usually an mmap of the file with this
    ``inode``. Descriptions, signatures and sites are cached, because uids and numbers are not reused,
    and so are the states of dormant streams: a process may have thousands of channels, of which it
    uses a few.
    """

    def __init__(self, data: Any, inode: int = 0) -> None:
        super().__init__(data)
        self.inode = inode
        self._descriptions_by_uid: dict[int, parts.StreamDescription] = {}
        self._chunks: list[_Chunk] = []
        self._chunks_by_uid: dict[int, int] = {}
        self._dormant: tuple[StreamState, ...] = ()
        self._dormant_chunks: tuple[tuple[StreamState, ...], ...] = ()
        self._known_signatures: dict[int, Signature] = {}
        self._known_sites: dict[int, Site | None] = {}

    @property
    def record_capacity(self) -> int:
        """The number of records that the ring can hold."""
        return self.records.count

    def read_snapshot(self, now_ns: int) -> RingSnapshot:
        """Reads everything but the calls. Raises RingError if the identity cannot be read."""
        identity = self.read_note(layout.IDENTITY_OFFSET, layout.IDENTITY_SIZE)
        if identity is None:
            raise RingError("no identity in it: its process is still creating it, or died doing so")
        written = self.count_records()
        words = self.read_live_words()
        streams, torn_parts = self._read_streams(written, now_ns)
        faults = self.read_note(layout.FAULTS_OFFSET, layout.NOTE_SIZE) or {}
        device_status, device_entries = self._read_devices(words)
        phase_number = words[LiveWord.PHASE]  # The phase's name is interned like a site.
        phase = self.read_interned(self.sites, phase_number) if phase_number else None
        step, phase_limit_ns = words[LiveWord.STEP], words[LiveWord.PHASE_LIMIT_NS]
        return RingSnapshot(
            identity=identity,
            lifecycle=words[LiveWord.LIFECYCLE],
            step=step - 1 if step else None,
            pulse_s=parts.compute_age_s(now_ns, words[LiveWord.PULSE_NS]),
            phase=str(phase.get("phase")) if phase else None,
            phase_s=parts.compute_age_s(now_ns, words[LiveWord.PHASE_NS]),
            phase_limit_s=phase_limit_ns / 1e9 if phase_limit_ns else None,
            dropped=words[LiveWord.DROPPED],
            streams=streams,
            dormant_streams=self._dormant,
            dormant_chunks=self._dormant_chunks,
            exception=self.read_note(layout.EXCEPTION_OFFSET, layout.NOTE_SIZE),
            faults=tuple(str(line) for line in faults.get("lines", ())),
            device_status=device_status,
            device_entries=device_entries,
            read_ns=now_ns,
            opened=words[LiveWord.OPENED],
            torn_parts=torn_parts,
        )

    def read_positions(
        self, now_ns: int
    ) -> tuple[Sequence[StreamState], tuple[parts.DeviceEntry, ...]]:
        """The positions of all streams, and of their devices: a part of what a snapshot has."""
        streams, _ = self._read_streams(self.count_records(), now_ns)
        return streams, self._read_devices(self.read_live_words())[1]

    def _read_devices(
        self, words: tuple[int, ...]
    ) -> tuple[DeviceStatusState, tuple[parts.DeviceEntry, ...]]:
        try:
            status = DeviceStatusState(words[LiveWord.DEVICE_STATUS])
        except ValueError:  # The writer is newer.
            status = DeviceStatusState.UNKNOWN
        is_reported = status is DeviceStatusState.REPORTED
        return status, parts.read_device_entries(self.data) if is_reported else ()

    def _read_streams(self, written: int, now_ns: int) -> tuple[tuple[StreamState, ...], int]:
        """All streams, the dormant ones last, and how many were left out. ``written`` is the number of
        records written so far.
        """
        polled = self.read_live_word(LiveWord.RECORDS)
        # The newest record of each stream since the last poll, by uid.
        newest_records = {
            record[UID]: record
            for record in self.read_records(polled, written)
            if not record[FLAGS] & _RETRACTED
        }
        slot_count = min(self.read_live_word(LiveWord.SEQUENCES), self.streams.count)
        slots = self._copy_bytes(self.streams.offset, slot_count * STREAM_STRUCT.size)
        losses = self._copy_bytes(self.losses.offset, slot_count * layout.LOSS_STRUCT.size)
        chunk_count = -(-slot_count // _CHUNK_SLOTS)
        self._chunks += [_Chunk() for _ in range(chunk_count - len(self._chunks))]
        called = {self._chunks_by_uid.get(uid) for uid in newest_records}
        active: list[StreamState] = []
        torn_count = 0
        has_changed = False
        for number, chunk in enumerate(self._chunks[:chunk_count]):
            content = (
                slots[number * _CHUNK_SLOT_BYTES : (number + 1) * _CHUNK_SLOT_BYTES],
                losses[number * _CHUNK_LOSS_BYTES : (number + 1) * _CHUNK_LOSS_BYTES],
            )
            if chunk.dormant is not None and chunk.content == content and number not in called:
                continue
            states: list[StreamState] = []
            first = number * _CHUNK_SLOTS
            for slot in range(first, min(first + _CHUNK_SLOTS, slot_count)):
                state = self._read_stream(slot, newest_records, now_ns)
                if isinstance(state, StreamState):
                    states.append(state)
                    self._chunks_by_uid[state.uid] = number
                else:
                    torn_count += state
            has_changed |= chunk.dormant is not None
            chunk.content, chunk.dormant = content, None
            if all(map(_is_dormant, states)) and not torn_count:
                chunk.dormant, has_changed = tuple(states), True
            else:
                active += states
        if has_changed:
            self._dormant_chunks = tuple([chunk.dormant or () for chunk in self._chunks])
            self._dormant = tuple(itertools.chain.from_iterable(self._dormant_chunks))
            self._forget_closed_streams(active)
        return (*active, *self._dormant), torn_count

    def _forget_closed_streams(self, active: list[StreamState]) -> None:
        """Drops what is cached of closed streams, once that is about half."""
        known_count = len(active) + len(self._dormant)
        if len(self._descriptions_by_uid) > 2 * known_count + 2 * _CHUNK_SLOTS:
            known = {state.uid for state in (*active, *self._dormant)}
            for cache in (self._descriptions_by_uid, self._chunks_by_uid):
                for uid in cache.keys() - known:
                    del cache[uid]

    def _read_stream(
        self, slot: int, newest_records: dict[int, Record], now_ns: int
    ) -> StreamState | int:
        """One stream; otherwise the number of torn parts: 1 if it is torn, 0 if the slot is free."""
        data, offset = self.data, self.streams.offset + slot * STREAM_STRUCT.size
        for _ in range(parts.READ_ATTEMPTS):
            values = STREAM_STRUCT.unpack_from(data, offset)
            if STREAM_STRUCT.unpack_from(data, offset) != values:
                continue
            uid, length, heap_offset = values[5:]
            if not uid:
                return 0
            description = self._descriptions_by_uid.get(uid)
            if description is None:
                document = self.read_heap(heap_offset, length)
                description = parts.parse_description(document) if document else None
                if description is None:
                    return 1
                self._descriptions_by_uid[uid] = description
            loss_offset = self.losses.offset + slot * layout.LOSS_STRUCT.size
            from_seq, reason = unpack_loss(*layout.LOSS_STRUCT.unpack_from(data, loss_offset))
            if STREAM_STRUCT.unpack_from(data, offset)[5] == uid:
                break  # Otherwise another stream has taken the slot.
        else:
            return 1
        completed, pending_ns, entered, chain, entered_ns = values[:5]
        newest = newest_records.get(uid)
        if newest is not None and newest[SEQ] > entered:
            entered_ns, entered, chain = newest[ENTERED_NS], newest[SEQ], newest[CHAIN]
            if completed != layout.UNKNOWN_COMPLETED:
                completed = max(completed, min(newest[COMPLETED], entered))
        is_pending = completed != layout.UNKNOWN_COMPLETED and completed < entered
        oldest_ns = entered_ns if completed + 1 == entered or not pending_ns else pending_ns
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
            pending_s=parts.compute_age_s(now_ns, oldest_ns) if is_pending else None,
            loss=Loss(from_seq, LossReason.from_number(reason)) if from_seq else None,
            read_ns=now_ns,
        )

    def read_signature(self, number: int) -> Signature:
        """The signature with the number that a record refers to; operation "?" if it is lost."""
        known = self._known_signatures
        return self._read_known(known, self.signatures, number, parts.parse_signature)

    def _read_known(
        self,
        known: dict[int, Interned],
        table: parts.Table,
        number: int,
        parse: Callable[[dict[str, Any] | None], Interned],
    ) -> Interned:
        """The signature or site with this number, which is parsed once."""
        if number in known:
            return known[number]
        data = self.read_interned(table, number)
        parsed = parse(data)
        if data is not None:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            known[number] = parsed
        return parsed

    def make_call(self, seq: int, signature: int, site: int, **fields: Any) -> Call:
        """A call, from the numbers of its signature and site and the remaining fields of `Call`."""
        known_site = None
        if site:
            known_site = self._read_known(self._known_sites, self.sites, site, parts.parse_site)
        return Call(seq=seq, signature=self.read_signature(signature), site=known_site, **fields)

    def read_calls(
        self,
        uid: int,
        now_ns: int,
        *,
        max_calls: int = 64,
        from_seq: int = 0,
        to_seq: int | None = None,
        step: int = 1,
    ) -> list[Call]:
        """The last calls of one stream that are still in the ring, oldest first: those up to number
        ``to_seq`` at multiples of ``step``.
        """
        calls: list[Call] = []
        for record in self._iter_newest_first():
            if record[UID] != uid:
                continue
            seq = record[SEQ]
            if seq < from_seq:
                break
            if seq % step or (to_seq is not None and seq > to_seq):
                continue
            if record[FLAGS] & _RETRACTED:
                self._add_retracted(record, now_ns, calls)
                continue
            if len(calls) >= max_calls:
                break
            calls.append(self._decode_record(record, now_ns))
        calls.reverse()
        return calls

    def _add_retracted(self, record: Record, now_ns: int, calls: list[Call]) -> None:
        """Adds a retracted call to the one that got its number, the last of ``calls``, if any did."""
        if calls and calls[-1].seq == record[SEQ] and calls[-1].preceded_by is None:
            retracted = self._decode_record(record, now_ns)
            calls[-1] = replace(calls[-1], preceded_by=retracted)

    def read_last_calls(self, now_ns: int, *, max_calls: int = 64) -> dict[int, list[Call]]:
        """The last calls of each stream by uid, oldest first, in one pass, for an exited rank."""
        calls_by_uid: dict[int, list[Call]] = {}
        for record in self._iter_newest_first():
            calls = calls_by_uid.setdefault(record[UID], [])
            if record[FLAGS] & _RETRACTED:
                self._add_retracted(record, now_ns, calls)
            elif len(calls) < max_calls:
                calls.append(self._decode_record(record, now_ns))
        return {uid: calls[::-1] for uid, calls in calls_by_uid.items()}

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
        """The calls of all streams in the records from ``from_index`` on, in one pass."""
        written = self.count_records()
        from_index = max(0, from_index)
        first_index = max(0, from_index - _RETRACTION_WINDOW)
        records: list[Record] = []
        retracted: dict[int, tuple[int, int]] = {}
        for record in self.read_records(first_index, written):
            if record[FLAGS] & _RETRACTED:
                retracted[record[STAMP] - 1] = record[UID], record[SEQ]
            elif record[STAMP] > from_index:
                records.append(record)
        chains: dict[int, dict[int, int]] = {}
        newest_signatures: dict[int, int] = {}
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
        if flags & _BLOCKING:
            blocking = True
        elif flags & _ASYNC:
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
            raised=bool(flags & _RAISED),
        )


def _is_dormant(state: StreamState) -> bool:
    if state.completed is not None or not state.entered:
        return state.pending_s is None
    return state.entered_s >= DORMANT_AFTER_S
