"""One sequence of calls on this rank: its count, its running hash, and which of its calls are unfinished."""

from __future__ import annotations

import itertools
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from hangwatch.ring import RECORD, RECORDS, UNKNOWN, Flag
from hangwatch.signature import BASE, MASK

from .writer import RingWriter

# Unfinished works kept to ask later whether they are complete. A finished one is dropped at the next call or poll, so none
# outlives a poll; past this many at once the middle ones are let go and the oldest and newest still tell.
_WORKS = 16
_BLOCKING = int(Flag.BLOCKING)
_LOW = 0xFFFFFFFF
_pack_record, _RECORD_SIZE = RECORD.pack_into, RECORD.size


class Sequence:
    """Written by the thread that calls, polled by one other; nobody ever waits for a lock."""

    __slots__ = (
        "_count", "_entered_ns", "_indices", "_map", "_pruning", "_records_at", "_ring", "_unbox", "_works",
        "chain", "completed", "entered", "slot", "uid",
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
        self._works: deque[tuple[int, int, int, int, Any]] = deque()  # (seq, record, entered_ns, flags, boxed Work)
        self._unbox = unbox
        self._pruning = allocate_lock()  # only ever tried, never waited for

    def enter(self, agree: int, signature: int, site: int, flags: int, size: int = 0, peer: int = -1, tag: int = 0) -> int:
        """Records a call that is about to be made and gives its record's index."""
        self.entered = seq = next(self._count)
        self.chain = chain = (self.chain * BASE + agree) & MASK  # hangwatch.signature.chain, without the call
        now = self._entered_ns = monotonic_ns()
        works = self._works
        # A blocking call is over once its thread makes the next one.
        if works and works[-1][3] == _BLOCKING:
            works.clear()
            self.completed = seq - 1
        elif works:
            if not self.poll(now):
                self.completed = seq - 1
        elif self.completed != UNKNOWN:
            self.completed = seq - 1
        index = next(self._indices)
        stamp = self._ring.written = index + 1
        _pack_record(
            self._map, self._records_at + (index % RECORDS) * _RECORD_SIZE, stamp, now, 0, seq, chain, self.completed, size, self.uid,
            signature, site, get_ident() & _LOW, flags, peer, tag, stamp & _LOW,
        )  # fmt: skip
        return index

    def track(self, index: int, flags: int, work: Any) -> None:
        """Keeps a call's Work, boxed, to learn when it is complete; None is unfinished until the next call."""
        works = self._works
        if len(works) >= _WORKS:
            works.pop()
        works.append((self.entered, index, self._entered_ns, flags, work))

    def finish(self, index: int) -> None:
        """A call that was complete when it returned, as was everything before it on the same thread."""
        self._ring.done(index, monotonic_ns())
        if not self._works and self.completed != UNKNOWN:
            self.completed = self.entered
            self._ring.progress(self.slot, self.completed, 0)

    def fail(self, index: int, flags: int) -> None:
        """The call raised: it waits for nobody any more."""
        self._ring.flag(index, flags | Flag.RAISED)
        self.finish(index)

    def unknown(self) -> None:
        """Completion cannot be told here, from now on."""
        if self.completed != UNKNOWN:
            self._works.clear()
            self.completed = UNKNOWN
            self._ring.progress(self.slot, UNKNOWN, 0)

    def poll(self, now_ns: int) -> bool:
        """Drops finished works and notes how far the sequence got. True while some call is unfinished."""
        works = self._works
        if not self._pruning.acquire(blocking=False):
            return bool(works)
        try:
            while works:
                seq, index, _, _, work = works[0]
                if not (self._complete(work) if work is not None else len(works) > 1):
                    break
                works.popleft()
                self._ring.done(index, now_ns)
                self.completed = seq
            if len(works) > 1 and works[-1][4] is not None and self._complete(works[-1][4]):
                works.clear()  # some backends' works never say that they are complete; a later one's word covers them
                self.completed = self.entered
            self._ring.progress(self.slot, self.completed, works[0][2] if works else 0)
        except IndexError:  # the calling thread cleared them meanwhile: its blocking call is over
            return False
        finally:
            self._pruning.release()
        return bool(works)

    def _complete(self, work: Any) -> bool:
        return bool(self._unbox(work).is_completed())

    def settle(self, now_ns: int) -> None:
        """From the polling thread: what the newest record says, for when it is overwritten, and how far the calls got."""
        if self._works:
            self.poll(now_ns)
        self._ring.newest(self.slot, self.entered, self.chain, self._entered_ns)
