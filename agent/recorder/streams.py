"""One stream of calls on this rank: its position, its running hash, and its unfinished calls.

An unfinished call is watched by its Work without keeping that alive, because a Work holds the
tensors of its call. The functions of torch.distributed call an operator, and then wait for the Work
themselves, or return it to the user. They hold it by a Python object, to which we have a weak
reference. That object does not exist yet when the operator returns to its kernel: torch makes it
for the result, unless the Work has one already. So the kernel makes it, and leaves it in the frame
of torch's function until that returns.

Calls that C++ starts, such as those for the buckets of DistributedDataParallel, have no such
object. Their Works are held until the next call or poll finds them complete.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import mmap
import sys
import threading
import weakref
from _thread import LockType, allocate_lock, get_ident, get_native_id
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic_ns
from types import FunctionType
from typing import Any

from hangwatch.model.calls import CHAIN_BASE, UINT64_MASK, LossReason, unchain
from hangwatch.ring.layout import (
    RECORD_BODY_STRUCT,
    RECORD_PACKED_STRUCT,
    RECORD_SLOTS,
    RECORDS,
    UNKNOWN_COMPLETED,
    RecordFlag,
)

from . import faults
from .callers import CallSites, inspect_thread
from .dynamo import run_uncompiled
from .writer import RingWriter

# Unfinished calls of a stream that are kept to find their completion. A finished one is dropped at
# the next call or poll. Beyond this number the middle ones are dropped: the oldest and the newest
# are enough to show how far the stream is complete.
_MAX_PENDING_WORKS = 16
_UINT32_MASK = 0xFFFFFFFF
_RETRACTED_FLAGS = RecordFlag.RAISED | RecordFlag.RETRACTED
_pack_record = RECORD_PACKED_STRUCT.pack_into
_RECORDS_OFFSET = RECORDS.offset
_RECORD_SIZE = RECORDS.slot.size
_FLAGS_OFFSET = 24  # in the packed body of a record
# The name under which a frame holds a Work; no local variable has it.
FRAME_KEY = "<Work watched by hangwatch>"


class CompletionMode:
    """How the completion of a call is detected. Enums would slow down every call."""

    WORK = 0  # the Work is polled
    NEXT = 1  # the Work never reports completion: the call is complete once another one is made
    RETURN = 2  # the call is complete when it returns
    UNOBSERVABLE = 3
    # The native recorder uses one of the others in place of WORK.
    TIMED = 4  # the Work is polled, and the Work of some calls reports the time of completion
    REPORTED = 5  # the Work reports completion
    REPORTED_TIMED = 6  # the Work reports completion, and the time of some calls is published


_NEXT, _RETURN = CompletionMode.NEXT, CompletionMode.RETURN
_UNOBSERVABLE, _BATCHED = CompletionMode.UNOBSERVABLE, RecordFlag.BATCHED

# A call in progress: (its stream, seq, index of its record, entered_ns, the thread that it blocks
# or 0, its `CompletionMode`, agreement hash). A tuple, because a class would slow down every call.
EnteredCall = tuple["StreamRecorder", int, int, int, int, int, int]

# (stream, agreement hash, signature's number, bytes, peer, tag, flags, is blocking, completion mode)
CallDetails = tuple["StreamRecorder", int, int, int, int, int, int, bool, int]

# The Work of a call: None, if nothing shows its completion; the boxed Work; a weak reference to it,
# if the call is complete once the Work is deleted; or a `DroppableWork`.
WatchedWork = Any

# (an `EnteredCall`, its `WatchedWork`, and in some cases a weak reference that must be kept for it)
PendingCall = tuple[Any, ...]


class CurrentBatch(threading.local):
    """The batch of sends and receives that this thread began last."""

    began_ns = 0


current_batch = CurrentBatch()


@dataclass(slots=True, eq=False)
class StreamRecorder:
    """A stream's state. Threads that make calls write it, another one polls it; none waits."""

    ring: RingWriter
    uid: int
    slot: int
    unbox: Callable[[Any], Any]  # unboxes a Work
    entered: int = 0
    completed: int = 0
    chain: int = 0
    pending_works: deque[PendingCall] = field(default_factory=deque)  # unfinished, oldest first
    _map: mmap.mmap = field(init=False)
    _record_indices: Iterator[int] = field(init=False)
    _seq_counter: Iterator[int] = field(default_factory=functools.partial(itertools.count, 1))
    _last_entered_ns: int = 0
    _published: tuple[int, int] = (0, 0)  # calls that were entered and completed at the last poll
    _prune_lock: LockType = field(default_factory=allocate_lock)  # never waited for
    _last_thread: int = 0  # the thread that made the last call
    # Whether the former thread continued with work of its own at the last change of threads.
    _was_independent: bool = False

    def __post_init__(self) -> None:
        self._map = self.ring.map
        self._record_indices = self.ring.record_indices

    def pack_record_body(
        self, signature: int, site: int, flags: int, size: int = 0, peer: int = -1, tag: int = 0
    ) -> bytes:
        """The part of a record that is the same for every such call of this thread."""
        return RECORD_BODY_STRUCT.pack(
            size, self.uid, signature, site, get_native_id(), flags, peer, tag
        )

    def enter_call(
        self, agreement_hash: int, record_body: bytes, blocked_thread: int, completion_mode: int
    ) -> EnteredCall:
        """Records a call before it is made; ``blocked_thread`` waits in it, 0: no thread does."""
        self.entered = seq = next(self._seq_counter)
        # This is `hangwatch.model.calls.extend_chain`, without the cost of a function call.
        self.chain = chain = (self.chain * CHAIN_BASE + agreement_hash) & UINT64_MASK
        now = monotonic_ns()
        if completion_mode == _UNOBSERVABLE and record_body[_FLAGS_OFFSET] & _BATCHED:
            now = current_batch.began_ns or now
        self._last_entered_ns = now
        works = self.pending_works
        thread = blocked_thread or get_ident()
        if thread != self._last_thread and self._detect_concurrency(thread):
            # The flag is set before the record can be read without it.
            *body, flags, peer, tag = RECORD_BODY_STRUCT.unpack(record_body)
            record_body = RECORD_BODY_STRUCT.pack(*body, flags | RecordFlag.SHARED, peer, tag)
        if not works:
            if self.completed != UNKNOWN_COMPLETED:
                self.completed = seq - 1
        elif works[-1][0][4] == thread:
            # A blocking call has completed once its thread makes the next one.
            works.clear()
            self.completed = seq - 1
        elif not self.poll_works(now):
            self.completed = seq - 1
        elif len(works) >= _MAX_PENDING_WORKS:
            works.pop()
        index = next(self._record_indices)
        stamp = self.ring.written_count = index + 1
        _pack_record(
            self._map, _RECORDS_OFFSET + (index % RECORD_SLOTS) * _RECORD_SIZE,
            stamp, now, 0, seq, chain, self.completed, record_body, stamp & _UINT32_MASK,
        )  # fmt: skip
        return self, seq, index, now, blocked_thread, completion_mode, agreement_hash

    def _detect_concurrency(self, thread: int) -> bool:
        """Called when another thread than before makes a call. Returns True if both threads run
        independently, so that the order of their calls is random.

        A thread that hands over to another waits for it or has exited. The thread may also just
        have finished its part, so that one change of threads proves nothing: two are required.
        """
        former_thread, self._last_thread = self._last_thread, thread
        was_independent = self._was_independent
        is_in_torch, is_independent = inspect_thread(former_thread)
        self._was_independent = is_independent
        if is_independent and was_independent:
            return True
        works = self.pending_works
        return is_in_torch and bool(works) and works[-1][0][4] == former_thread

    def finish_call(self, call: EnteredCall) -> None:
        """Records that a call was complete when it returned."""
        self.ring.record_completion(call[2], monotonic_ns())
        newest_work = self._find_observable_work() if self.pending_works else None
        if newest_work is not None:
            # Asynchronous calls before it are unfinished: this call is complete with the last one.
            self.pending_works.append((call, newest_work))
        elif self.completed != UNKNOWN_COMPLETED:
            self.pending_works.clear()
            self.completed = self.entered
            self.ring.write_progress(self.slot, self.completed, 0)

    def add_pending_call(
        self,
        call: EnteredCall,
        boxed_work: Any,
        frame_locals: dict[str, Any] | None,
        *,
        backend_keeps_it: bool,
    ) -> None:
        """Watches the Work of a call whose operator returned it.

        ``frame_locals`` are the local variables of the function of torch.distributed that holds the
        Work until it returns; None if C++ may hold it. ``backend_keeps_it``: see `DroppableWork`.
        """
        if frame_locals is None or boxed_work is None:
            self.pending_works.append((call, boxed_work))
        elif call[4]:
            frame_locals[FRAME_KEY] = boxed_work
            self.pending_works.append((call, weakref.ref(boxed_work)))
        else:
            unbox = self.unbox
            work = frame_locals[FRAME_KEY] = unbox(boxed_work)
            droppable = DroppableWork(boxed_work, unbox, backend_keeps_it=backend_keeps_it)
            kept = weakref.ref(work, droppable.drop_work)
            self.pending_works.append((call, droppable, kept))

    def _find_observable_work(self) -> WatchedWork:
        """The newest Work that will show its completion; None if there is none."""
        for _, work, *_ in reversed(tuple(self.pending_works)):
            if self._is_complete(work) is not None:
                return work
        return None

    def fail_call(self, call: EnteredCall) -> None:
        """Records that the call raised an exception, and so waits no longer."""
        self.ring.add_flags(call[2], RecordFlag.RAISED)
        self.finish_call(call)

    def retract_call(self, call: EnteredCall) -> None:
        """Takes back a call that raised an exception before it communicated: the next one gets its
        number. If another thread has made that one already, the numbers are not certain any more.
        """
        seq, index = call[1], call[2]
        if self.entered != seq:
            self.mark_incomplete(LossReason.RAISED, seq)
            self.fail_call(call)
            return
        self._seq_counter = itertools.count(seq)
        self.entered = seq - 1
        self.chain = unchain(self.chain, call[6])
        self.ring.add_flags(index, _RETRACTED_FLAGS)
        self.ring.record_completion(index, monotonic_ns())
        self.ring.write_newest(self.slot, self.entered, self.chain, self._last_entered_ns)
        self._published = self.entered, self.completed

    def mark_completion_unknown(self) -> None:
        """Marks the completion of this stream's calls as unobservable from now on."""
        if self.completed != UNKNOWN_COMPLETED:
            self.pending_works.clear()
            self.completed = UNKNOWN_COMPLETED
            self.ring.write_progress(self.slot, UNKNOWN_COMPLETED, 0)

    def poll_works(self, now_ns: int) -> bool:
        """Drops finished works and records the progress. Returns whether a call is unfinished."""
        works = self.pending_works
        if not self._prune_lock.acquire(blocking=False):
            return bool(works)
        try:
            while works:
                call, work, *_ = works[0]
                is_complete = self._is_complete(work)
                if is_complete is None:
                    is_complete = len(works) > 1
                if not is_complete:
                    break
                works.popleft()
                self.ring.record_completion(call[2], now_ns)
                self.completed = call[1]
            if len(works) > 1 and self._is_complete((last := works[-1])[1]):
                # The Works of some backends never report completion: a later one covers them.
                while works.popleft() is not last:
                    pass
                # `entered` may be the number of a call whose operator has not returned.
                self.completed = last[0][1]
            self.ring.write_progress(self.slot, self.completed, works[0][0][3] if works else 0)
        except IndexError:  # the calling thread cleared them: its blocking call has completed
            return False
        finally:
            self._prune_lock.release()
        return bool(works)

    def mark_incomplete(self, reason: LossReason, from_seq: int = 0) -> None:
        """Records that the numbers and running hashes of this stream's calls are not certain from
        call ``from_seq`` on, by default the next one, which must not be recorded yet.
        """
        self.ring.record_loss(self.slot, from_seq or self.entered + 1, reason)

    def close_stream(self) -> None:
        """Frees the slot of the stream, whose group no longer exists."""
        self.ring.close_stream(self.slot)

    def _is_complete(self, work: WatchedWork) -> bool | None:
        """Whether the call of a Work is complete; None if nothing shows it."""
        if work is None:
            return None
        if type(work) is DroppableWork:
            return work.is_complete()
        if type(work) is weakref.ref:
            work = work()
            if work is None:  # torch's function has waited for it
                return True
        return bool(self.unbox(work).is_completed())

    def update_ring(self, now_ns: int) -> None:
        """Publishes the position of the stream. Called by the polling thread.

        The newest record holds the position too, but may be overwritten.
        """
        position = self.entered, self.completed
        if self.pending_works:
            self.poll_works(now_ns)
        elif position == self._published:
            return  # most of thousands of channels do not change
        else:
            # The position is published while an operator blocks, too: until it returns, its call is
            # not in `pending_works`, and `enter_call` publishes nothing.
            self.ring.write_progress(self.slot, self.completed, 0)
        self.ring.write_newest(self.slot, self.entered, self.chain, self._last_entered_ns)
        self._published = position


