"""The layout of a ring: the memory-mapped file, one per training process, in which the recorder
publishes the calls of the process.

The layout is little-endian and independent of the language, so that a recorder in C++ can write the
same file. All offsets are in bytes. Times are CLOCK_MONOTONIC nanoseconds of the host. The writer
never waits; a reader detects and discards partly written data.

Header (HEADER_SIZE = 16384 bytes)::

       0  magic ``HANGWTCH``
       8  u32 version (1), u32 header size
      16  u64 file size
      24  u64 x 8: offset and count of the stream, record, signature and site tables
      88  u64 x 2: offset and size of the heap
     104  u32 pid, i32 reserved
     112  u64 start time of the process in clock ticks since boot (/proc/PID/stat, field 22)
     128  live words, u64 each, see `LiveWord`; each is written atomically
    1024  identity: u64 lock, u32 length, JSON (5000 bytes in all): job, rank, world size,
          versions
    6144  exception: the same format (2000 bytes in all): the exception that ended Python, or with
        ``is_handled`` the one that a thread is handling
    8192  faults: the same format (2000 bytes in all): hangwatch's own errors in this process
   10240  device table, up to the end of the header

Stream table (56 bytes per slot), as of the recorder's last poll::

    u64 completed (UNKNOWN_COMPLETED: not observable)
    u64 pending_ns: when the oldest unfinished call was entered; 0 if that is the newest call
    u64 seq, chain, entered_ns of the newest call
    u32 uid (0: the slot is free), u32 length and u64 offset of the JSON description in the heap

Loss table (a u64 for each slot of the stream table), at the offset in LiveWord.LOSSES::

    bits 0 to 55: number of the first call from which the numbers and running hashes of the stream's
    calls are not certain, because a call was not recorded; 0: all calls were recorded
    bits 56 to 63: why, see `hangwatch.model.calls.LossReason`

The writer sets it before it writes a further record of the stream, and a reader reads it after the
stream's position and newest record.

Device table (48 bytes per slot, 128 slots): how far the device has come in the collectives of a
stream's group, by the counters that the backend keeps (see `hangwatch.model.verdicts`). Slots are used in order; unused ones are zero::

    u64 lock
    u32 stream uid, u32 1 if the backend records starts, else 0
    i64 enqueued, started, completed
    u64 read_ns: when the counters were read

Records written since the last poll, from index LiveWord.RECORDS on, are newer than this table.

Record table (88 bytes per slot), record n in slot n % count::

    u64 index + 1, entered_ns, done_ns (0: not seen), seq, chain
    u64 completed (of the stream, when the record was written), size in bytes
    u32 stream uid, signature, site, thread (the operating system's id of the thread that made the
    call), flags; i32 peer, tag
    u32 low half of index + 1, repeated

A record is written from front to back: it is whole if both copies of index + 1 are equal, and still
are after it was read.

Signature and site tables (384 bytes per slot), entry n (from 1) in slot n % count::

    u64 n (0 while it is written), u32 length, JSON

Heap: JSON descriptions. The room of a stream that was closed is used again.

Check table (128 bytes per slot), entry n in slot n % count; it follows the heap and exists only
with HANGWATCH_CHECKS::

    u64 index + 1, the call's entered_ns, seq and chain, CRC-32 of its result
    u64 NaN count, Inf count, first seq of the run of non-finite calls
    f64 mean, min, max, norm of the finite elements
    u32 stream uid, signature, site, flags, length of that run in training rounds
    u32 overflows (calls so far), 0
    u32 low half of index + 1, repeated

An entry is whole under the same condition as a record.

Communicator table, at the offset in LiveWord.COMMUNICATORS (0: the file has none): what NCCL's
profiler plugin counts. It is last, and exists only with HANGWATCH_NCCL. It begins with::

    u64 number of slots, communicators ever created, those for which there was no slot
    u64 1 if the device is followed, else 0

Slots (176 bytes each, followed by 64 entries of calls)::

    u64 state (1: open, 2: closed; all others: there is no communicator, or it is being written)
    u64 number of the communicator, from 1; u64 its identity, the same on all members
    i32 rank, number of members
    u64 uid of the stream of torch's process group whose communicator it is, 0: not torch's
    u64 collectives called; those of them that a CUDA graph captured; messages called
    u64 x 3: number of the last collective that was passed to the device, begun and completed by it
    u64 operations whose end may have been missed
    u64 running hash after the newest call, and the times at which it was entered, the device reported last, and
        the communicator was closed
    48 bytes: name

An entry of a call (88 bytes), call n in entry n % 64, is whole if it is read twice alike::

    u64 n (0 while it is written), entered_ns, running hash after it, agreement hash, elements
    i32 root, u32 1 if a CUDA graph captured it
    24 bytes: function, 16 bytes: type of the elements

A lock is odd while its part is being written (a sequence lock: Lameter, "Effective synchronization
on Linux/NUMA systems", 2005). A reader accepts the part only if the lock was even, and the same
before and after reading.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Slots of one format. The heap is a table of bytes; a note of the header has one slot."""

    offset: int
    count: int
    slot: struct.Struct

    @property
    def end(self) -> int:
        return self.offset + self.count * self.slot.size

    def locate_slot(self, index: int) -> int:
        """The offset of the slot of entry ``index``, which may hold an older or a newer one."""
        return self.offset + index % self.count * self.slot.size


