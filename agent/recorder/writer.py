"""Writes the ring of one process; `hangwatch.ring.layout` documents the layout,
`hangwatch.ring.reader` reads it.
"""

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
from hangwatch.ring.layout import RECORD_SLOTS, RECORD_STRUCT, RECORDS_OFFSET, LiveWord
from hangwatch.ring.parts import DeviceEntry

# An interned entry is written again once this many newer ones exist. Until then, no record in the
# ring refers to an entry that was overwritten.
SIGNATURE_LIFETIME_ENTRIES = layout.SIGNATURE_SLOTS - RECORD_SLOTS
SITE_LIFETIME_ENTRIES = layout.SITE_SLOTS // 2
_HEAP_UNIT = 64  # bytes: descriptions of about the same length can take each other's place
_ALLOCATION_BYTES = 1 << 16  # the amount by which a table or the heap grows
# The ends of the parts that grow, by their beginnings.
_MAX_ENDS = {
    layout.LOSSES_OFFSET: layout.STREAMS_OFFSET,
    layout.STREAMS_OFFSET: RECORDS_OFFSET,
    layout.HEAP_OFFSET: layout.CHECKS_OFFSET,
}


class RingWriter:
    """One process's ring.

    It takes no locks: numbers come from itertools.count, and room in the tables from
    `dict.setdefault` and `list.pop`, which the GIL makes atomic; each stream is written by the
    thread that makes the call.
    """

    def __init__(self, path: Path, *, pid: int, start_ticks: int, extra_bytes: int = 0) -> None:
        """Creates the file and allocates the blocks that every job needs, so that a full disk is an
        OSError here rather than a SIGBUS later. Further blocks are allocated before they are used.

        ``extra_bytes`` are for the check table.
        """
        size = layout.CHECKS_OFFSET + extra_bytes
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            for start, end in layout.INITIAL_PARTS:
                os.posix_fallocate(fd, start, end - start)
            if extra_bytes:
                os.posix_fallocate(fd, layout.CHECKS_OFFSET, extra_bytes)
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
        self._rollover_callback: Callable[[], None] = lambda: None
        self._slot_counter = itertools.count()
        self._used_slots: list[int] = []  # all slots that were ever used, in any order
        self._free_slots: list[int] = []
        self._heap_spans: dict[int, list[int]] = {}  # the end of each description, by its offset
        self._heap_used = 0
        # The offsets of spans of the heap that closed streams no longer use, by size.
        self._free_spans: dict[int, list[int]] = {}
        # The ends of the allocated parts of the tables and the heap, by the offset of their
        # beginning.
        initial_ends = (end for _, end in layout.INITIAL_PARTS)
        self._allocated_ends = dict(zip(_MAX_ENDS, initial_ends, strict=True))
        layout.TABLES_STRUCT.pack_into(
            self.map, 0, b"\0" * 8, layout.LAYOUT_VERSION, layout.HEADER_SIZE, size,
            layout.STREAMS_OFFSET, layout.STREAM_SLOTS, RECORDS_OFFSET, RECORD_SLOTS,
            layout.SIGNATURES_OFFSET, layout.SIGNATURE_SLOTS,
            layout.SITES_OFFSET, layout.SITE_SLOTS,
            layout.HEAP_OFFSET, layout.HEAP_SIZE, pid, 0, start_ticks,
        )  # fmt: skip
        self._live_words[LiveWord.LOSSES] = layout.LOSSES_OFFSET
        self.map[0:8] = layout.MAGIC  # last: from here on, readers accept the file as a ring

    def set_word(self, word: LiveWord, value: int) -> None:
        self._live_words[word] = value

    def get_word(self, word: LiveWord) -> int:
        return self._live_words[word]

    def write_identity(self, data: Mapping[str, Any]) -> None:
        self._write_note(layout.IDENTITY_OFFSET, layout.IDENTITY_SIZE, data)

    def write_exception(self, data: Mapping[str, Any]) -> None:
        self._write_note(layout.EXCEPTION_OFFSET, layout.NOTE_SIZE, data)

    def write_faults(self, lines: list[str]) -> None:
        data = {"lines": [line[:200] for line in lines]}
        self._write_note(layout.FAULTS_OFFSET, layout.NOTE_SIZE, data)

    def intern_signature(self, data: Mapping[str, Any]) -> int:
        """Interns a signature; its number is valid for `SIGNATURE_LIFETIME_ENTRIES` further ones."""
        number = self._last_signature = next(self._signature_counter)
        if number % (SIGNATURE_LIFETIME_ENTRIES // 2) == 0:
            self._rollover_callback()
        raw = _encode_json(data)
        if len(raw) > layout.INTERNED_SIZE - layout.INTERNED_STRUCT.size:
            short = {
                name: value for name, value in data.items() if name not in ("splits", "detail")
            }
            raw = _encode_json(short | {"shapes": [*data.get("shapes", [])[:2], []]})
        self._write_interned(layout.SIGNATURES_OFFSET, layout.SIGNATURE_SLOTS, number, raw)
        return number

    def intern_site(self, data: Mapping[str, Any]) -> int:
        """Interns a call site or the name of a phase."""
        number = self._last_site = next(self._site_counter)
        if number % (SITE_LIFETIME_ENTRIES // 2) == 0:
            self._rollover_callback()
        self._write_interned(layout.SITES_OFFSET, layout.SITE_SLOTS, number, _encode_json(data))
        return number

    def set_rollover_callback(self, callback: Callable[[], None]) -> None:
        """``callback`` is called when half the lifetime of the numbers given out has passed, so
        that caches are cleared before any number becomes invalid.
        """
        self._rollover_callback = callback

    def is_signature_fresh(self, number: int) -> bool:
        return self._last_signature - number < SIGNATURE_LIFETIME_ENTRIES

    def is_site_fresh(self, number: int) -> bool:
        return self._last_site - number < SITE_LIFETIME_ENTRIES

    def _write_description(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """Writes a description to the heap; returns its (offset, length). Raises OverflowError if
        the heap is full, or no more of it can be allocated.
        """
        raw = _encode_json(data)
        size = _round_up(len(raw), _HEAP_UNIT)
        try:
            at = self._free_spans[size].pop()
        except (KeyError, IndexError):
            at = self._take_heap(size)
            self._live_words[LiveWord.HEAP_USED] = self._heap_used = at + size
        start = layout.HEAP_OFFSET + at
        self._allocate(layout.HEAP_OFFSET, start + size)
        self.map[start : start + len(raw)] = raw
        return at, len(raw)

    def _allocate(self, part: int, end: int) -> None:
        """Allocates the part that begins at offset ``part`` up to ``end``. Raises OverflowError if
        the file system has no room: writing there would end the process (SIGBUS).

        Two threads may do so at the same time, which allocates the same blocks twice.
        """
        allocated_end = self._allocated_ends[part]
        if end <= allocated_end:
            return
        size = max(end - allocated_end, _ALLOCATION_BYTES)
        size = min(size, _MAX_ENDS[part] - allocated_end)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, allocated_end, size)
            finally:
                os.close(fd)
        except OSError as error:
            raise OverflowError(f"no room for further process groups: {error.strerror}") from error
        self._allocated_ends[part] = max(allocated_end + size, self._allocated_ends[part])

    def _take_heap(self, length: int) -> int:
        """Takes the next bytes of the heap; returns their offset. Raises OverflowError if it is
        full.
        """
        at = self._heap_used
        while at + length <= layout.HEAP_SIZE:
            claim = [at + length]
            span = self._heap_spans.setdefault(at, claim)
            if span is claim:
                return at
            at = span[0]  # another thread has taken these bytes meanwhile
        raise OverflowError("no room for the description of another process group")

    def _take_slot(self) -> int:
        with contextlib.suppress(IndexError):
            return self._free_slots.pop()
        slot = next(self._slot_counter)
        if slot >= layout.STREAM_SLOTS:
            raise OverflowError(
                f"more than {layout.STREAM_SLOTS} process groups and channels at a time"
            )
        losses_size = (slot + 1) * layout.LOSS_STRUCT.size
        streams_size = (slot + 1) * layout.STREAM_STRUCT.size
        self._allocate(layout.LOSSES_OFFSET, layout.LOSSES_OFFSET + losses_size)
        self._allocate(layout.STREAMS_OFFSET, layout.STREAMS_OFFSET + streams_size)
        self._used_slots.append(slot)
        # The number is written again if another thread took a slot meanwhile, and so a greater one.
        while self._live_words[LiveWord.SEQUENCES] != (count := len(self._used_slots)):
            self._live_words[LiveWord.SEQUENCES] = count
        return layout.STREAMS_OFFSET + slot * layout.STREAM_STRUCT.size

    @property
    def used_slot_count(self) -> int:
        """The number of stream slots in use."""
        return len(self._used_slots) - len(self._free_slots)

    def record_completion(self, index: int, done_ns: int) -> None:
        """Records when a call was first seen to be complete, if its record still exists."""
        at = (RECORDS_OFFSET + (index % RECORD_SLOTS) * RECORD_STRUCT.size) >> 3
        if self._words[at] == index + 1:
            self._words[at + 2] = done_ns

    def add_flags(self, index: int, flags: int) -> None:
        """Adds flags to a record, if it still exists."""
        at = RECORDS_OFFSET + (index % RECORD_SLOTS) * RECORD_STRUCT.size
        if self._words[at >> 3] == index + 1:
            self.map[at + 72] |= flags

    def open_stream(self, uid: int, description: Mapping[str, Any]) -> int:
        """Opens a stream in a free slot; returns the index of the slot's first word, by which the
        other methods identify it. Raises OverflowError if there is no room for it.
        """
        at = self._take_slot()
        try:
            offset, length = self._write_description(description)
        except OverflowError:
            self._free_slots.append(at)
            raise
        self._words[self.get_loss_word(at >> 3)] = 0
        layout.STREAM_STRUCT.pack_into(self.map, at, 0, 0, 0, 0, 0, uid, length, offset)
        self._live_words[LiveWord.OPENED] = max(uid, self._live_words[LiveWord.OPENED])
        return at >> 3

    def close_stream(self, slot: int) -> None:
        """Allows other streams to take the slot and the room of the description."""
        *_, length, offset = layout.STREAM_STRUCT.unpack_from(self.map, slot << 3)
        layout.STREAM_STRUCT.pack_into(self.map, slot << 3, *([0] * 8))
        self._free_slots.append(slot << 3)
        self._free_spans.setdefault(_round_up(length, _HEAP_UNIT), []).append(offset)

    def get_loss_word(self, slot: int) -> int:
        """The index of the word in the loss table that belongs to a slot of the stream table."""
        number = ((slot << 3) - layout.STREAMS_OFFSET) // layout.STREAM_STRUCT.size
        return (layout.LOSSES_OFFSET + number * layout.LOSS_STRUCT.size) >> 3

    def record_loss(self, slot: int, from_seq: int, reason: int) -> None:
        """Records that the numbers of a stream's calls are not certain from ``from_seq`` on. An
        earlier loss is kept.
        """
        word = self.get_loss_word(slot)
        known_seq, _ = layout.unpack_loss(self._words[word])
        if not known_seq or from_seq < known_seq:
            self._words[word] = layout.pack_loss(from_seq, reason)

    def write_progress(self, slot: int, completed: int, pending_ns: int) -> None:
        """Writes how far a stream is complete. Each word is written atomically."""
        self._words[slot] = completed
        self._words[slot + 1] = pending_ns

    def write_device_entry(self, slot: int, entry: DeviceEntry) -> None:
        """Writes how far the device has come in one group; ``slot`` is below `DEVICE_SLOTS`."""
        offset = layout.DEVICE_OFFSET + slot * layout.DEVICE_STRUCT.size
        lock = self._words[offset >> 3]
        self._words[offset >> 3] = lock + 1
        started = -1 if entry.started is None else entry.started
        layout.DEVICE_STRUCT.pack_into(
            self.map, offset, lock + 1, entry.uid, entry.started is not None,
            entry.enqueued, started, entry.completed, entry.read_ns,
        )  # fmt: skip
        self._words[offset >> 3] = lock + 2

    def write_newest(self, slot: int, seq: int, chain: int, entered_ns: int) -> None:
        """Writes the position that replaces a stream's newest record from the next pulse on."""
        self._words[slot + 2] = seq
        self._words[slot + 3] = chain
        self._words[slot + 4] = entered_ns

    def write_pulse(self, written: int) -> None:
        """Records that Python runs, and that the stream table covers all records before
        ``written``.
        """
        self._live_words[LiveWord.PULSE_NS] = monotonic_ns()
        self._live_words[LiveWord.RECORDS] = written

    def _write_interned(self, table: int, count: int, number: int, raw: bytes) -> None:
        at = table + (number % count) * layout.INTERNED_SIZE
        raw = raw[: layout.INTERNED_SIZE - layout.INTERNED_STRUCT.size]
        self._words[at >> 3] = 0
        layout.INTERNED_STRUCT.pack_into(self.map, at, 0, len(raw))
        start = at + layout.INTERNED_STRUCT.size
        self.map[start : start + len(raw)] = raw
        self._words[at >> 3] = number

    def _write_note(self, at: int, max_bytes: int, data: Mapping[str, Any]) -> None:
        raw = _encode_json(data)
        if len(raw) > max_bytes - layout.NOTE_STRUCT.size:
            raw = _encode_json(
                {
                    k: v[:200] if isinstance(v, str) else v
                    for k, v in data.items()
                    if not isinstance(v, list)
                }
            )
        lock = self._words[at >> 3]
        self._words[at >> 3] = lock + 1
        layout.NOTE_STRUCT.pack_into(self.map, at, lock + 1, len(raw))
        start = at + layout.NOTE_STRUCT.size
        self.map[start : start + len(raw)] = raw
        self._words[at >> 3] = lock + 2


def _round_up(size: int, unit: int) -> int:
    """
    >>> _round_up(65, 64)
    128
    """
    return -(-size // unit) * unit


def _encode_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
