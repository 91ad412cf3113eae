"""Reads a ring and validates everything in it. `hangwatch.ring.layout` documents the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hangwatch.model.calls import Call, Signature

from .call_decoder import CallDecoder, CallKinds
from .decoding import compute_age_s
from .devices import DeviceEntry, read_device_entries
from .layout import (
    EXCEPTION_OFFSET,
    FAULTS_OFFSET,
    IDENTITY_OFFSET,
    IDENTITY_SIZE,
    NOTE_SIZE,
    UNKNOWN_COMPLETED,
    DeviceStatusState,
    LiveWord,
    RecordFlag,
    RingError,
)
from .parts import (
    CHAIN,
    COMPLETED,
    ENTERED_NS,
    FLAGS,
    SEQ,
    SIGNATURE,
    STAMP,
    THREAD,
    UID,
    Record,
    RingParts,
)
from .snapshot import Caller, RecordEntry, RingDelta, RingSnapshot, StreamState
from .stream_table import StreamTable

# Plain integers, because the & operator of an enum is slow.
_SHARED = int(RecordFlag.SHARED)
_RETRACTED = int(RecordFlag.RETRACTED)
# Records that are read again, since a call may be retracted after it was read.
_RETRACTION_WINDOW = 64


class RingReader:
    """Reads a mapped ring. Invalid parts are omitted and counted; an invalid header or a missing
    identity raises RingError.

    ``data`` is any bytes-like object that supports slicing, usually an mmap.
    """

    __slots__ = ("_decoder", "_streams", "parts")

    def __init__(self, data: Any) -> None:
        self.parts = RingParts(data)
        self._streams = StreamTable(self.parts)
        self._decoder = CallDecoder(self.parts)

    @property
    def data(self) -> Any:
        return self.parts.data

    @property
    def record_capacity(self) -> int:
        """The number of records that the ring can hold."""
        return self.parts.records.count

    def count_records(self) -> int:
        """The number of records written so far."""
        return self.parts.count_records()

    def read_live_words(self) -> tuple[int, ...]:
        """All live words, by `LiveWord`. Each is from a moment of its own."""
        return self.parts.read_live_words()

    def has_record(self, index: int) -> bool:
        """The record with this index was written, or is being written. It may have been overwritten."""
        return self.parts.has_record(index)

    def read_snapshot(self, now_ns: int) -> RingSnapshot:
        """Reads everything but the calls. Raises RingError if the identity cannot be read."""
        identity = self.parts.read_note(IDENTITY_OFFSET, IDENTITY_SIZE)
        if identity is None:
            raise RingError("no identity in it: its process is still creating it, or died doing so")
        written = self.parts.count_records()
        words = self.parts.read_live_words()
        streams = self._streams.read_streams(written, now_ns)
        faults = self.parts.read_note(FAULTS_OFFSET, NOTE_SIZE) or {}
        device_status = _parse_device_status(words)
        step, phase_limit_ns = words[LiveWord.STEP], words[LiveWord.PHASE_LIMIT_NS]
        return RingSnapshot(
            pid=self.parts.pid,
            start_ticks=self.parts.start_ticks,
            identity=identity,
            lifecycle=words[LiveWord.LIFECYCLE],
            step=step - 1 if step else None,
            pulse_s=compute_age_s(now_ns, words[LiveWord.PULSE_NS]),
            phase=self._read_phase(words[LiveWord.PHASE]),
            phase_s=compute_age_s(now_ns, words[LiveWord.PHASE_NS]),
            phase_limit_s=phase_limit_ns / 1e9 if phase_limit_ns else None,
            record_count=written,
            dropped=words[LiveWord.DROPPED],
            errors=words[LiveWord.ERRORS],
            is_disabled=bool(words[LiveWord.OFF]),
            streams=streams.active + streams.dormant,
            dormant_streams=streams.dormant,
            dormant_chunks=streams.dormant_chunks,
            exception=self.parts.read_note(EXCEPTION_OFFSET, NOTE_SIZE),
            faults=tuple(str(line) for line in faults.get("lines", ())),
            device_status=device_status,
            device_entries=_read_devices(self.data, words),
            read_ns=now_ns,
            opened=words[LiveWord.OPENED],
            torn_parts=streams.torn_count,
        )

    def read_positions(self, now_ns: int) -> tuple[Sequence[StreamState], tuple[DeviceEntry, ...]]:
        """The positions of all streams, and of their devices: a part of what a snapshot has."""
        streams = self._streams.read_streams(self.parts.count_records(), now_ns)
        return streams.active + streams.dormant, _read_devices(
            self.data, self.parts.read_live_words()
        )

    def _read_phase(self, number: int) -> str | None:
        """The name of the declared phase, which is interned like a site."""
        data = self.parts.read_interned(self.parts.sites, number) if number else None
        return str(data.get("phase")) if data else None

    def read_record(self, index: int) -> Record | None:
        """One record; None while it is being written and after it was overwritten."""
        return self.parts.read_record(index)

    def read_signature(self, number: int) -> Signature:
        """The signature with the number that a record refers to; operation "?" if it is lost."""
        return self._decoder.read_signature(number)

    def make_call(self, seq: int, signature: int, site: int, **fields: Any) -> Call:
        """A call, from the numbers of its signature and site and the remaining fields of `Call`."""
        return self._decoder.make_call(seq, signature, site, **fields)

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
            calls.append(self._decoder.decode_record(record, now_ns))
        calls.reverse()
        return calls

    def _add_retracted(self, record: Record, now_ns: int, calls: list[Call]) -> None:
        """Adds a retracted call to the one that got its number, the last of ``calls``, if any did."""
        if calls and calls[-1].seq == record[SEQ] and calls[-1].preceded_by is None:
            retracted = self._decoder.decode_record(record, now_ns)
            calls[-1] = replace(calls[-1], preceded_by=retracted)

    def read_last_calls(self, now_ns: int, *, max_calls: int = 64) -> dict[int, list[Call]]:
        """The last calls of each stream by uid, oldest first, in one pass. Used when a process has
        exited.
        """
        calls_by_uid: dict[int, list[Call]] = {}
        for record in self._iter_newest_first():
            calls = calls_by_uid.setdefault(record[UID], [])
            if record[FLAGS] & _RETRACTED:
                self._add_retracted(record, now_ns, calls)
            elif len(calls) < max_calls:
                calls.append(self._decoder.decode_record(record, now_ns))
        return {uid: calls[::-1] for uid, calls in calls_by_uid.items()}

    def read_newest_call(self, now_ns: int) -> Call | None:
        """The newest call of all streams; None if there is none in the ring."""
        for record in self._iter_newest_first():
            return self._decoder.decode_record(record, now_ns)
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
        written = self.parts.count_records()
        oldest = max(0, written - self.record_capacity)
        for index in range(written - 1, oldest - 1, -1):
            record = self.parts.read_record(index)
            if record is not None:
                yield record

    def read_delta(self, from_index: int) -> RingDelta:
        """The calls of all streams in the records from ``from_index`` on that are still in the
        ring, in one pass.
        """
        written = self.parts.count_records()
        from_index = max(0, from_index)
        first_index = max(0, from_index - _RETRACTION_WINDOW)
        records: list[Record] = []
        retracted: dict[int, tuple[int, int]] = {}
        for record in self.parts.read_records(first_index, written):
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
            uid: self._decoder.read_signature(number).op
            for uid, number in newest_signatures.items()
        }
        return RingDelta(
            next_index=written,
            chains=chains,
            newest_ops=newest_ops,
            first_concurrent=first_concurrent,
            records=tuple(records),
            retracted=retracted,
        )

    def read_entries(self, from_index: int, now_ns: int) -> tuple[int, list[RecordEntry | None]]:
        """The records from ``from_index`` on that are still in the ring, oldest first, preceded by
        the index of the first of them.

        None stands for a record that is being written or was overwritten while it was read.
        """
        written = self.parts.count_records()
        first = max(from_index, written - self.record_capacity, 0)
        kinds: CallKinds = {}
        entries: list[RecordEntry | None] = []
        for index in range(first, written):
            record = self.parts.read_record(index)
            if record is None:
                entries.append(None)
                continue
            completed = None if record[COMPLETED] == UNKNOWN_COMPLETED else record[COMPLETED]
            call = self._decoder.decode_record(record, now_ns, kinds)
            entries.append(RecordEntry(index, record[UID], record[ENTERED_NS], completed, call))
        return first, entries


def _read_devices(data: Any, words: tuple[int, ...]) -> tuple[DeviceEntry, ...]:
    is_reported = _parse_device_status(words) is DeviceStatusState.REPORTED
    return read_device_entries(data) if is_reported else ()


def _parse_device_status(words: tuple[int, ...]) -> DeviceStatusState:
    try:
        return DeviceStatusState(words[LiveWord.DEVICE_STATUS])
    except ValueError:  # of a newer writer
        return DeviceStatusState.UNKNOWN