MAGIC = b"HANGWTCH"
LAYOUT_VERSION = 1
HEADER_SIZE = 16384
TABLES_STRUCT = struct.Struct("<8s2I11Q2IQ")  # the header's first 120 bytes
LIVE_OFFSET = 128
# A record's part from size to tag, for writers that pack it in advance.
RECORD_BODY_STRUCT = struct.Struct("<Q5I2i")
# A whole record whose part from size to tag is already packed.
RECORD_PACKED_STRUCT = struct.Struct(f"<6Q{RECORD_BODY_STRUCT.size}sI")
LOSS_SEQ_BITS = 56
UNKNOWN_COMPLETED = (1 << 64) - 1

STREAM_SLOTS, RECORD_SLOTS, CHECK_SLOTS = 8192, 2048, 1024
HEAP_SIZE = 1 << 22
TEXT_OFFSET = 12  # the offset of the JSON in a note or an interned entry
_NOTE_STRUCT = struct.Struct(f"<QI{2000 - TEXT_OFFSET}s")
_INTERNED_STRUCT = struct.Struct(f"<QI{384 - TEXT_OFFSET}s")
IDENTITY = Table(1024, 1, struct.Struct(f"<QI{5000 - TEXT_OFFSET}s"))
EXCEPTION = Table(6144, 1, _NOTE_STRUCT)
FAULTS = Table(8192, 1, _NOTE_STRUCT)
DEVICES = Table(10240, 128, struct.Struct("<Q2I3qQ"))
LOSSES = Table(HEADER_SIZE, STREAM_SLOTS, struct.Struct("<Q"))
STREAMS = Table(LOSSES.end, STREAM_SLOTS, struct.Struct("<5Q2IQ"))
RECORDS = Table(STREAMS.end, RECORD_SLOTS, struct.Struct("<7Q5I2iI"))
SIGNATURES = Table(RECORDS.end, 3072, _INTERNED_STRUCT)
SITES = Table(SIGNATURES.end, 1024, _INTERNED_STRUCT)
HEAP = Table(SITES.end, HEAP_SIZE, struct.Struct("B"))
CHECKS = Table(HEAP.end, CHECK_SLOTS, struct.Struct("<8Q4d8I"))  # not in every file
COMMUNICATOR_SLOTS, COMMUNICATOR_CALLS = 128, 64
COMMUNICATOR_OPEN, COMMUNICATOR_CLOSED = 1, 2  # states of a slot
COMMUNICATORS_HEAD = struct.Struct("<4Q")
COMMUNICATOR = struct.Struct("<3Q2i12Q48s")
COMMUNICATOR_CALL = struct.Struct("<5QiI24s16s")
COMMUNICATOR_SIZE = COMMUNICATOR.size + COMMUNICATOR_CALLS * COMMUNICATOR_CALL.size
COMMUNICATORS_SIZE = COMMUNICATORS_HEAD.size + COMMUNICATOR_SLOTS * COMMUNICATOR_SIZE
HEADER_TABLES = (STREAMS, RECORDS, SIGNATURES, SITES, HEAP)  # in the order of the header
MAX_FILE_BYTES = 64 << 20

