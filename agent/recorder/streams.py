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

from .other_threads import meanwhile
from .writer import RingWriter

# Unfinished works kept to ask later whether they are complete. A finished one is dropped at the
# next call or poll, so none outlives a poll; past this many at once the middle ones are let go and
# the oldest and newest still tell.
_WORKS = 16
_LOW = 0xFFFFFFFF
_pack_record, _RECORD_SIZE = RECORD_PACKED_STRUCT.pack_into, RECORD_PACKED_STRUCT.size


class End(enum.IntEnum):
    """How the end of a call is learnt."""

    WORK = 0  # by asking its Work
    NEXT = 1  # its Work never tells: it is over once another is made
    RETURN = 2  # it is complete when it returns
    UNTOLD = 3
    TIMED = 4  # as WORK, and of some calls the Work tells the moment: the native recorder's


_NEXT, _RETURN = int(End.NEXT), int(End.RETURN)

# A call under way: (its sequence, seq, record, entered_ns, the thread that it blocks or 0, how its
# end is learnt)
Entered = tuple["Sequence", int, int, int, int, int]


class Sequence:
    """Written by the threads that call, polled by one other; nobody ever waits for a lock."""

    __slots__ = (
        "_count", "_entered_ns", "_free", "_indices", "_map", "_pruning", "_records_at", "_ring", "_thread", "_unbox",
        "chain", "completed", "entered", "slot", "uid", "works",
    )  # fmt: skip

    def __init__(self, ring: RingWriter, uid: int, slot: int, unbox: Callable[[Any], Any]) -> None:
        self.uid = uid
        self.slot = slot
        self.entered = 0
        self.completed = 0
        self.chain = 0
        self._ring = ring
        self._map, self._records_at, self._indices = ring.map, ring.records_at, ring.indices
        self._count = itertools.count(1)
        self._entered_ns = 0
        self.works: deque[tuple[Entered, Any]] = deque()  # with the boxed Work, or None
        self._unbox = unbox
        self._pruning = allocate_lock()  # only ever tried, never waited for
        self._thread = 0  # that made the last call
        self._free = False  # the one before it went on meanwhile

    def describe(
        self, signature: int, site: int, flags: int, size: int = 0, peer: int = -1, tag: int = 0
    ) -> bytes:
        """The part of a record that is the same for every such call of this thread."""
        return RECORD_BODY_STRUCT.pack(
            size, self.uid, signature, site, get_ident() & _LOW, flags, peer, tag
        )

    def enter(self, agree: int, described: bytes, blocked: int, end: int) -> Entered:
        """Records a call that is about to be made; ``blocked`` is the thread that waits in it, 0
        where none does.
        """
        self.entered = seq = next(self._count)
        self.chain = chain = (
            self.chain * CHAIN_BASE + agree
        ) & UINT64_MASK  # hangwatch.model.signatures.chain, without the call
        now = self._entered_ns = monotonic_ns()
        works, thread = self.works, blocked or get_ident()
        if thread != self._thread and self._changes_to(thread):
            described = _shared(described)
        if not works:
            if self.completed != UNKNOWN_COMPLETED:
                self.completed = seq - 1
        elif (
            works[-1][0][4] == thread
        ):  # a blocking call is over once its thread makes the next one
            works.clear()
            self.completed = seq - 1
        elif not self.poll(now):
            self.completed = seq - 1
        elif len(works) >= _WORKS:
            works.pop()
        index = next(self._indices)
        stamp = self._ring.written = index + 1
        _pack_record(
            self._map, self._records_at + (index % RECORD_SLOTS) * _RECORD_SIZE,
            stamp, now, 0, seq, chain, self.completed, described, stamp & _LOW,
        )  # fmt: skip
        return self, seq, index, now, blocked, end

    def _changes_to(self, thread: int) -> bool:
        """Another thread than the last time makes a call: True if both go on by themselves, so that
        which comes first is chance.

        Where one hands over to another, it waits for it or is gone; it may also just have ended its
        part, so that it takes two changes to tell.
        """
        before, self._thread = self._thread, thread
        calls, free = meanwhile(before)
        inside = calls and bool(self.works) and self.works[-1][0][4] == before
        shared = inside or (free and self._free)
        self._free = free
        return shared

    def finish(self, call: Entered) -> None:
        """A call that was complete when it returned, as was everything before it on the same
        thread.
        """
        self._ring.done(call[2], monotonic_ns())
        last = (
            next((work for _, work in reversed(tuple(self.works)) if work is not None), None)
            if self.works
            else None
        )
        if (
            last is not None
            # asynchronous calls before it are not complete: it counts as complete with the last of them
        ):
            self.works.append((call, last))
        elif self.completed != UNKNOWN_COMPLETED:
            self.works.clear()
            self.completed = self.entered
            self._ring.progress(self.slot, self.completed, 0)

    def fail(self, call: Entered) -> None:
        """The call raised: it waits for nobody any more."""
        self._ring.flag(call[2], RecordFlag.RAISED)
        self.finish(call)

    def unknown(self) -> None:
        """Completion cannot be told here, from now on."""
        if self.completed != UNKNOWN_COMPLETED:
            self.works.clear()
            self.completed = UNKNOWN_COMPLETED
            self._ring.progress(self.slot, UNKNOWN_COMPLETED, 0)

    def poll(self, now_ns: int) -> bool:
        """Drops finished works and notes how far the sequence got. True while some call is
        unfinished.
        """
        works = self.works
        if not self._pruning.acquire(blocking=False):
            return bool(works)
        try:
            while works:
                call, work = works[0]
                if not (self._complete(work) if work is not None else len(works) > 1):
                    break
                works.popleft()
                self._ring.done(call[2], now_ns)
                self.completed = call[1]
            if len(works) > 1 and (last := works[-1])[1] is not None and self._complete(last[1]):
                while works.popleft() is not last:
                    # some backends' works never say that they are complete; a later one's word
                    # covers them
                    pass
                self.completed = last[0][
                    1
                ]  # `entered` may be a call whose operator has not returned
            self._ring.progress(self.slot, self.completed, works[0][0][3] if works else 0)
        except IndexError:  # the calling thread cleared them meanwhile: its blocking call is over
            return False
        finally:
            self._pruning.release()
        return bool(works)

    def close(self) -> None:
        """Its group is gone, and another wants its slot."""
        self._ring.close_sequence(self.slot)

    def _complete(self, work: Any) -> bool:
        return bool(self._unbox(work).is_completed())

    def settle(self, now_ns: int) -> None:
        """From the polling thread: what the newest record says, for when it is overwritten, and how
        far the calls got.
        """
        if self.works:
            self.poll(now_ns)
        # also while an operator blocks: until it returns its call is not in `works`, and `enter`
        # publishes nothing
        else:
            self._ring.progress(self.slot, self.completed, 0)
        self._ring.newest(self.slot, self.entered, self.chain, self._entered_ns)


def leave(call: Entered) -> None:
    """The operator has returned, and its end is not learnt from its Work."""
    end = call[5]
    if end == _NEXT:
        call[0].works.append((call, None))
    elif end == _RETURN:
        call[0].finish(call)


def _shared(described: bytes) -> bytes:
    """With `Flag.SHARED` set, so that nobody reads the record without it."""
    size, *middle, flags, peer, tag = RECORD_BODY_STRUCT.unpack(described)
    return RECORD_BODY_STRUCT.pack(size, *middle, flags | RecordFlag.SHARED, peer, tag)
