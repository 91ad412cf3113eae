"""The ring: one memory-mapped file per training process, in which it leaves what it does for others
to read.

The layout is little-endian and language-neutral, so that a recorder in C++ can write the same file.
All offsets are in bytes. Times are CLOCK_MONOTONIC nanoseconds of the host. The writer never waits;
a reader detects what it caught half-written.

====== header (HEADER_SIZE = 16384)
================================================================================= 0      magic
``HANGWTCH`` 8      u32 version (1), u32 header size 16     u64 size of the file 24     u64 x 8:
offset and count of the sequences, records, signatures and sites 88     u64 offset and size of the
heap 104    u32 pid, i32 reserved; u64 start time of the process in clock ticks since boot
(/proc/PID/stat, field 22) 128    the live words, u64 each, see `Live`; each is written whole, so
that none can be torn 1024   identity: u64 lock, u32 length, JSON (up to IDENTITY_SIZE): job, rank,
world size, versions 6144   last words: as above (up to NOTE_SIZE): the exception that ended Python
8192   faults: as above (up to NOTE_SIZE): hangwatch's own errors in this process ====== sequences
(SEQUENCE.size each) ===============================================================================
as of the last poll: u64 completed (UNKNOWN: cannot be told), pending_ns (when the oldest unfinished
call was entered, where that is not the newest; 0: see there), and the newest call's seq, chain and
entered_ns; u32 uid (0: free), u32 length and u64 offset of its description in the heap (JSON).
Records written since then, from live word RECORDS on, know better. ====== records (RECORD.size
each), the n-th in slot n % count ======================================================= u64 index
+ 1, entered_ns, done_ns (0: not seen), seq, chain, completed (of its sequence, when it was
written), bytes; u32 sequence uid, signature, site, thread, flags; i32 peer, i32 tag; u32 index + 1
again, its low half. Written from front to back: a record is whole if both ends say the same and
still do so after it was copied. ====== signatures, sites (INTERNED_SIZE each), the n-th (from 1) in
slot n % count ================================== u64 n (0 while it is written), u32 length, JSON
====== heap: JSON descriptions, appended only
======================================================================= ====== checks (CHECK.size
each), the n-th in slot n % count: only with HANGWATCH_CHECKS, where the file goes on behind the
heap === u64 index + 1, the call's entered_ns, seq and chain, CRC-32 of its result, NaNs, Infs, and
the first seq of the run of such calls that it belongs to; f64 mean, min, max, norm of the finite
elements; u32 sequence uid, signature, site, flags, rounds of training for which that run lasts,
overflows (calls, so far), 0; u32 index + 1 again, its low half. Whole when a record would be.

A lock is odd while its part is being written (a sequence lock: Lameter, "Effective synchronization
on Linux/NUMA systems", 2005); a reader takes the part only if the lock was even and the same before
and after.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

MAGIC = b"HANGWTCH"
LAYOUT_VERSION = 1
HEADER_SIZE = 16384
TABLES_STRUCT = struct.Struct("<8s2I11Q2IQ")  # the header's first 120 bytes
LIVE_OFFSET = 128
IDENTITY_OFFSET, IDENTITY_SIZE = 1024, 5000
EXCEPTION_OFFSET, FAULTS_OFFSET, NOTE_SIZE = 6144, 8192, 2000
NOTE_STRUCT = struct.Struct("<QI")
STREAM_STRUCT = struct.Struct("<5Q2IQ")
RECORD_STRUCT = struct.Struct("<7Q5I2iI")
RECORD_BODY_STRUCT = struct.Struct(
    "<Q5I2i"
)  # its part from bytes to tag, for writers that pack it beforehand
RECORD_PACKED_STRUCT = struct.Struct(
    f"<6Q{RECORD_BODY_STRUCT.size}sI"
)  # a whole record, with that part packed
CHECK_STRUCT = struct.Struct("<8Q4d8I")
INTERNED_STRUCT = struct.Struct("<QI")
INTERNED_SIZE = 384
UNKNOWN_COMPLETED = (1 << 64) - 1

STREAM_SLOTS, RECORD_SLOTS, SIGNATURE_SLOTS, SITE_SLOTS = 512, 2048, 3072, 1024
HEAP_SIZE = 1 << 19
CHECK_SLOTS = 1024
MAX_FILE_BYTES = 64 << 20


class LiveWord(enum.IntEnum):
    """The header's live words: their index from LIVE_AT."""

    PULSE_NS = 0  # when the recorder's thread last ran, so when Python last could
    LIFECYCLE = 1
    STEP = 2  # plus 1; 0: never told
    RECORDS = 3  # written, as of the last poll
    HEAP_USED = 4
    DROPPED = 5  # calls that found no room
    ERRORS = 6  # of hangwatch itself
    OFF = 7  # 1: recording is switched off, see the faults
    PHASE = 8  # interned like a site; 0: none
    PHASE_NS = 9  # since
    PHASE_LIMIT_NS = 10  # 0: no limit told
    SEQUENCES = 11  # slots ever used


class RecordFlag(enum.IntFlag):
    """Of a record."""

    BLOCKING = 1  # the calling thread waits until the call is complete
    ASYNC = 2  # it does not
    RAISED = 4
    SHARED = 8  # entered by another thread than the one before, while neither waits for the other
    TIMED = 16  # done_ns is when the call was complete, not when that was seen


class CheckFlag(enum.IntFlag):
    """Of an entry in the table of checks."""

    OUTPUT = 1  # of the call's result; else of what this rank put in
    CHECKSUM = 2
    NONFINITE = 4
    VALUES = 8
    SCALED = 16  # under loss scaling, which meets Infs by leaving a step out


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """Where everything is in a file."""

    streams_offset: int
    records_offset: int
    signatures_offset: int
    sites_offset: int
    heap_offset: int
    size: int

    @classmethod
    def default(cls) -> RingGeometry:
        sequences = HEADER_SIZE
        records = sequences + STREAM_SLOTS * STREAM_STRUCT.size
        signatures = records + RECORD_SLOTS * RECORD_STRUCT.size
        sites = signatures + SIGNATURE_SLOTS * INTERNED_SIZE
        heap = sites + SITE_SLOTS * INTERNED_SIZE
        return cls(sequences, records, signatures, sites, heap, heap + HEAP_SIZE)


class RingError(Exception):
    """The file is no ring, or not one that this version reads. The message says which and why."""