# The beginnings and ends of the parts of the file that are allocated when it is created. The file
# is sparse: few jobs have thousands of process groups and channels, so the writer allocates more of
# the loss table, the stream table and the heap as it uses them.
INITIAL_PARTS = (
    (0, LOSSES.locate_slot(256)),
    (STREAMS.offset, STREAMS.locate_slot(256)),
    (RECORDS.offset, HEAP.offset + (1 << 16)),
)
INITIAL_SIZE = sum(end - start for start, end in INITIAL_PARTS)  # the room that a new file takes


class LiveWord(enum.IntEnum):
    """The header's live words, by their index from LIVE_OFFSET."""

    PULSE_NS = 0  # when the recorder's thread last ran, and hence Python could run
    LIFECYCLE = 1
    STEP = 2  # step + 1; 0: never reported
    RECORDS = 3  # number of records written, as of the last poll
    HEAP_USED = 4
    DROPPED = 5  # calls that were not recorded because a table was full
    ERRORS = 6  # number of hangwatch's own errors
    OFF = 7  # 1: recording is disabled, see the faults
    PHASE = 8  # number of the phase's name, interned like a site; 0: none
    PHASE_NS = 9  # when the phase began
    PHASE_LIMIT_NS = 10  # 0: no limit declared
    SEQUENCES = 11  # number of stream slots ever used
    DEVICE_STATUS = 12  # see `DeviceStatusState`
    LOSSES = 13  # offset of the loss table
    OPENED = 14  # streams that were ever opened; their uids are 1 to this number
    RECORDER_THREAD = 15  # the operating system's id of the recorder's thread
    # The number of the node agent's newest request for stacks. It is the only part of the file that
    # the node agent writes.
    STACKS_REQUEST = 16
    STACKS_ANSWER = 17  # the number of the request whose stacks were written last
    COMMUNICATORS = 18  # offset of the communicator table; 0: the file has none


class DeviceStatusState(enum.IntEnum):
    """Whether the backend reports how far its device has come."""

    # No group with such a backend, or no calls on it yet; also any other number, which only a newer
    # writer knows.
    UNKNOWN = 0
    REPORTED = 1
    OFF = 2  # the Flight Recorder has no buffer
    UNSUPPORTED = 3  # this backend's Flight Recorder keeps no counters

    @classmethod
    def _missing_(cls, value: object) -> DeviceStatusState:
        return cls.UNKNOWN


class RecordFlag:
    """The flags of a record. They are plain integers, because the & operator of an enum is slow."""

    BLOCKING = 1  # the calling thread waits until the call is complete
    ASYNC = 2  # the calling thread does not wait
    RAISED = 4
    # The previous call was made by another thread, and the two threads do not synchronise.
    SHARED = 8
    TIMED = 16  # done_ns is the time of completion itself, not of its detection
    # The call raised an exception before it communicated, and is no call of its stream: the next
    # one has its number, and a running hash without it.
    RETRACTED = 32
    # The call is part of a batch of sends and receives, which have no order among themselves: the time of
    # entry of each is that of the batch.
    BATCHED = 64


class CheckFlag:
    """The flags of an entry in the check table, as plain integers."""

    OUTPUT = 1  # the entry is about the call's result; otherwise about this rank's input
    CHECKSUM = 2
    NONFINITE = 4
    VALUES = 8
    SCALED = 16  # loss scaling is on, which handles Infs by skipping a step


LIVE_STRUCT = struct.Struct(f"<{len(LiveWord)}Q")


def pack_loss(seq: int, reason: int) -> int:
    """The word of the loss table.

    >>> unpack_loss(pack_loss(7, 2))
    (7, 2)
    """
    return seq | reason << LOSS_SEQ_BITS


def unpack_loss(word: int) -> tuple[int, int]:
    """(sequence number, reason) of a word of the loss table; (0, 0) if nothing was lost."""
    return word & (1 << LOSS_SEQ_BITS) - 1, word >> LOSS_SEQ_BITS


class RingError(Exception):
    """The file is not a ring, or not one that this version can read. The message says why."""
