"""One sequence of calls on this rank: its count, its running hash, and which of its calls are unfinished."""

from __future__ import annotations

import enum
import itertools
import sys
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from hangwatch.ring import RECORD_AROUND, RECORD_OF, RECORDS, UNKNOWN, Flag
from hangwatch.signature import BASE, MASK

from .writer import RingWriter

# Unfinished works kept to ask later whether they are complete. A finished one is dropped at the next call or poll, so none
# outlives a poll; past this many at once the middle ones are let go and the oldest and newest still tell.
_WORKS = 16
_LOW = 0xFFFFFFFF
_pack_record, _RECORD_SIZE = RECORD_AROUND.pack_into, RECORD_AROUND.size


class End(enum.IntEnum):
    """How the end of a call is learnt."""

    WORK = 0  # by asking its Work
    NEXT = 1  # its Work never tells: it is over once another is made
    RETURN = 2  # it is complete when it returns
    UNTOLD = 3


_NEXT, _RETURN = int(End.NEXT), int(End.RETURN)

# A call under way: (its sequence, seq, record, entered_ns, the thread that it blocks or 0, how its end is learnt)
Entered = tuple["Sequence", int, int, int, int, int]


class Sequence:
    """Written by the threads that call, polled by one other; nobody ever waits for a lock."""

    __slots__ = (
        "_count", "_entered_ns", "_indices", "_map", "_pruning", "_records_at", "_ring", "_unbox",
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

    def describe(self, signature: int, site: int, flags: int, size: int = 0, peer: int = -1, tag: int = 0) -> bytes:
        """The part of a record that is the same for every such call of this thread."""
        return RECORD_OF.pack(size, self.uid, signature, site, get_ident() & _LOW, flags, peer, tag)

    def enter(self, agree: int, described: bytes, blocked: int, end: int) -> Entered:
        """Records a call that is about to be made; ``blocked`` is the thread that waits in it, 0 where none does."""
        self.entered = seq = next(self._count)
        self.chain = chain = (self.chain * BASE + agree) & MASK  # hangwatch.signature.chain, without the call
        now = self._entered_ns = monotonic_ns()
        works = self.works
        shared = False
        if not works:
            if self.completed != UNKNOWN:
                self.completed = seq - 1
        elif works[-1][0][4] == get_ident():  # a blocking call is over once its thread makes the next one
            works.clear()
            self.completed = seq - 1
        elif not self.poll(now):
            self.completed = seq - 1
        else:
            if len(works) >= _WORKS:
                works.pop()
            shared = _waits(works[-1][0][4])
        index = next(self._indices)
        stamp = self._ring.written = index + 1
        _pack_record(
            self._map, self._records_at + (index % RECORDS) * _RECORD_SIZE,
            stamp, now, 0, seq, chain, self.completed, described, stamp & _LOW,
        )  # fmt: skip
        if shared:
            self._ring.flag(index, Flag.SHARED)
        return self, seq, index, now, blocked, end

    def finish(self, call: Entered) -> None:
        """A call that was complete when it returned, as was everything before it on the same thread."""
        self._ring.done(call[2], monotonic_ns())
        if not self.works and self.completed != UNKNOWN:
            self.completed = self.entered
            self._ring.progress(self.slot, self.completed, 0)

    def fail(self, call: Entered) -> None:
        """The call raised: it waits for nobody any more."""
        self._ring.flag(call[2], Flag.RAISED)
        self.finish(call)

    def unknown(self) -> None:
        """Completion cannot be told here, from now on."""
        if self.completed != UNKNOWN:
            self.works.clear()
            self.completed = UNKNOWN
            self._ring.progress(self.slot, UNKNOWN, 0)

    def poll(self, now_ns: int) -> bool:
        """Drops finished works and notes how far the sequence got. True while some call is unfinished."""
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
            if len(works) > 1 and works[-1][1] is not None and self._complete(works[-1][1]):
                works.clear()  # some backends' works never say that they are complete; a later one's word covers them
                self.completed = self.entered
            self._ring.progress(self.slot, self.completed, works[0][0][3] if works else 0)
        except IndexError:  # the calling thread cleared them meanwhile: its blocking call is over
            return False
        finally:
            self._pruning.release()
        return bool(works)

    def _complete(self, work: Any) -> bool:
        return bool(self._unbox(work).is_completed())

    def settle(self, now_ns: int) -> None:
        """From the polling thread: what the newest record says, for when it is overwritten, and how far the calls got."""
        if self.works:
            self.poll(now_ns)
        self._ring.newest(self.slot, self.entered, self.chain, self._entered_ns)


def leave(call: Entered) -> None:
    """The operator has returned, and its end is not learnt from its Work."""
    end = call[5]
    if end == _NEXT:
        call[0].works.append((call, None))
    elif end == _RETURN:
        call[0].finish(call)


def _waits(thread: int) -> bool:
    """A thread of Python's is inside torch.distributed at this moment. A Work that is unfinished may be one that never says so."""
    frame = sys._current_frames().get(thread)
    return frame is not None and "/torch/distributed/" in frame.f_code.co_filename
