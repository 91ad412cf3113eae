"""Reads a ring and validates everything in it. `hangwatch.ring.layout` documents the layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group

from .decoding import _age_s, _parse_description, _parse_object, _parse_signature, _parse_site
from .devices import read_device_entries
from .layout import (
    EXCEPTION_OFFSET,
    FAULTS_OFFSET,
    HEADER_SIZE,
    IDENTITY_OFFSET,
    IDENTITY_SIZE,
    INTERNED_SIZE,
    INTERNED_STRUCT,
    LAYOUT_VERSION,
    LIVE_OFFSET,
    MAGIC,
    MAX_FILE_BYTES,
    NOTE_SIZE,
    NOTE_STRUCT,
    RECORD_STRUCT,
    STREAM_STRUCT,
    TABLES_STRUCT,
    UNKNOWN_COMPLETED,
    DeviceStatusState,
    LiveWord,
    RecordFlag,
    RingError,
)
from .snapshot import RecordEntry, RingDelta, RingSnapshot, StreamState

# Plain integers, because the & operator of an enum is slow.
_BLOCKING = int(RecordFlag.BLOCKING)
_ASYNC = int(RecordFlag.ASYNC)
_RAISED = int(RecordFlag.RAISED)
_SHARED = int(RecordFlag.SHARED)

_SIGNATURES_KEPT = 1024

# Indices of the fields of an unpacked record.
_ENTERED_NS, _SEQ, _CHAIN, _COMPLETED, _UID, _SIGNATURE, _FLAGS = 1, 3, 4, 5, 7, 8, 11

# A locked part that keeps changing is read at most this many times.
_READ_ATTEMPTS = 8

# By (signature number, site number).
_CallKinds = dict[tuple[int, int], tuple[Signature, "Site | None"]]


@dataclass(slots=True)
class RingReader:
    """Reads a mapped ring. Invalid parts are omitted and counted; an invalid header or a missing
    identity raises RingError.

    ``data`` is any bytes-like object that supports slicing, usually an mmap.
    """

    data: Any
    _descriptions: dict[int, tuple[StreamKind, Group, int | None, int | None]] = field(
        default_factory=dict
    )
    # By offset: the lock of a part when it was last read, and its content.
    _notes: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    # By number. Numbers are not reused.
    _known_signatures: dict[int, Signature] = field(default_factory=dict)
    _pid: int = 0
    _start_ticks: int = 0
    _stream_table: tuple[int, int] = (0, 0)
    _record_table: tuple[int, int] = (0, 0)
    _signature_table: tuple[int, int] = (0, 0)
    _site_table: tuple[int, int] = (0, 0)
    _heap: tuple[int, int] = (0, 0)
    _size: int = 0

    def __post_init__(self) -> None:
        size = len(self.data)
        if size < HEADER_SIZE:
            raise RingError(f"truncated: {size} bytes, and the header alone takes {HEADER_SIZE}")
        magic, version, header, file_size, *rest = TABLES_STRUCT.unpack_from(self.data, 0)
        if magic != MAGIC:
            raise RingError(f"not a ring: it begins with {bytes(magic)!r}")
        if version != LAYOUT_VERSION or header != HEADER_SIZE:
            raise RingError(
                f"written in layout {version}, and this hangwatch reads {LAYOUT_VERSION}: install"
                " one version on the whole node"
            )
        if file_size > MAX_FILE_BYTES or file_size > size:
            raise RingError(f"truncated: {size} bytes of {file_size}")
        tables = [(rest[i], rest[i + 1]) for i in range(0, 10, 2)]
        strides = (STREAM_STRUCT.size, RECORD_STRUCT.size, INTERNED_SIZE, INTERNED_SIZE, 1)
        for (offset, count), stride in zip(tables, strides, strict=True):
            if offset < HEADER_SIZE or count < 1 or offset + count * stride > file_size:
                raise RingError(
                    f"corrupt: a table of {count} x {stride} bytes at {offset} lies outside the"
                    " file"
                )
        (
            self._stream_table,
            self._record_table,
            self._signature_table,
            self._site_table,
            self._heap,
        ) = tables
        self._pid, _, self._start_ticks = rest[10], rest[11], rest[12]
        self._size = file_size

    def read_live_word(self, word: LiveWord) -> int:
        return int.from_bytes(
            self.data[LIVE_OFFSET + 8 * word : LIVE_OFFSET + 8 * word + 8], "little"
        )

    def read_snapshot(self, now_ns: int) -> RingSnapshot:
        """Reads everything but the calls. Raises RingError if the identity cannot be read."""
        identity = self._read_note(IDENTITY_OFFSET, IDENTITY_SIZE)
        if identity is None:
            raise RingError("no identity in it: its process is still creating it, or died doing so")
        states: list[StreamState] = []
        torn = 0
        polled, written = self.read_live_word(LiveWord.RECORDS), self.count_records()
        newest = {
            record[_UID]: record
            for i in range(max(polled, written - self._record_table[1]), written)
            if (record := self.read_record(i)) is not None
        }
        for slot in range(min(self.read_live_word(LiveWord.SEQUENCES), self._stream_table[1])):
            state = self._read_stream(slot, newest, now_ns)
            if isinstance(state, StreamState):
                states.append(state)
            else:
                torn += state
        step = self.read_live_word(LiveWord.STEP)
        faults = self._read_note(FAULTS_OFFSET, NOTE_SIZE) or {}
        limit = self.read_live_word(LiveWord.PHASE_LIMIT_NS)
        phase = self.read_live_word(LiveWord.PHASE)
        phase_data = self._read_interned(self._site_table, phase) if phase else None
        device_status = self._read_device_status()
        reports_device = device_status is DeviceStatusState.REPORTED
        return RingSnapshot(
            pid=self._pid,
            start_ticks=self._start_ticks,
            identity=identity,
            lifecycle=self.read_live_word(LiveWord.LIFECYCLE),
            step=step - 1 if step else None,
            pulse_s=_age_s(now_ns, self.read_live_word(LiveWord.PULSE_NS)),
            phase=str(phase_data.get("phase")) if phase_data else None,
            phase_s=_age_s(now_ns, self.read_live_word(LiveWord.PHASE_NS)),
            phase_limit_s=limit / 1e9 if limit else None,
            record_count=written,
            dropped=self.read_live_word(LiveWord.DROPPED),
            errors=self.read_live_word(LiveWord.ERRORS),
            is_disabled=bool(self.read_live_word(LiveWord.OFF)),
            streams=tuple(states),
            exception=self._read_note(EXCEPTION_OFFSET, NOTE_SIZE),
            faults=tuple(str(line) for line in faults.get("lines", ())),
            device_status=device_status,
            device_entries=read_device_entries(self.data) if reports_device else (),
            torn_parts=torn,
        )

    def _read_device_status(self) -> DeviceStatusState:
        try:
            return DeviceStatusState(self.read_live_word(LiveWord.DEVICE_STATUS))
        except ValueError:  # of a newer writer
            return DeviceStatusState.UNKNOWN

    def read_calls(
        self, uid: int, now_ns: int, *, max_calls: int = 64, from_seq: int = 0
    ) -> list[Call]:
        """The last calls of one stream that are still in the ring, oldest first."""
        written, count = self.count_records(), self._record_table[1]
        calls: list[Call] = []
        for index in range(written - 1, max(-1, written - count - 1), -1):
            record = self.read_record(index)
            if record is None or record[_UID] != uid:
                continue
            if record[_SEQ] < from_seq:
                break
            calls.append(self._decode_call(record, now_ns))
            if len(calls) >= max_calls:
                break
        calls.reverse()
        return calls

    def read_delta(self, from_index: int) -> RingDelta:
        """The calls of all streams in the records from ``from_index`` on that are still in the
        ring, in one pass.
        """
        written = self.count_records()
        chains: dict[int, dict[int, int]] = {}
        newest: dict[int, int] = {}
        shared: dict[int, int] = {}
        records: list[tuple[int, ...]] = []
        for index in range(max(from_index, written - self._record_table[1]), written):
            if (record := self.read_record(index)) is not None:
                chains.setdefault(record[_UID], {})[record[_SEQ]] = record[_CHAIN]
                newest[record[_UID]] = record[_SIGNATURE]
                records.append(record)
                if record[_FLAGS] & _SHARED:
                    shared.setdefault(record[_UID], record[_SEQ])
        ops = {uid: self.read_signature(number).op for uid, number in newest.items()}
        return RingDelta(
            next_index=written,
            chains=chains,
            newest_ops=ops,
            first_concurrent=shared,
            records=tuple(records),
        )

    def read_signature(self, number: int) -> Signature:
        """The signature with the number that a record refers to; operation "?" if it is lost."""
        signature = self._known_signatures.get(number)
        if signature is None:
            data = self._read_interned(self._signature_table, number)
            signature = _parse_signature(data)
            if data is not None:
                if len(self._known_signatures) >= _SIGNATURES_KEPT:
                    self._known_signatures.clear()
                self._known_signatures[number] = signature
        return signature

    @property
    def record_capacity(self) -> int:
        """The number of records that the ring can hold."""
        return self._record_table[1]

    def read_entries(self, from_index: int, now_ns: int) -> tuple[int, list[RecordEntry | None]]:
        """The records from ``from_index`` on that are still in the ring, oldest first, preceded by
        the index of the first of them.

        None stands for a record that is being written or was overwritten while it was read.
        """
        written = self.count_records()
        first = max(from_index, written - self._record_table[1], 0)
        kinds: _CallKinds = {}
        entries: list[RecordEntry | None] = []
        for index in range(first, written):
            if (record := self.read_record(index)) is None:
                entries.append(None)
                continue
            completed = None if record[_COMPLETED] == UNKNOWN_COMPLETED else record[_COMPLETED]
            call = self._decode_call(record, now_ns, kinds)
            entries.append(RecordEntry(index, record[_UID], record[_ENTERED_NS], completed, call))
        return first, entries

    def read_last_calls(self, now_ns: int, *, max_calls: int = 64) -> dict[int, list[Call]]:
        """The last calls of each stream by uid, oldest first, in one pass. Used when a process has
        exited.
        """
        written, count = self.count_records(), self._record_table[1]
        kept: dict[int, list[Call]] = {}
        for index in range(written - 1, max(-1, written - count - 1), -1):
            record = self.read_record(index)
            if record is not None and len(calls := kept.setdefault(record[_UID], [])) < max_calls:
                calls.append(self._decode_call(record, now_ns))
        return {uid: calls[::-1] for uid, calls in kept.items()}

    def locate_check_table(self, stride: int) -> tuple[int, int]:
        """The offset of the table behind the heap and its number of entries of ``stride`` bytes; 0
        entries without such a table.
        """
        offset = self._heap[0] + self._heap[1]
        return offset, (self._size - offset) // stride

    def make_call(self, seq: int, signature: int, site: int, **fields: Any) -> Call:
        """A call, from the numbers of its signature and site and the remaining fields of `Call`."""
        decoded_signature, decoded_site = self._read_call_kind(signature, site)
        return Call(seq=seq, signature=decoded_signature, site=decoded_site, **fields)

    def _read_call_kind(self, signature: int, site: int) -> tuple[Signature, Site | None]:
        site_data = self._read_interned(self._site_table, site) if site else None
        return self.read_signature(signature), _parse_site(site_data)

    def _read_note(self, offset: int, max_size: int) -> dict[str, Any] | None:
        """A part of the header that is guarded by a lock; None if absent or unreadable."""
        for _ in range(_READ_ATTEMPTS):
            lock, length = NOTE_STRUCT.unpack_from(self.data, offset)
            if lock % 2 or not length or length > max_size - NOTE_STRUCT.size:
                continue
            if (cached := self._notes.get(offset)) is not None and cached[0] == lock:
                return cached[1]
            start = offset + NOTE_STRUCT.size
            raw = bytes(self.data[start : start + length])
            if NOTE_STRUCT.unpack_from(self.data, offset)[0] == lock:
                if (content := _parse_object(raw)) is not None:
                    self._notes[offset] = lock, content
                return content
        return None

    def count_records(self) -> int:
        """The number of records written so far: the header's count dates from the last poll."""
        written = self.read_live_word(LiveWord.RECORDS)
        while (stamp := self._read_stamp(written)) > written:
            written = stamp
        return written

    def _read_stamp(self, index: int) -> int:
        """Index + 1 of the record in the slot of ``index``."""
        offset = self._record_table[0] + (index % self._record_table[1]) * RECORD_STRUCT.size
        return int.from_bytes(self.data[offset : offset + 8], "little")

    def _read_stream(
        self, slot: int, newest: dict[int, tuple[int, ...]], now_ns: int
    ) -> StreamState | int:
        """One stream; otherwise the number of torn parts: 1 if it is torn, 0 if the slot is free.

        ``newest`` holds, by uid, the newest record since the last poll: the table is older.
        """
        slot_offset = self._stream_table[0] + slot * STREAM_STRUCT.size
        for _ in range(_READ_ATTEMPTS):
            values = STREAM_STRUCT.unpack_from(self.data, slot_offset)
            completed, pending_ns, entered, chain, entered_ns, uid, length, offset = values
            if STREAM_STRUCT.unpack_from(self.data, slot_offset) != values:
                continue
            if not uid:
                return 0
            description = self._read_description(uid, offset, length)
            if description is None:
                return 1
            if (record := newest.get(uid)) is not None and record[_SEQ] > entered:
                entered_ns, entered, chain = record[_ENTERED_NS], record[_SEQ], record[_CHAIN]
                if completed != UNKNOWN_COMPLETED:
                    completed = max(completed, min(record[_COMPLETED], entered))
            pending = completed != UNKNOWN_COMPLETED and completed < entered
            oldest_ns = entered_ns if completed + 1 == entered or not pending_ns else pending_ns
            kind, group, peer, tag = description
            return StreamState(
                uid=uid,
                kind=kind,
                group=group,
                peer=peer,
                tag=tag,
                entered=entered,
                completed=None if completed == UNKNOWN_COMPLETED else min(completed, entered),
                chain=chain,
                entered_s=_age_s(now_ns, entered_ns),
                pending_s=_age_s(now_ns, oldest_ns) if pending else None,
            )
        return 1

    def _read_description(
        self, uid: int, offset: int, length: int
    ) -> tuple[StreamKind, Group, int | None, int | None] | None:
        """The description of a stream, cached because uids are not reused; None if invalid."""
        if uid not in self._descriptions:
            if length > self._heap[1] or offset > self._heap[1] - length:
                return None
            start = self._heap[0] + offset
            data = _parse_object(bytes(self.data[start : start + length]))
            try:
                self._descriptions[uid] = _parse_description(data or {})
            except (KeyError, TypeError, ValueError):
                return None
        return self._descriptions[uid]

    def read_record(self, index: int) -> tuple[int, ...] | None:
        """One record; None while it is being written and after it was overwritten."""
        record = RECORD_STRUCT.unpack_from(
            self.data, self._record_table[0] + (index % self._record_table[1]) * RECORD_STRUCT.size
        )
        whole = record[0] == index + 1 and record[-1] == record[0] & 0xFFFFFFFF
        return record if whole and self._read_stamp(index) == index + 1 else None

    def _decode_call(
        self, record: tuple[int, ...], now_ns: int, kinds: _CallKinds | None = None
    ) -> Call:
        """``kinds`` caches signatures and sites over several records."""
        _, entered_ns, done_ns, seq, chain, _, _, _, signature, site, thread, flags, _, _, _ = (
            record
        )
        kind = kinds.get((signature, site)) if kinds is not None else None
        if kind is None:
            kind = self._read_call_kind(signature, site)
            if kinds is not None:
                kinds[signature, site] = kind
        return Call(
            seq=seq,
            signature=kind[0],
            site=kind[1],
            chain=chain,
            entered_s=_age_s(now_ns, entered_ns),
            duration_s=max(0, done_ns - entered_ns) / 1e9 if done_ns else None,
            blocking=True if flags & _BLOCKING else False if flags & _ASYNC else None,
            thread=thread,
            raised=bool(flags & _RAISED),
        )

    def _read_interned(self, table: tuple[int, int], number: int) -> dict[str, Any] | None:
        offset = table[0] + (number % table[1]) * INTERNED_SIZE
        slot_number, length = INTERNED_STRUCT.unpack_from(self.data, offset)
        if slot_number != number or length > INTERNED_SIZE - INTERNED_STRUCT.size:
            return None
        start = offset + INTERNED_STRUCT.size
        raw = bytes(self.data[start : start + length])
        # Read the number again: the slot may have been reused meanwhile.
        if INTERNED_STRUCT.unpack_from(self.data, offset)[0] != number:
            return None
        return _parse_object(raw)
