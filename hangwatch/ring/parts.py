"""Reads the raw parts of a ring, so that concurrent writes are noticed, and decodes their JSON: live
words, notes, records, interned entries, the heap and the device table.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import UNKNOWN_OP, JsonObject, Signature, Site, StreamKind, decode_fields
from hangwatch.model.groups import DeviceCounters, Group, pack_ranks, unpack_ranks

from . import layout
from .layout import HEADER_SIZE, LiveWord, RingError, Table

# A part that keeps changing is read at most this many times.
READ_ATTEMPTS = 8

Record = tuple[int, ...]  # unpacked with the format of `layout.RECORDS`
# Indices of the fields of a record.
STAMP, ENTERED_NS, DONE_NS, SEQ, CHAIN, COMPLETED = range(6)
UID, SIGNATURE, THREAD, FLAGS = 7, 8, 10, 11
# The errors that decoding raises for JSON that no writer writes.
MALFORMED_ERRORS = (KeyError, TypeError, ValueError, IndexError, OverflowError)
LOST_SIGNATURE = Signature(op=UNKNOWN_OP)  # it never counts as different

# Each channel of a group describes all of its members, which may be thousands.
_pack_ranks_cached = functools.lru_cache(maxsize=8)(pack_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """What never changes about a stream."""

    kind: StreamKind
    group: Group
    # A global rank, or a number in a foreign group; `ANY_SOURCE`; `encode_invalid_peer` of an argument that
    # is neither; None: a stream of collectives
    peer: int | None = None
    tag: int | None = None


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
        self._known_notes: dict[int, tuple[int, JsonObject]] = {}
        size = len(data)
        if size < HEADER_SIZE:
            raise RingError(f"truncated: {size} bytes, and the header alone takes {HEADER_SIZE}")
        magic, version, header_size, file_size, *numbers = layout.TABLES_STRUCT.unpack_from(data, 0)
        if magic != layout.MAGIC:
            raise RingError(f"not a ring: it begins with {bytes(magic)!r}")
        if version != layout.LAYOUT_VERSION or header_size != HEADER_SIZE:
            raise RingError(
                f"written in layout {version}, and this hangwatch reads {layout.LAYOUT_VERSION}:"
                " install one version on the whole node"
            )
        if file_size > layout.MAX_FILE_BYTES or file_size > size:
            raise RingError(f"truncated: {size} bytes of {file_size}")
        *positions, self.pid, _, self.start_ticks = numbers
        # The loss table has a slot for each slot of the first table.
        positions += [self.read_live_word(LiveWord.LOSSES), positions[1]]
        tables = []
        for known in (*layout.HEADER_TABLES, layout.LOSSES):
            table = Table(positions.pop(0), positions.pop(0), known.slot)
            if table.offset < HEADER_SIZE or table.count < 1 or table.end > file_size:
                raise RingError(
                    f"corrupt: a table of {table.count} x {table.slot.size} bytes at"
                    f" {table.offset} lies outside the file"
                )
            tables.append(table)
        self.streams, self.records, self.signatures, self.sites, self.heap, self.losses = tables
        # Behind the heap are the check table and the communicator table, if the file has them.
        self.communicators_offset = self.read_live_word(LiveWord.COMMUNICATORS)
        checks_end = self.communicators_offset or file_size
        check_count = max(0, checks_end - self.heap.end) // layout.CHECKS.slot.size
        self.checks = Table(self.heap.end, check_count, layout.CHECKS.slot)

    def read_live_words(self) -> tuple[int, ...]:
        """All live words, by their index. Each is from a moment of its own."""
        return layout.LIVE_STRUCT.unpack_from(self.data, layout.LIVE_OFFSET)

    def read_live_word(self, word: LiveWord) -> int:
        return self._read_word(layout.LIVE_OFFSET + 8 * word)

    def read_note(self, note: Table) -> JsonObject | None:
        """The content of a note; None if it is absent or unreadable."""
        known_lock, known_content = self._known_notes.get(note.offset, (0, None))
        if self._read_word(note.offset) == known_lock:  # it is 0 as long as the note is absent
            return known_content
        values = self._read_locked(note, 0)
        if values is None:
            return None
        lock, length, text = values
        content = parse_object(text[:length])
        if content is not None:
            self._known_notes[note.offset] = lock, content
        return content

    def read_device_entries(self) -> tuple[DeviceEntry, ...]:
        """The entries in the order of their creation, without those that are being written."""
        entries = []
        for slot in range(layout.DEVICES.count):
            values = self._read_locked(layout.DEVICES, slot)
            if values is None:
                continue
            lock, uid, records_starts, enqueued, started, completed, read_ns = values
            if not lock:  # slots are used in order
                break
            entry = DeviceEntry(
                uid=uid,
                enqueued=enqueued,
                started=started if records_starts else None,
                completed=completed,
                read_ns=read_ns,
            )
            entries.append(entry)
        return tuple(entries)

    def _read_locked(self, table: Table, index: int) -> tuple[Any, ...] | None:
        """A slot that begins with its lock; None while it is being written."""
        offset = table.locate_slot(index)
        for _ in range(READ_ATTEMPTS):
            values = table.slot.unpack_from(self.data, offset)
            is_being_written = values[0] % 2
            if not is_being_written and table.slot.unpack_from(self.data, offset) == values:
                return values
        return None

    def count_records(self) -> int:
        """The number of records written so far: the header's count dates from the last poll."""
        written = self.read_live_word(LiveWord.RECORDS)
        data, table = self.data, self.records
        start, count, size = table.offset, table.count, table.slot.size
        while True:
            # This is `read_stamp` for each record since, without the cost of function calls.
            offset = start + written % count * size
            stamp = int.from_bytes(data[offset : offset + 8], "little")
            if stamp <= written:
                return written
            written = stamp

    def has_record(self, index: int) -> bool:
        """The record with this index was written, or is being written. It may have been overwritten."""
        return self.read_stamp(self.records, index) > index

    def read_stamp(self, table: Table, index: int) -> int:
        """Index + 1 of the record, or the entry of the check table, in the slot of ``index``."""
        return self._read_word(table.locate_slot(index))

    def read_stamped(self, table: Table, index: int) -> tuple[Any, ...] | None:
        """A record or a check entry; None while it is being written and once it is overwritten."""
        offset = table.locate_slot(index)
        values = table.slot.unpack_from(self.data, offset)
        stamp = index + 1
        if values[0] != stamp or values[-1] != stamp & 0xFFFFFFFF:
            return None
        # Read the stamp again: the slot may have been reused meanwhile.
        return values if self._read_word(offset) == stamp else None

    def read_record(self, index: int) -> Record | None:
        """One record; None while it is being written and after it was overwritten."""
        return self.read_stamped(self.records, index)

    def read_records(self, first: int, end: int) -> list[Record]:
        """The records from ``first`` up to ``end`` that are whole and still in the ring, oldest
        first. They are copied together: one by one, they take several times as long.
        """
        table = self.records
        first = max(first, end - table.count)
        records: list[Record] = []
        while first < end:
            count = min(end - first, table.count - first % table.count)
            offset = table.locate_slot(first)
            size = count * table.slot.size
            raw = self._copy_bytes(offset, size)
            if self._copy_bytes(offset, size) == raw:
                records += [
                    record
                    for stamp, record in enumerate(table.slot.iter_unpack(raw), first + 1)
                    if record[0] == stamp and record[-1] == stamp & 0xFFFFFFFF
                ]
            else:  # written meanwhile
                records += filter(None, map(self.read_record, range(first, first + count)))
            first += count
        return records

    def read_interned(self, table: Table, number: int) -> JsonObject | None:
        """An entry of the signature or site table; None if it was overwritten."""
        offset = table.locate_slot(number)
        slot_number, length, text = table.slot.unpack_from(self.data, offset)
        # Read the number again: the slot may have been reused meanwhile.
        if slot_number != number or self._read_word(offset) != number:
            return None
        return parse_object(text[:length])

    def _read_word(self, offset: int) -> int:
        return int.from_bytes(self.data[offset : offset + 8], "little")

    def _copy_bytes(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


def compute_age_s(now_ns: int, then_ns: int) -> float:
    """The seconds since ``then_ns``; 0 if that is unset or in the future."""
    return max(0, now_ns - then_ns) / 1e9 if then_ns else 0.0


def parse_object(raw: bytes) -> JsonObject | None:
    """A JSON object; None if the bytes are anything else."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def encode_description(
    kind: StreamKind, group: Group, peer: int | None, tag: int | None
) -> JsonObject:
    """The JSON data of a `StreamDescription`; `parse_description` is the inverse."""
    data: JsonObject = {
        "kind": kind.value,
        "name": group.name,
        "desc": group.desc,
        "backend": group.backend,
        "ranks": _pack_ranks_cached(group.ranks),
        "generation": group.generation,
        "world": group.world_size,
    }
    if group.foreign:
        data |= {"foreign": group.foreign, "number": group.number}
    if peer is not None:
        data |= {"peer": peer, "tag": tag}
    return data


def parse_description(raw: bytes) -> StreamDescription | None:
    """The description of a stream; None if it is malformed."""
    data = parse_object(raw) or {}
    data["world_size"] = data.get("world", 0)
    try:
        kind = StreamKind(data["kind"])
        ranks = unpack_ranks(str(data["ranks"]))
        group = Group(ranks=ranks, **decode_fields(Group, data))
        return StreamDescription(kind=kind, group=group, **decode_fields(StreamDescription, data))
    except MALFORMED_ERRORS:
        return None


def parse_site(data: JsonObject | None) -> Site | None:
    """A call site; None if it is lost or malformed."""
    try:
        return Site(**decode_fields(Site, data or {}))
    except MALFORMED_ERRORS:
        return None