def leave_call(call: EnteredCall) -> None:
    """Records that the operator returned, if its completion is not detected by its Work."""
    mode = call[5]
    if mode == _NEXT:
        call[0].pending_works.append((call, None))
    elif mode == _RETURN:
        call[0].finish_call(call)


class PlannedCalls:
    """Calls that are made together and often, one in each stream, such as a replay of a CUDA graph. Their
    completion is not observable.
    """

    def __init__(
        self, sites: CallSites, planned: Iterable[tuple[StreamRecorder, int, int]]
    ) -> None:
        """``planned`` are the streams, each with its call's agreement hash and signature's number."""
        self._sites = sites
        self._planned = list(planned)
        self._entered: list[EnteredCall] = []

    def enter(self) -> None:
        """Records the calls before they are made."""
        site = self._sites.find_site(sys._getframe())
        self._entered = [
            stream.enter_call(
                agreement_hash, stream.pack_record_body(signature, site, 0), 0, _UNOBSERVABLE
            )
            for stream, agreement_hash, signature in self._planned
        ]

    def fail(self) -> None:
        """Records that the last ones raised an exception, and may not have communicated."""
        for stream, seq, *_ in self._entered:
            stream.mark_incomplete(LossReason.RAISED, seq)


@dataclass(slots=True, eq=False)
class DroppableWork:
    """The Work of an asynchronous call, until the job drops its Python object of it."""

    boxed: Any
    unbox: Callable[[Any], Any]
    backend_keeps_it: bool  # the backend itself holds the Work until it is complete
    was_complete: bool = False  # when it was dropped

    def is_complete(self) -> bool | None:
        """Whether the Work is complete; None if the job has dropped it without waiting."""
        if self.boxed is not None:
            return bool(self.unbox(self.boxed).is_completed())
        return self.was_complete or None

    def drop_work(self, _: object) -> None:
        """Releases the Work when its Python object is deleted, unless the backend still uses it."""
        try:
            self.was_complete = bool(self.is_complete())
            if self.was_complete or not self.backend_keeps_it:
                self.boxed = None
        except Exception as error:  # our error: the job's object is deleted all the same
            faults.record_fault("dropping a Work", error)


@functools.cache
def find_holding_file() -> str:
    """The file of torch's functions whose local variables hold the Work until they return."""
    from torch.distributed import distributed_c10d as c10d

    function: FunctionType = run_uncompiled(inspect.unwrap, c10d.isend)
    return function.__code__.co_filename
