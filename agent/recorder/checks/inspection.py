"""What is examined of a call, and when: what a rank puts in, before the call; the result, where
nobody can have changed it yet.

A result is there when its Work says so, and the user's from then on. Two places are known to lie
between:

- a blocking call: its caller waits for the Work next, in the same thread, so that waiting for it here changes nothing (on gloo, whose
  Work may be waited for twice; another backend's result is examined if it is there at once);
- a bucket of DistributedDataParallel's: its reducer, started by autograd's engine, waits before `backward` returns, and nobody else
  knows of the bucket till then. The engine runs a callback of ours behind the reducer's, in the same thread.

The results of other asynchronous calls are not examined: whoever waits for them may change them at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from hangwatch.model.limits import PERSISTENT_ROUNDS
from hangwatch.ring.layout import CheckFlag, RecordFlag
from hangwatch.ring.sampling import check_level, min_check_level

from .. import faults
from ..groups import GroupTrack
from ..streams import EnteredCall
from ..writer import RingWriter
from . import tensors as examine
from .arguments import TensorArguments
from .scaling import LossScalingTracker
from .settings import CheckSettings
from .table import CheckedCall, CheckTableWriter

# bytes: larger calls are sampled less often, so that no step waits for long
_LARGE_BYTES = 64 << 20
_MAX_RUNS = 256  # kinds of calls that are not finite at the moment
_ALWAYS_REPORTED_CALLS = 2  # calls of a run that are always told; then samples
_REPORT_INTERVAL_NS = 30_000_000_000  # and one as often as this, to say that it goes on
# calls that are not finite in a row last, too, where no rounds can be counted
_PERSISTENT_CALLS = 2048


@dataclass(slots=True)
class _NonfiniteRun:
    """Calls of one kind that were not finite, one after the other."""

    first_seq: int
    first_round: int
    call_count: int = 0
    last_reported_ns: int = 0  # the last one that was told
    is_persistence_reported: bool = False  # that it lasts


@dataclass(slots=True, kw_only=True)
class PendingCheck:
    """A call whose result is to be examined."""

    call: CheckedCall
    arguments: TensorArguments
    tensors: list[Any]
    is_sampled: bool
    is_gloo: bool
    needs_checksum: bool = False
    needs_overflow_check: bool = False
    needs_stats: bool = False


class CallChecker:
    """Serves the kernels of one recorder. What it writes into the ring is all that it does; it
    keeps no tensor past a backward.
    """

    def __init__(self, ring: RingWriter, settings: CheckSettings) -> None:
        self.settings = settings
        self.table = CheckTableWriter(ring)
        self.scaling = LossScalingTracker()
        self.overflow_count = 0
        self._min_level = min_check_level(settings.sample_every, 0, _LARGE_BYTES)
        self._runs_by_kind: dict[tuple[int, int, bool], _NonfiniteRun] = {}
        if settings.nonfinite:
            self.scaling.install_hooks()

    def check_inputs(
        self,
        entered: EnteredCall,
        arguments: TensorArguments,
        args: tuple[Any, ...],
        track: GroupTrack,
        caller: FrameType,
    ) -> PendingCheck | None:
        """Examines what this rank puts in; gives what is to be examined of the result, if anything.
        To be called `examine.Unseen`.
        """
        given = arguments.get_inputs(args, track)
        nan = inf = 0
        if self.settings.nonfinite and given:
            nan, inf = examine.count_nonfinite(given)
        height = check_level(entered[1])
        reduces = (
            arguments.is_reduction
            and self.settings.nonfinite
            and not nan
            and not inf
            and len(track.ranks) > 1
        )
        overflow = reduces and examine.has_half_precision(given)
        if height < self._min_level and not (nan or inf or overflow or self._runs_by_kind):
            return None
        call = self.table.read_call(entered)
        sampled = height >= self._min_level and height >= min_check_level(
            self.settings.sample_every, call.size, _LARGE_BYTES
        )
        if nan or inf or (self._runs_by_kind and given):
            inf = inf if inf and arguments.has_summing_op(args, caller) else 0
            self._record_nonfinite(call, nan, inf, given, output=False, sampled=sampled)
        if self.settings.values and sampled and given:
            self._record_stats(call, given, output=False)
        if arguments.replicated_output_index < 0:
            return None
        results = examine.flatten_tensors(args[arguments.replicated_output_index])
        if not all(map(examine.is_readable, results)):
            return None
        pending = PendingCheck(
            call=call,
            arguments=arguments,
            tensors=results,
            is_sampled=sampled,
            is_gloo=_runs_on_gloo(track),
        )
        pending.needs_overflow_check = (
            overflow or (reduces and sampled)
        ) and arguments.has_summing_op(args, caller)
        pending.needs_stats = self.settings.values and sampled and not given
        compared = self.settings.replicas and sampled and len(track.ranks) > 1
        # A float's sum is one computation whose bytes all get where each part is added up on one
        # rank, as in gloo's ring. Elsewhere each rank may add up for itself, in an order of its own
        # (MPI leaves that open), and legally differ in the last bit.
        pending.needs_checksum = compared and (
            not arguments.is_reduction
            or pending.is_gloo
            or not any(t.is_floating_point() for t in results)
        )
        return (
            pending
            if pending.needs_checksum or pending.needs_stats or pending.needs_overflow_check
            else None
        )

    def check_result(self, pending: PendingCheck, work: Any, caller: FrameType) -> None:
        """The call has returned ``work``, or None where it is complete by then."""
        if pending.call.flags & RecordFlag.BLOCKING:
            if work is None or (_wait_for_work(work) if pending.is_gloo else work.is_completed()):
                self._check_outputs(pending)
        elif (
            work is not None
            and pending.is_gloo
            and pending.arguments.name == "allreduce_"
            and caller.f_code is _get_engine_code()
        ):
            self._check_after_reducer(pending, work.get_future())

    def _check_after_reducer(self, pending: PendingCheck, future: Any) -> None:
        """The engine runs its callbacks in the order in which they came: when ours runs, the
        reducer's is in line, and ours goes behind it.

        That is one and the same moment on every rank, whichever bucket came when.
        """
        queue = _get_queue_callback()

        def requeue_check() -> None:
            with faults.swallow_errors("waiting for the reducer"):
                queue(check_bucket)

        def check_bucket() -> None:
            with faults.swallow_errors("examining a bucket"):
                if future.done() and _has_succeeded(future):
                    self._check_outputs(pending)

        try:
            queue(requeue_check)
        except RuntimeError:  # no backward is under way in this thread
            return

    def _check_outputs(self, pending: PendingCheck) -> None:
        with examine.DispatchBypass():
            found = examine.compute_checksum(pending.tensors) if pending.needs_checksum else None
            if found is not None:
                self.table.write_check(
                    pending.call, CheckFlag.OUTPUT | CheckFlag.CHECKSUM, checksum=found
                )
            if pending.needs_overflow_check:
                nan, inf = examine.count_nonfinite(pending.tensors)
                self._record_nonfinite(
                    pending.call, nan, inf, pending.tensors, output=True, sampled=pending.is_sampled
                )
            if pending.needs_stats:
                self._record_stats(pending.call, pending.tensors, output=True)

    def _record_stats(self, call: CheckedCall, tensors: list[Any], *, output: bool) -> None:
        found = examine.compute_stats(tensors)
        if found is not None:
            flags = CheckFlag.VALUES | (CheckFlag.OUTPUT if output else CheckFlag(0))
            self.table.write_check(call, flags, stats=found[0], nan=found[1])

    def _record_nonfinite(
        self,
        call: CheckedCall,
        nan: int,
        inf: int,
        tensors: list[Any],
        *,
        output: bool,
        sampled: bool,
    ) -> None:
        """Tells of a call that is not finite: the first ones of a run, samples of the rest, and
        that it lasts.
        """
        key = (call.uid, call.signature, output)
        if not nan and not inf:
            self._runs_by_kind.pop(key, None)
            return
        if len(self._runs_by_kind) >= _MAX_RUNS:
            self._runs_by_kind.clear()
        run = self._runs_by_kind.setdefault(key, _NonfiniteRun(call.seq, self.scaling.rounds))
        run.call_count += 1
        scaled = self.scaling.is_active or any(str(t.dtype) == "torch.float16" for t in tensors)
        self.overflow_count += bool(inf) and (scaled or examine.has_half_precision(tensors))
        rounds = max(
            self.scaling.rounds - run.first_round,
            PERSISTENT_ROUNDS if run.call_count >= _PERSISTENT_CALLS else 0,
        )
        lasts = rounds >= PERSISTENT_ROUNDS and not run.is_persistence_reported
        if (
            run.call_count <= _ALWAYS_REPORTED_CALLS
            or sampled
            or lasts
            or call.entered_ns - run.last_reported_ns > _REPORT_INTERVAL_NS
        ):
            run.is_persistence_reported |= lasts
            run.last_reported_ns = call.entered_ns
            flags = CheckFlag.NONFINITE
            flags |= CheckFlag.SCALED if scaled else CheckFlag(0)
            flags |= CheckFlag.OUTPUT if output else CheckFlag(0)
            self.table.write_check(
                call,
                flags,
                nan=nan,
                inf=inf,
                first_seq=run.first_seq,
                rounds=rounds,
                overflows=self.overflow_count,
            )


def _wait_for_work(work: Any) -> bool:
    """False where the call failed: its caller's own wait says so."""
    try:
        work.wait()
    except Exception:
        return False
    return True


def _has_succeeded(future: Any) -> bool:
    """False where the call failed: the reducer has raised the same."""
    try:
        future.value()
    except Exception:
        return False
    return True


def _runs_on_gloo(track: GroupTrack) -> bool:
    """Its calls on tensors in the host's memory go to gloo."""
    return any(
        name in ("gloo", "cpu:gloo") for name in str(track.description["backend"]).split(",")
    )


@functools.cache
def _get_engine_code() -> CodeType:
    """The frame from which a call comes that autograd's engine starts by itself."""
    from torch.autograd import graph

    code: CodeType = graph._engine_run_backward.__code__
    return code


@functools.cache
def _get_queue_callback() -> Callable[[Callable[[], None]], None]:
    import torch

    engine: Any = torch.autograd.Variable._execution_engine
    queue: Callable[[Callable[[], None]], None] = engine.queue_callback
    return queue
