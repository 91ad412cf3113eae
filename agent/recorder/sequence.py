"""One sequence of calls on this rank: its count, its running hash, and which of its calls are unfinished."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from time import monotonic_ns
from typing import Any

from hangwatch.ring import UNKNOWN, Flag
from hangwatch.signature import MASK

from .writer import RingWriter

_PRIME = 0x9E3779B97F4A7C15  # as in hangwatch.signature.chain, written out below since every call pays for it
# Unfinished works kept to ask later whether they are complete. A finished one is dropped at the next call or poll, so none
# outlives a poll; past this many at once the middle ones are let go and the oldest and newest still tell.
_WORKS = 16


class Sequence:
    """Written by the thread that calls, polled by one other; nobody ever waits for a lock."""

    def __init__(self, ring: RingWriter, uid: int, slot: int, described: tuple[int, int]) -> None:
        self.uid = uid
        self.slot = slot
        self.entered = 0
        self.completed = 0
        self.chain = 0
        self._ring = ring
        self._described = described
        self._count = itertools.count(1)
        self._locks = itertools.count(2, 2)
        self._entered_ns = 0
        self._pending_ns = 0
        self._works: deque[tuple[int, int, int, Any]] = deque()
        self._pruning = threading.Lock()  # only ever tried, never waited for

    def enter(
        self, agree: int, signature: int, site: int, flags: int, size: int = 0, peer: int = -1, tag: int = 0
    ) -> int:
        """Records a call that is about to be made and gives its record's index."""
        self.entered = seq = next(self._count)
        mixed = ((self.chain ^ agree) * _PRIME) & MASK
        self.chain = chain = (mixed ^ (mixed >> 29)) or 1
        now = self._entered_ns = monotonic_ns()
        if self.completed != UNKNOWN and not (self._works and self.poll(now)):
            self.completed = seq - 1
            self._pending_ns = now
        ring = self._ring
        index = ring.record(
            now, seq, chain, size, self.uid, signature, site, threading.get_ident() & 0xFFFFFFFF, flags, peer, tag
        )
        ring.sequence(
            self.slot, next(self._locks), seq, self.completed, chain, now, self._pending_ns, index, self.uid, self._described
        )
        return index

    def track(self, index: int, work: Any) -> None:
        """Keeps a call's Work to learn when it is complete."""
        works = self._works
        if len(works) >= _WORKS:
            works.pop()
        works.append((self.entered, index, self._entered_ns, work))

    def finish(self, index: int) -> None:
        """A call that was complete when it returned, as was everything before it on the same thread."""
        self._ring.done(index, monotonic_ns())
        if not self._works and self.completed != UNKNOWN:
            self.completed = self.entered
            self._pending_ns = 0
            self._ring.progress(self.slot, self.completed, 0)

    def fail(self, index: int, flags: int) -> None:
        """The call raised: it waits for nobody any more."""
        self._ring.flag(index, flags | Flag.RAISED)
        self.finish(index)

    def unknown(self) -> None:
        """Completion cannot be told here, from now on."""
        self._works.clear()
        self.completed = UNKNOWN
        self._pending_ns = 0

    def poll(self, now_ns: int) -> bool:
        """Drops finished works and notes how far the sequence got. True while some call is unfinished."""
        works = self._works
        if not works or not self._pruning.acquire(blocking=False):
            return bool(works)
        try:
            while works:
                seq, index, _, work = works[0]
                if not work.is_completed():
                    break
                works.popleft()
                self._ring.done(index, now_ns)
                self.completed = seq
            self._pending_ns = works[0][2] if works else 0
            if not works:
                self.completed = max(self.completed, seq)
        finally:
            self._pruning.release()
        self._ring.progress(self.slot, self.completed, self._pending_ns)
        return bool(works)
