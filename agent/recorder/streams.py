"""One sequence of calls on this rank: its count, its running hash, and which of its calls are
unfinished.
"""

from __future__ import annotations

import enum
import itertools
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from hangwatch.model.signatures import CHAIN_BASE, UINT64_MASK
from hangwatch.ring.layout import (
    RECORD_BODY_STRUCT,
    RECORD_PACKED_STRUCT,
    RECORD_SLOTS,
    UNKNOWN_COMPLETED,
    RecordFlag,
)

from .other_threads import inspect_thread
from .writer import RingWriter

# Unfinished works kept to ask later whether they are complete. A finished one is dropped at the
# next call or poll, so none outlives a poll; past this many at once the middle ones are let go and
# the oldest and newest still tell.
_MAX_PENDING_WORKS = 16
_UINT32_MASK = 0xFFFFFFFF
_pack_record, _RECORD_SIZE = RECORD_PACKED_STRUCT.pack_into, RECORD_PACKED_STRUCT.size


class CompletionMode(enum.IntEnum):
    """How the end of a call is learnt."""

    WORK = 0  # by asking its Work
    NEXT = 1  # its Work never tells: it is over once another is made
    RETURN = 2  # it is complete when it returns
    UNOBSERVABLE = 3
    TIMED = 4  # as WORK, and of some calls the Work tells the moment: the native recorder's


_NEXT, _RETURN = int(CompletionMode.NEXT), int(CompletionMode.RETURN)

# A call under way: (its sequence, seq, record, entered_ns, the thread that it blocks or 0, how its
# end is learnt)
EnteredCall = tuple["StreamRecorder", int, int, int, int, int]


