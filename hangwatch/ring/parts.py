"""Reads the raw parts of a ring, and decodes those that are JSON: live words, notes, records, interned
entries, the heap and the device table.

Each part is read so that a concurrent write is noticed. `hangwatch.ring.layout` documents the
layout.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import UNKNOWN_OP, Signature, Site, StreamKind, decode_signature
from hangwatch.model.groups import DeviceCounters, Group, unpack_ranks

from . import layout
from .layout import RECORD_STRUCT, LiveWord, RingError

# A part that keeps changing is read at most this many times.
READ_ATTEMPTS = 8

Record = tuple[int, ...]  # unpacked with `RECORD_STRUCT`
# Indices of the fields of a record.
STAMP, ENTERED_NS, DONE_NS, SEQ, CHAIN, COMPLETED = range(6)
UID, SIGNATURE, THREAD, FLAGS = 7, 8, 10, 11


@dataclass(frozen=True, slots=True)
class Table:
    """The position of a table in the file. The heap is a table of bytes."""

    offset: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """What never changes about a stream."""

    kind: StreamKind
    group: Group
    # A global rank, or a number in a foreign group; -1: any source; None: a stream of collectives
    peer: int | None
    tag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry(DeviceCounters):
    """The counters of one group in the ring."""

    uid: int  # the group's stream of collectives
    read_ns: int  # when the counters were read, on the host's monotonic clock


class RingParts:
    """A mapped ring whose header is valid."""

    def __init__(self, data: Any) -> None:
        """``data`` is bytes-like, and can be sliced. Raises RingError if its header is invalid."""
        self.data = data
        # The lock of each note when it was last read, and its content, by the offset of the note.
        self._notes: dict[int, tuple[int, dict[str, Any]]] = {}
        size = len(data)
        header_size = layout.HEADER_SIZE
        if size < header_size:
            raise RingError(f"truncated: {size} bytes, and the header alone takes {header_size}")
        magic, version, header, file_size, *rest = layout.TABLES_STRUCT.unpack_from(data, 0)
        if magic != layout.MAGIC:
            raise RingError(f"not a ring: it begins with {bytes(magic)!r}")
        if version != layout.LAYOUT_VERSION or header != header_size:
            raise RingError(
                f"written in layout {version}, and this hangwatch reads {layout.LAYOUT_VERSION}:"
                " install one version on the whole node"
            )
        if file_size > layout.MAX_FILE_BYTES or file_size > size:
            raise RingError(f"truncated: {size} bytes of {file_size}")
        tables = [Table(rest[i], rest[i + 1]) for i in range(0, 10, 2)]
        tables.append(Table(self.read_live_word(LiveWord.LOSSES), tables[0].count))
        strides = (
            layout.STREAM_STRUCT.size,
            RECORD_STRUCT.size,
            layout.INTERNED_SIZE,
            layout.INTERNED_SIZE,
            1,
            layout.LOSS_STRUCT.size,
        )
        for table, stride in zip(tables, strides, strict=True):
            end = table.offset + table.count * stride
            if table.offset < header_size or table.count < 1 or end > file_size:
                raise RingError(
                    f"corrupt: a table of {table.count} x {stride} bytes at {table.offset} lies"
                    " outside the file"
                )
        self.streams, self.records, self.signatures, self.sites, self.heap, self.losses = tables
        self.pid, _, self.start_ticks = rest[10:13]
        # The check table is behind the heap; without checks it has no entries.
        checks_offset = self.heap.offset + self.heap.count
        self.checks = Table(checks_offset, (file_size - checks_offset) // layout.CHECK_STRUCT.size)

    def read_live_words(self) -> tuple[int, ...]:
        """All live words, by their index. Each is from a moment of its own."""
        return layout.LIVE_STRUCT.unpack_from(self.data, layout.LIVE_OFFSET)

    def read_live_word(self, word: LiveWord) -> int:
        offset = layout.LIVE_OFFSET + 8 * word
        return int.from_bytes(self.data[offset : offset + 8], "little")

    def read_note(self, offset: int, max_size: int) -> dict[str, Any] | None:
        """A part of the header that is guarded by a lock; None if absent or unreadable."""
        for _ in range(READ_ATTEMPTS):
            lock, length = layout.NOTE_STRUCT.unpack_from(self.data, offset)
            if lock % 2 or not length or length > max_size - layout.NOTE_STRUCT.size:
                continue
            cached = self._notes.get(offset)
            if cached is not None and cached[0] == lock:
                return cached[1]
            raw = self._copy_bytes(offset + layout.NOTE_STRUCT.size, length)
            if layout.NOTE_STRUCT.unpack_from(self.data, offset)[0] == lock:
                content = parse_object(raw)
                if content is not None:
                    self._notes[offset] = lock, content
                return content
        return None

    def count_records(self) -> int:
        """The number of records written so far: the header's count dates from the last poll."""
        written = self.read_live_word(LiveWord.RECORDS)
        while (stamp := self.read_stamp(self.records, RECORD_STRUCT, written)) > written:
            written = stamp
        return written

    def has_record(self, index: int) -> bool:
        """The record with this index was written, or is being written. It may have been overwritten."""
        return self.read_stamp(self.records, RECORD_STRUCT, index) > index

    def read_stamp(self, table: Table, entry_struct: struct.Struct, index: int) -> int:
        """Index + 1 of the record, or the entry of the check table, in the slot of ``index``."""
        offset = table.offset + (index % table.count) * entry_struct.size
        return int.from_bytes(self.data[offset : offset + 8], "little")

    def read_stamped(
        self, table: Table, entry_struct: struct.Struct, index: int
    ) -> tuple[Any, ...] | None:
        """A record or a check entry; None while it is being written and once it is overwritten."""
        offset = table.offset + (index % table.count) * entry_struct.size
        values = entry_struct.unpack_from(self.data, offset)
        if values[0] != index + 1 or values[-1] != values[0] & 0xFFFFFFFF:
            return None
        # Read the stamp again: the slot may have been reused meanwhile.
        return values if self.read_stamp(table, entry_struct, index) == index + 1 else None

    def read_record(self, index: int) -> Record | None:
        """One record; None while it is being written and after it was overwritten."""
        return self.read_stamped(self.records, RECORD_STRUCT, index)

    def read_records(self, first: int, end: int) -> list[Record]:
        """The records from ``first`` up to ``end`` that are whole and still in the ring, oldest
        first. They are copied at once: one by one, they take several times as long.
        """
        first = max(first, end - self.records.count)
        records: list[Record] = []
        while first < end:
            slot = first % self.records.count
            count = min(end - first, self.records.count - slot)
            offset = self.records.offset + slot * RECORD_STRUCT.size
            size = count * RECORD_STRUCT.size
            raw = self._copy_bytes(offset, size)
            if self._copy_bytes(offset, size) == raw:
                records += [
                    record
                    for stamp, record in enumerate(RECORD_STRUCT.iter_unpack(raw), first + 1)
                    if record[0] == stamp and record[-1] == stamp & 0xFFFFFFFF
                ]
            else:  # written meanwhile
                records += filter(None, map(self.read_record, range(first, first + count)))
            first += count
        return records

    def read_interned(self, table: Table, number: int) -> dict[str, Any] | None:
        """An entry of the signature or site table; None if it was overwritten."""
        offset = table.offset + (number % table.count) * layout.INTERNED_SIZE
        slot_number, length = layout.INTERNED_STRUCT.unpack_from(self.data, offset)
        if slot_number != number or length > layout.INTERNED_SIZE - layout.INTERNED_STRUCT.size:
            return None
        raw = self._copy_bytes(offset + layout.INTERNED_STRUCT.size, length)
        # Read the number again: the slot may have been reused meanwhile.
        if layout.INTERNED_STRUCT.unpack_from(self.data, offset)[0] != number:
            return None
        return parse_object(raw)

    def read_heap(self, offset: int, length: int) -> dict[str, Any] | None:
        """The JSON object at ``offset`` of the heap; None if it is outside or malformed."""
        if length > self.heap.count or offset > self.heap.count - length:
            return None
        return parse_object(self._copy_bytes(self.heap.offset + offset, length))

    def _copy_bytes(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


def compute_age_s(now_ns: int, then_ns: int) -> float:
    """The seconds since ``then_ns``; 0 if that is unset or in the future."""
    return max(0, now_ns - then_ns) / 1e9 if then_ns else 0.0


def parse_object(raw: bytes) -> dict[str, Any] | None:
    """A JSON object; None if the bytes are anything else."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def parse_description(data: dict[str, Any]) -> StreamDescription | None:
    """The description of a stream; None if it is malformed."""
    try:
        group = Group(
            name=str(data["name"]),
            desc=str(data["desc"]),
            ranks=unpack_ranks(str(data["ranks"])),
            backend=str(data.get("backend", "")),
            generation=int(data.get("generation", 1)),
            world_size=int(data.get("world", 0)),
            foreign=str(data.get("foreign", "")),
            number=int(data.get("number", -1)),
        )
        peer, tag = data.get("peer"), data.get("tag")
        return StreamDescription(
            kind=StreamKind(data["kind"]),
            group=group,
            peer=None if peer is None else int(peer),
            tag=None if tag is None else int(tag),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def parse_site(data: dict[str, Any] | None) -> Site | None:
    """A call site; None if it is lost or malformed."""
    if not data:
        return None
    try:
        return Site(file=str(data["file"]), line=int(data["line"]), function=str(data["function"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def parse_signature(data: dict[str, Any] | None) -> Signature:
    """A lost or malformed signature becomes operation "?", which never counts as different."""
    if not data:
        return Signature(op=UNKNOWN_OP)
    try:
        return decode_signature(data)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return Signature(op=UNKNOWN_OP)


def read_device_entries(data: Any) -> tuple[DeviceEntry, ...]:
    """The entries in a mapped ring, in the order of their creation, without those being written."""
    entries: list[DeviceEntry] = []
    for slot in range(layout.DEVICE_SLOTS):
        offset = layout.DEVICE_OFFSET + slot * layout.DEVICE_STRUCT.size
        for _ in range(READ_ATTEMPTS):
            values = layout.DEVICE_STRUCT.unpack_from(data, offset)
            lock, uid, records_starts, enqueued, started, completed, read_ns = values
            if not lock:  # slots are used in order
                return tuple(entries)
            if lock % 2 == 0 and layout.DEVICE_STRUCT.unpack_from(data, offset) == values:
                entry = DeviceEntry(
                    uid=uid,
                    enqueued=enqueued,
                    started=started if records_starts else None,
                    completed=completed,
                    read_ns=read_ns,
                )
                entries.append(entry)
                break
    return tuple(entries)
