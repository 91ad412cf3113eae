"""Writes the ring of one process, in the layout that `hangwatch.ring.layout` documents."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

from hangwatch.ring import layout
from hangwatch.ring.layout import RECORD_SLOTS, STREAMS, TEXT_OFFSET, LiveWord, Table
from hangwatch.ring.parts import DONE_NS, DeviceEntry

# An interned entry is written again once this many newer ones exist. Until then, no record in the
# ring refers to an entry that was overwritten.
SIGNATURE_LIFETIME_ENTRIES = layout.SIGNATURES.count - RECORD_SLOTS
SITE_LIFETIME_ENTRIES = layout.SITES.count // 2
_HEAP_UNIT = 64  # bytes: descriptions of about the same length can take each other's place
_ALLOCATION_BYTES = 1 << 16  # the amount by which a table or the heap grows
# The ring in words of 8 bytes: where the tables begin, and the sizes of their slots.
_RECORDS_WORD = layout.RECORDS.offset // 8
_RECORD_WORDS = layout.RECORDS.slot.size // 8
_STREAMS_WORD = STREAMS.offset // 8
_STREAM_WORDS = STREAMS.slot.size // 8
_LOSSES_WORD = layout.LOSSES.offset // 8
_FLAGS_OFFSET = 72  # the flags' offset in a record, in bytes

JsonObject = Mapping[str, Any]  # a note, the description of a stream, or an interned entry


class RingWriter:
    """One process's ring.

    It takes no locks: numbers come from itertools.count, and room in the tables from
    `dict.setdefault` and `list.pop`, which are atomic; the caller's thread writes its stream.
    """

    def __init__(
        self,
        path: Path,
        *,
        pid: int,
        start_ticks: int,
        has_checks: bool = False,
        has_communicators: bool = False,
    ) -> None:
        """Creates the file and allocates the blocks that every job needs, so that a full disk is an
        OSError here rather than a SIGBUS later. Further blocks are allocated before they are used.

        With ``has_checks`` the file has a check table, with ``has_communicators`` one of NCCL's
        communicators.
        """
        parts = list(layout.INITIAL_PARTS)
        size = layout.CHECKS.offset
        if has_checks:
            size = layout.CHECKS.end
            parts.append((layout.CHECKS.offset, size))
        communicators_offset = 0
        if has_communicators:
            communicators_offset = size
            size += layout.COMMUNICATORS_SIZE
            parts.append((communicators_offset, size))
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            for start, end in parts:
                os.posix_fallocate(fd, start, end - start)
            self.map = mmap.mmap(fd, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        self._words = memoryview(self.map).cast("Q")
        first_live_word = layout.LIVE_OFFSET // 8
        self._live_words = self._words[first_live_word : first_live_word + len(LiveWord)]
        # A stream takes an index, writes the record into its slot, and sets `written_count`.
        self.record_indices = itertools.count()
        self.written_count = 0  # records
        self._signature_counter = itertools.count(1)
        self._site_counter = itertools.count(1)
        self._last_signature = self._last_site = 0
        # Called after half the lifetime of the numbers given out, so that caches are cleared before
        # any number becomes invalid.
        self.rollover_callback: Callable[[], None] = lambda: None
        self._slot_counter = itertools.count()
        self._used_slots: list[int] = []  # all slots that were ever used, in any order
        self._free_slots: list[int] = []
        self._heap_spans: dict[int, list[int]] = {}  # the end of each description, by its offset
        # The offsets of spans of the heap that closed streams no longer use, by size.
        self._free_spans: dict[int, list[int]] = {}
        # The ends of the allocated parts of the tables that grow.
        growing_tables = layout.LOSSES, STREAMS, layout.HEAP
        initial_ends = (end for _, end in layout.INITIAL_PARTS)
        self._allocated_ends = dict(zip(growing_tables, initial_ends, strict=True))
        positions: list[int] = []
        for table in layout.HEADER_TABLES:
            positions += [table.offset, table.count]
        layout.TABLES_STRUCT.pack_into(
            self.map, 0, b"\0" * 8, layout.LAYOUT_VERSION, layout.HEADER_SIZE, size,
            *positions, pid, 0, start_ticks,
        )  # fmt: skip
        self.set_word(LiveWord.LOSSES, layout.LOSSES.offset)
        self.set_word(LiveWord.COMMUNICATORS, communicators_offset)
        self.map[0:8] = layout.MAGIC  # last: from here on, readers accept the file as a ring

    def set_word(self, word: LiveWord, value: int) -> None:
        self._live_words[word] = value

    def get_word(self, word: LiveWord) -> int:
        return self._live_words[word]

    def write_identity(self, data: JsonObject) -> None:
        self.write_note(layout.IDENTITY, data)

    def write_note(self, note: Table, data: JsonObject) -> None:
        """Writes a note. If there is no room for it, texts are cut, and lists are left out."""
        max_length = note.slot.size - TEXT_OFFSET
        raw = _encode_json(data)
        if len(raw) > max_length:
            short: dict[str, Any] = {}
            for name, value in data.items():
                if isinstance(value, str):
                    short[name] = value[:200]
                elif not isinstance(value, list):
                    short[name] = value
            raw = _encode_json(short)
        self._write_locked(note, 0, len(raw), raw)

    def write_device_entry(self, slot: int, entry: DeviceEntry) -> None:
        """Writes how far the device has come in one group; ``slot`` is one of `layout.DEVICES`."""
        records_starts = entry.started is not None
        started = entry.started if entry.started is not None else -1
        counters = entry.enqueued, started, entry.completed
        self._write_locked(
            layout.DEVICES, slot, entry.uid, records_starts, *counters, entry.read_ns
        )

    def _write_locked(self, table: Table, index: int, *values: Any) -> None:
        """Writes a slot that begins with a lock."""
        at = table.locate_slot(index)
        word = at >> 3
        # If two threads write it at the same time, the lock is even after both nevertheless.
        lock = self._words[word] | 1
        self._words[word] = lock
        # `pack_into` would clear the lock for a moment.
        content = table.slot.pack(lock, *values)
        self.map[at + 8 : at + len(content)] = content[8:]
        self._words[word] = lock + 1

    def intern_signature(self, data: JsonObject) -> int:
        """Interns a signature; its number is valid for `SIGNATURE_LIFETIME_ENTRIES` further ones."""
        raw = _encode_json(data)
        if len(raw) > layout.SIGNATURES.slot.size - TEXT_OFFSET:
            short = {
                name: value for name, value in data.items() if name not in ("splits", "detail")
            }
            short["shapes"] = [*data.get("shapes", [])[:2], []]
            raw = _encode_json(short)
        number = self._last_signature = next(self._signature_counter)
        self._write_interned(layout.SIGNATURES, SIGNATURE_LIFETIME_ENTRIES, number, raw)
        return number

    def intern_site(self, data: JsonObject) -> int:
        """Interns a call site or the name of a phase."""
        number = self._last_site = next(self._site_counter)
        self._write_interned(layout.SITES, SITE_LIFETIME_ENTRIES, number, _encode_json(data))
        return number

    def _write_interned(self, table: Table, lifetime: int, number: int, raw: bytes) -> None:
        if number % (lifetime // 2) == 0:
            self.rollover_callback()
        at = table.locate_slot(number)
        word = at >> 3
        self._words[word] = 0
        table.slot.pack_into(self.map, at, 0, len(raw), raw)
        self._words[word] = number

    def is_signature_fresh(self, number: int) -> bool:
        return self._last_signature - number < SIGNATURE_LIFETIME_ENTRIES

    def is_site_fresh(self, number: int) -> bool:
        return self._last_site - number < SITE_LIFETIME_ENTRIES

    @property
    def used_slot_count(self) -> int:
        """The number of stream slots in use."""
        return len(self._used_slots) - len(self._free_slots)

    def open_stream(self, uid: int, description: JsonObject) -> int:
        """Opens a stream; returns its slot, as the index of the slot's first word in the ring.
        Raises OverflowError if there is no room for it.
        """
        slot = self._take_slot()
        raw = _encode_json(description)
        try:
            offset = self._take_heap(_measure_span(len(raw)))
        except OverflowError:
            self._free_slots.append(slot)
            raise
        start = layout.HEAP.offset + offset
        self.map[start : start + len(raw)] = raw
        self._words[self.get_loss_word(slot)] = 0
        STREAMS.slot.pack_into(self.map, slot << 3, 0, 0, 0, 0, 0, uid, len(raw), offset)
        self.set_word(LiveWord.OPENED, max(uid, self.get_word(LiveWord.OPENED)))
        return slot

    def _take_slot(self) -> int:
        with contextlib.suppress(IndexError):
            return self._free_slots.pop()
        number = next(self._slot_counter)
        if number >= layout.STREAM_SLOTS:
            raise OverflowError(
                f"more than {layout.STREAM_SLOTS} process groups and channels at a time"
            )
        self._allocate(layout.LOSSES, number + 1)
        self._allocate(STREAMS, number + 1)
        slot = _STREAMS_WORD + number * _STREAM_WORDS
        self._used_slots.append(slot)
        # The number is written again if another thread took a slot meanwhile, and so a greater one.
        while self.get_word(LiveWord.SEQUENCES) != (count := len(self._used_slots)):
            self.set_word(LiveWord.SEQUENCES, count)
        return slot

    def _take_heap(self, size: int) -> int:
        """Takes a span of the heap; returns its offset. Raises OverflowError if there is none."""
        with contextlib.suppress(KeyError, IndexError):
            return self._free_spans[size].pop()
        at = self.get_word(LiveWord.HEAP_USED)
        while at + size <= layout.HEAP_SIZE:
            claim = [at + size]
            span = self._heap_spans.setdefault(at, claim)
            if span is claim:
                self.set_word(LiveWord.HEAP_USED, at + size)
                self._allocate(layout.HEAP, at + size)
                return at
            at = span[0]  # another thread has taken these bytes meanwhile
        raise OverflowError("no room for the description of another process group")

    def _allocate(self, table: Table, slot_count: int) -> None:
        """Allocates the first ``slot_count`` slots of a table. Raises OverflowError if the file
        system has no room: writing there would end the process (SIGBUS).

        Two threads may do so at the same time, which allocates the same blocks twice.
        """
        end = table.offset + slot_count * table.slot.size
        allocated_end = self._allocated_ends[table]
        if end <= allocated_end:
            return
        new_end = min(max(end, allocated_end + _ALLOCATION_BYTES), table.end)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, allocated_end, new_end - allocated_end)
            finally:
                os.close(fd)
        except OSError as error:
            raise OverflowError(f"no room for further process groups: {error.strerror}") from error
        self._allocated_ends[table] = max(new_end, self._allocated_ends[table])

    def close_stream(self, slot: int) -> None:
        """Allows other streams to take the slot and the room of the description."""
        *_, length, offset = STREAMS.slot.unpack_from(self.map, slot << 3)
        STREAMS.slot.pack_into(self.map, slot << 3, *([0] * 8))
        self._free_slots.append(slot)
        self._free_spans.setdefault(_measure_span(length), []).append(offset)

    def get_loss_word(self, slot: int) -> int:
        """The index of the word in the loss table that belongs to a slot of the stream table."""
        return _LOSSES_WORD + (slot - _STREAMS_WORD) // _STREAM_WORDS

    def record_loss(self, slot: int, from_seq: int, reason: int) -> None:
        """Records that a stream's numbers are not certain from ``from_seq`` on, or earlier."""
        word = self.get_loss_word(slot)
        known_seq, _ = layout.unpack_loss(self._words[word])
        if not known_seq or from_seq < known_seq:
            self._words[word] = layout.pack_loss(from_seq, reason)

    def record_completion(self, index: int, done_ns: int) -> None:
        """Records when a call was first seen to be complete, if its record still exists."""
        at = _RECORDS_WORD + (index % RECORD_SLOTS) * _RECORD_WORDS
        if self._words[at] == index + 1:
            self._words[at + DONE_NS] = done_ns

    def add_flags(self, index: int, flags: int) -> None:
        """Adds flags to a record, if it still exists."""
        at = _RECORDS_WORD + (index % RECORD_SLOTS) * _RECORD_WORDS
        if self._words[at] == index + 1:
            self.map[8 * at + _FLAGS_OFFSET] |= flags

    def write_progress(self, slot: int, completed: int, pending_ns: int) -> None:
        """Writes how far a stream is complete. Each word is written atomically."""
        self._words[slot] = completed
        self._words[slot + 1] = pending_ns

    def write_newest(self, slot: int, seq: int, chain: int, entered_ns: int) -> None:
        """Writes the position that replaces a stream's newest record from the next pulse on."""
        self._words[slot + 2] = seq
        self._words[slot + 3] = chain
        self._words[slot + 4] = entered_ns

    def write_pulse(self, written: int) -> None:
        """Records that Python runs, and that the stream table covers ``written`` records."""
        self.set_word(LiveWord.PULSE_NS, monotonic_ns())
        self.set_word(LiveWord.RECORDS, written)


def _measure_span(length: int) -> int:
    """The bytes of the heap that a description of this length takes.

    >>> _measure_span(65)
    128
    """
    return -(-length // _HEAP_UNIT) * _HEAP_UNIT


def _encode_json(data: JsonObject) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