class StreamRecorder:
    """Written by the threads that call, polled by one other; nobody ever waits for a lock."""

    __slots__ = (
        "_last_entered_ns",
        "_last_thread",
        "_map",
        "_prune_lock",
        "_record_indices",
        "_records_offset",
        "_ring",
        "_seq_counter",
        "_unbox_work",
        "_was_independent",
        "chain",
        "completed",
        "entered",
        "pending_works",
        "slot",
        "uid",
    )  # fmt: skip

    def __init__(self, ring: RingWriter, uid: int, slot: int, unbox: Callable[[Any], Any]) -> None:
        self.uid = uid
        self.slot = slot
        self.entered = 0
        self.completed = 0
        self.chain = 0
        self._ring = ring
        self._map, self._records_offset, self._record_indices = (
            ring.map,
            ring.records_offset,
            ring.record_indices,
        )
        self._seq_counter = itertools.count(1)
        self._last_entered_ns = 0
        self.pending_works: deque[tuple[EnteredCall, Any]] = deque()  # with the boxed Work, or None
        self._unbox_work = unbox
        self._prune_lock = allocate_lock()  # only ever tried, never waited for
        self._last_thread = 0  # that made the last call
        self._was_independent = False  # the one before it went on meanwhile

    def pack_record_body(
        self, signature: int, site: int, flags: int, size: int = 0, peer: int = -1, tag: int = 0
    ) -> bytes:
        """The part of a record that is the same for every such call of this thread."""
        return RECORD_BODY_STRUCT.pack(
            size, self.uid, signature, site, get_ident() & _UINT32_MASK, flags, peer, tag
        )

    def enter_call(
        self, agreement_hash: int, record_body: bytes, blocked_thread: int, completion_mode: int
    ) -> EnteredCall:
        """Records a call that is about to be made; ``blocked`` is the thread that waits in it, 0
        where none does.
        """
        self.entered = seq = next(self._seq_counter)
        self.chain = chain = (
            self.chain * CHAIN_BASE + agreement_hash
        ) & UINT64_MASK  # hangwatch.model.signatures.chain, without the call
        now = self._last_entered_ns = monotonic_ns()
        works, thread = self.pending_works, blocked_thread or get_ident()
        if thread != self._last_thread and self._detect_concurrency(thread):
            record_body = _set_shared_flag(record_body)
        if not works:
            if self.completed != UNKNOWN_COMPLETED:
                self.completed = seq - 1
        elif (
            works[-1][0][4] == thread
        ):  # a blocking call is over once its thread makes the next one
            works.clear()
            self.completed = seq - 1
        elif not self.poll_works(now):
            self.completed = seq - 1
        elif len(works) >= _MAX_PENDING_WORKS:
            works.pop()
        index = next(self._record_indices)
        stamp = self._ring.written_count = index + 1
        _pack_record(
            self._map, self._records_offset + (index % RECORD_SLOTS) * _RECORD_SIZE,
            stamp, now, 0, seq, chain, self.completed, record_body, stamp & _UINT32_MASK,
        )  # fmt: skip
        return self, seq, index, now, blocked_thread, completion_mode

    def _detect_concurrency(self, thread: int) -> bool:
        """Another thread than the last time makes a call: True if both go on by themselves, so that
        which comes first is chance.

        Where one hands over to another, it waits for it or is gone; it may also just have ended its
        part, so that it takes two changes to tell.
        """
        before, self._last_thread = self._last_thread, thread
        calls, free = inspect_thread(before)
        inside = calls and bool(self.pending_works) and self.pending_works[-1][0][4] == before
        shared = inside or (free and self._was_independent)
        self._was_independent = free
        return shared

    def finish_call(self, call: EnteredCall) -> None:
        """A call that was complete when it returned, as was everything before it on the same
        thread.
        """
        self._ring.record_completion(call[2], monotonic_ns())
        last = (
            next(
                (work for _, work in reversed(tuple(self.pending_works)) if work is not None), None
            )
            if self.pending_works
            else None
        )
        if (
            last is not None
            # asynchronous calls before it are not complete: it counts as complete with the last of
            # them
        ):
            self.pending_works.append((call, last))
        elif self.completed != UNKNOWN_COMPLETED:
            self.pending_works.clear()
            self.completed = self.entered
            self._ring.write_progress(self.slot, self.completed, 0)

    def fail_call(self, call: EnteredCall) -> None:
        """The call raised: it waits for nobody any more."""
        self._ring.add_flags(call[2], RecordFlag.RAISED)
        self.finish_call(call)

    def mark_completion_unknown(self) -> None:
        """Completion cannot be told here, from now on."""
        if self.completed != UNKNOWN_COMPLETED:
            self.pending_works.clear()
            self.completed = UNKNOWN_COMPLETED
            self._ring.write_progress(self.slot, UNKNOWN_COMPLETED, 0)

    def poll_works(self, now_ns: int) -> bool:
        """Drops finished works and notes how far the sequence got. True while some call is
        unfinished.
        """
        works = self.pending_works
        if not self._prune_lock.acquire(blocking=False):
            return bool(works)
        try:
            while works:
                call, work = works[0]
                if not (self._is_complete(work) if work is not None else len(works) > 1):
                    break
                works.popleft()
                self._ring.record_completion(call[2], now_ns)
                self.completed = call[1]
            if len(works) > 1 and (last := works[-1])[1] is not None and self._is_complete(last[1]):
                while works.popleft() is not last:
                    # some backends' works never say that they are complete; a later one's word
                    # covers them
                    pass
                self.completed = last[0][
                    1
                ]  # `entered` may be a call whose operator has not returned
            self._ring.write_progress(self.slot, self.completed, works[0][0][3] if works else 0)
        except IndexError:  # the calling thread cleared them meanwhile: its blocking call is over
            return False
        finally:
            self._prune_lock.release()
        return bool(works)

    def close_stream(self) -> None:
        """Its group is gone, and another wants its slot."""
        self._ring.close_stream(self.slot)

    def _is_complete(self, work: Any) -> bool:
        return bool(self._unbox_work(work).is_completed())

    def update_ring(self, now_ns: int) -> None:
        """From the polling thread: what the newest record says, for when it is overwritten, and how
        far the calls got.
        """
        if self.pending_works:
            self.poll_works(now_ns)
        # also while an operator blocks: until it returns its call is not in `works`, and `enter`
        # publishes nothing
        else:
            self._ring.write_progress(self.slot, self.completed, 0)
        self._ring.write_newest(self.slot, self.entered, self.chain, self._last_entered_ns)


def leave_call(call: EnteredCall) -> None:
    """The operator has returned, and its end is not learnt from its Work."""
    end = call[5]
    if end == _NEXT:
        call[0].pending_works.append((call, None))
    elif end == _RETURN:
        call[0].finish_call(call)


def _set_shared_flag(record_body: bytes) -> bytes:
    """With `Flag.SHARED` set, so that nobody reads the record without it."""
    size, *middle, flags, peer, tag = RECORD_BODY_STRUCT.unpack(record_body)
    return RECORD_BODY_STRUCT.pack(size, *middle, flags | RecordFlag.SHARED, peer, tag)
