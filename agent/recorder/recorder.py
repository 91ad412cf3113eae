"""The state that all kernels of a process share, whichever recorder is in use."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Work

from hangwatch.model.calls import Signature, encode_signature, with_agreement_hash
from hangwatch.model.operators import MustMatch
from hangwatch.ring.layout import RecordFlag

from .callers import CallSites
from .groups import GroupRegistry
from .native.library import NativeLibrary, NativePlannedCalls, NativeStreamRecorder
from .streams import CompletionMode, EnteredCall, PlannedCalls, StreamRecorder
from .writer import RingWriter

if TYPE_CHECKING:
    from .checks.inspection import CallChecker
    from .nccl import NcclPlugin

MAX_CACHED_CALLS = 4096  # different signatures of one operator
# The caches of all `CallReader`s, which outlive recorders, as kernels do.
call_caches: list[dict[Any, Any]] = []


class Recorder:
    """Writes the calls of this process to one ring."""

    def __init__(
        self,
        ring: RingWriter,
        native: NativeLibrary | None = None,
        checker: CallChecker | None = None,
        plugin: NcclPlugin | None = None,
    ) -> None:
        """``native`` records instead of Python. Only the Python recorder has a ``checker``.
        ``plugin`` counts the calls of NCCL itself, and needs to know which of them torch makes.
        """
        self.ring = ring
        self.mark_call = plugin.mark_call if plugin is not None else None
        self.checker = checker
        self.native = native
        ring.rollover_callback = self.clear_caches
        if native is not None:
            native.attach_ring(ring)
        self.groups = GroupRegistry(ring, self._make_stream, self.clear_caches)
        self.sites = CallSites(ring, native.set_code_origin if native is not None else None)
        # The number of the signature of a declared call, and its agreement hash, by (op, detail).
        self._declared_signatures: dict[tuple[str, str | None], tuple[int, int]] = {}

    def _make_stream(self, uid: int, slot: int) -> StreamRecorder:
        if self.native is not None:
            return NativeStreamRecorder(self.native, self.ring, uid, slot)
        return StreamRecorder(self.ring, uid, slot, Work.unbox)

    def clear_caches(self) -> None:
        """Clears all cached data that refers to interned data or to process groups."""
        clear_call_caches()
        if self.native is not None:
            self.native.clear_plans()

    def enter_declared_call(
        self, stream: StreamRecorder, op: str, detail: str | None = None
    ) -> EnteredCall:
        """Records a call of this thread that no operator makes, and that blocks until it returns.
        The members must agree on ``op`` and ``detail``.
        """
        number, agreement_hash = self._intern_declared(op, detail)
        site = self.sites.find_site(sys._getframe())
        record_body = stream.pack_record_body(number, site, RecordFlag.BLOCKING)
        return stream.enter_call(agreement_hash, record_body, 0, CompletionMode.RETURN)

    def _intern_declared(self, op: str, detail: str | None) -> tuple[int, int]:
        """The number of the signature of a declared call, and its agreement hash."""
        number, agreement_hash = self._declared_signatures.get((op, detail), (0, 0))
        if not number or not self.ring.is_signature_fresh(number):
            if len(self._declared_signatures) >= MAX_CACHED_CALLS:
                self._declared_signatures.clear()
            unhashed = Signature(op=op, detail=detail)
            signature = with_agreement_hash(unhashed, MustMatch.NOTHING, ())
            number = self.ring.intern_signature(encode_signature(signature))
            agreement_hash = signature.agree
            self._declared_signatures[op, detail] = number, agreement_hash
        return number, agreement_hash

    def plan_calls(self, op: str, calls: Iterable[tuple[StreamRecorder, str]]) -> PlannedCalls:
        """Prepares calls that are made together and often, and whose completion nothing shows, each in
        its stream and with its detail. The plan is valid until the caches are cleared.
        """
        planned = []
        for stream, detail in calls:
            number, agreement_hash = self._intern_declared(op, detail)
            stream.mark_completion_unknown()
            planned.append((stream, agreement_hash, number))
        if self.native is not None:
            return NativePlannedCalls(self.native, planned)
        return PlannedCalls(self.sites, planned)

    def count_dropped(self) -> int:
        """The number of calls and streams that were not recorded and whose place is not known."""
        native = self.native
        lost_count = native.lib.hw_get_lost_count(native.recorder) if native is not None else 0
        return self.groups.dropped_count + int(lost_count)

    def update_streams(self) -> int:
        """Updates the streams in the ring; returns the number of records that they then cover."""
        if self.native is not None:
            return self.native.update_streams()
        now = monotonic_ns()
        written = self.ring.written_count
        for stream in list(self.groups.streams.values()):
            stream.update_ring(now)
        return written


def clear_call_caches() -> None:
    """Forgets all calls: interned data or a process group that they refer to will be gone."""
    for cache in call_caches:
        cache.clear()
