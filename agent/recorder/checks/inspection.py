"""The checks of one call: a rank's input is examined before the call, the result before the user
can change it.

The user may change a result as soon as its Work is complete. It is examined first in two cases:

- A blocking call: the caller waits for the Work next, in the same thread, so waiting for it here
  changes nothing. This holds on gloo, whose Work may be waited for twice; the result of another
  backend is examined only if it is complete already.
- A bucket of DistributedDataParallel: the reducer, which autograd's engine starts, waits before
  `backward` returns, and no other code accesses the bucket until then. The engine runs our callback
  after the reducer's, in the same thread.

The results of other asynchronous calls are not examined: their caller may change them.

The findings go to the check table behind the ring's heap, which `hangwatch.ring.checks` reads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_post_hook

from hangwatch.model.limits import PERSISTENT_ROUNDS
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.layout import CHECKS, RECORDS, CheckFlag, RecordFlag
from hangwatch.ring.sampling import check_level, min_check_level

from .. import faults
from ..calls import flatten_tensors
from ..groups import GroupTrack
from ..streams import EnteredCall
from ..writer import RingWriter
from . import tensors as examine
from .settings import CheckSettings
from .tensors import FiniteStats, TensorArguments, has_half_precision

# Larger calls are sampled less often, so that checks delay no step for long.
_LARGE_BYTES = 64 << 20
_MAX_RUNS = 256  # kinds of calls that are tracked as non-finite
# The first calls of a run are always reported, further ones if they are sampled, and at least one
# per interval, to show that the run continues.
_ALWAYS_REPORTED_CALLS = 2
_REPORT_INTERVAL_NS = 30_000_000_000
# The code of the frame that calls come from if autograd's engine starts them.
_ENGINE_CODE = graph._engine_run_backward.__code__
_engine: Any = torch.autograd.Variable._execution_engine
# A run of this many calls is persistent, even if no rounds of training can be counted.
_PERSISTENT_CALLS = 2048


@dataclass(slots=True, kw_only=True)
class PendingCheck:
    """A call whose result must be examined, and what to examine."""

    call: CheckedCall
    arguments: TensorArguments
    tensors: list[Any]
    is_sampled: bool
    is_gloo: bool  # calls on tensors in the host's memory go to gloo
    needs_checksum: bool = False
    needs_overflow_check: bool = False
    needs_stats: bool = False


class CallChecker:
    """Checks the calls of one recorder. No tensor is kept longer than a backward takes."""

    def __init__(self, ring: RingWriter, settings: CheckSettings) -> None:
        self.settings = settings
        self.table = CheckTableWriter(ring)
        self.nonfinite = NonfiniteReporter(self.table)
        self._min_level = min_check_level(settings.sample_every, 0, _LARGE_BYTES)
        if settings.nonfinite:
            self.nonfinite.scaling.install_hooks()

    def check_inputs(
        self,
        entered: EnteredCall,
        arguments: TensorArguments,
        args: tuple[Any, ...],
        track: GroupTrack,
        caller: FrameType,
    ) -> PendingCheck | None:
        """Examines this rank's input; returns what to examine of the result, None if nothing."""
        with examine.DispatchBypass():
            inputs = arguments.get_inputs(args, track)
            nan = inf = 0
            if self.settings.nonfinite and inputs:
                nan, inf = examine.count_nonfinite(inputs)
            level = check_level(entered[1])
            has_several_ranks = len(track.group.ranks) > 1
            may_overflow = (
                arguments.is_reduction
                and self.settings.nonfinite
                and not nan
                and not inf
                and has_several_ranks
            )
            overflows_easily = may_overflow and examine.has_half_precision(inputs)
            has_open_runs = bool(self.nonfinite.runs)
            is_noteworthy = nan or inf or overflows_easily or has_open_runs
            if level < self._min_level and not is_noteworthy:
                return None
            call = self.table.read_call(entered)
            is_sampled = level >= self._min_level and level >= min_check_level(
                self.settings.sample_every, call.size, _LARGE_BYTES
            )
            if nan or inf or (has_open_runs and inputs):
                if inf and not arguments.has_summing_op(args, caller):
                    inf = 0
                self.nonfinite.record_call(
                    call, nan, inf, inputs, output=False, is_sampled=is_sampled
                )
            if self.settings.values and is_sampled and inputs:
                self._record_stats(call, inputs, output=False)
            if arguments.replicated_output_index < 0:
                return None
            results = flatten_tensors(args[arguments.replicated_output_index])
            if not all(map(examine.is_readable, results)):
                return None
            backends = track.group.backend.split(",")
            pending = PendingCheck(
                call=call,
                arguments=arguments,
                tensors=results,
                is_sampled=is_sampled,
                is_gloo="gloo" in backends or "cpu:gloo" in backends,
            )
            pending.needs_overflow_check = (
                overflows_easily or (may_overflow and is_sampled)
            ) and arguments.has_summing_op(args, caller)
            pending.needs_stats = self.settings.values and is_sampled and not inputs
            # A sum of floats is the same on all ranks if each part is added up on one rank, which
            # sends it to all, as in gloo's ring. On other backends each rank may add up in its own
            # order (MPI permits it), and results may legally differ in the last bit.
            may_differ = (
                arguments.is_reduction
                and not pending.is_gloo
                and any(tensor.is_floating_point() for tensor in results)
            )
            is_compared = self.settings.replicas and is_sampled and has_several_ranks
            pending.needs_checksum = is_compared and not may_differ
            is_needed = (
                pending.needs_checksum or pending.needs_stats or pending.needs_overflow_check
            )
            return pending if is_needed else None

    def check_result(self, pending: PendingCheck, work: Any, caller: FrameType) -> None:
        """Examines the result of a call that returned ``work``, or None if it is complete."""
        if pending.call.flags & RecordFlag.BLOCKING:
            if work is not None and pending.is_gloo:
                try:
                    work.wait()
                except Exception:  # the caller's own wait raises it
                    return
            elif work is not None and not work.is_completed():
                return
            self._check_outputs(pending)
        elif (
            work is not None
            and pending.is_gloo
            and pending.arguments.name == "allreduce_"
            and caller.f_code is _ENGINE_CODE
        ):
            self._check_after_reducer(pending, work.get_future())

    def _check_after_reducer(self, pending: PendingCheck, future: Any) -> None:
        """Examines a bucket after the reducer's callback.

        The engine runs its callbacks in the order in which they were queued. When our first
        callback runs, the reducer has queued its own, and we queue ours again behind it. This
        happens at the same point on every rank, in whatever order the buckets became ready.
        """
        queue = _engine.queue_callback
        guard = faults.run_guarded
        check = functools.partial(guard, "examining a bucket", self._check_bucket, pending, future)
        with contextlib.suppress(RuntimeError):  # no backward is under way in this thread
            queue(functools.partial(guard, "waiting for the reducer", queue, check))

    def _check_bucket(self, pending: PendingCheck, future: Any) -> None:
        if not future.done():
            return
        try:
            future.value()
        except Exception:  # the reducer has raised it
            return
        self._check_outputs(pending)

    def _check_outputs(self, pending: PendingCheck) -> None:
        with examine.DispatchBypass():
            if pending.needs_checksum:
                checksum = examine.compute_checksum(pending.tensors)
                if checksum is not None:
                    flags = CheckFlag.OUTPUT | CheckFlag.CHECKSUM
                    self.table.write_check(pending.call, flags, checksum=checksum)
            if pending.needs_overflow_check:
                nan, inf = examine.count_nonfinite(pending.tensors)
                self.nonfinite.record_call(
                    pending.call,
                    nan,
                    inf,
                    pending.tensors,
                    output=True,
                    is_sampled=pending.is_sampled,
                )
            if pending.needs_stats:
                self._record_stats(pending.call, pending.tensors, output=True)

    def _record_stats(self, call: CheckedCall, tensors: list[Any], *, output: bool) -> None:
        result = examine.compute_stats(tensors)
        if result is not None:
            stats, nonfinite_count = result
            flags = CheckFlag.VALUES | CheckFlag.OUTPUT if output else CheckFlag.VALUES
            self.table.write_check(call, flags, stats=stats, nan=nonfinite_count)


@dataclass(slots=True)
class _NonfiniteRun:
    """Consecutive non-finite calls of one kind."""

    first_seq: int
    first_round: int
    call_count: int = 0
    last_reported_ns: int = 0  # the time at which the last reported call was entered
    is_persistence_reported: bool = False


class NonfiniteReporter:
    """Writes non-finite calls into the check table."""

    def __init__(self, table: CheckTableWriter) -> None:
        self.scaling = LossScalingTracker()
        self._table = table
        self._overflow_count = 0  # calls with an Inf that loss scaling or half precision explains
        # The keys are (stream uid, signature, whether the result and not the input is meant).
        self.runs: dict[tuple[int, int, bool], _NonfiniteRun] = {}

    def record_call(
        self,
        call: CheckedCall,
        nan: int,
        inf: int,
        tensors: list[Any],
        *,
        output: bool,
        is_sampled: bool,
    ) -> None:
        """Reports a non-finite call: the first ones of a run, samples of the others, and once that
        the run persists. A finite call ends the run of its kind.
        """
        key = (call.uid, call.signature, output)
        if not nan and not inf:
            self.runs.pop(key, None)
            return
        if len(self.runs) >= _MAX_RUNS:
            self.runs.clear()
        run = self.runs.setdefault(key, _NonfiniteRun(call.seq, self.scaling.rounds))
        run.call_count += 1
        is_scaled = self.scaling.is_active or any(str(t.dtype) == "torch.float16" for t in tensors)
        if inf and (is_scaled or has_half_precision(tensors)):
            self._overflow_count += 1
        rounds = self.scaling.rounds - run.first_round
        if run.call_count >= _PERSISTENT_CALLS:
            rounds = max(rounds, PERSISTENT_ROUNDS)
        reports_persistence = rounds >= PERSISTENT_ROUNDS and not run.is_persistence_reported
        is_first = run.call_count <= _ALWAYS_REPORTED_CALLS
        is_due = call.entered_ns - run.last_reported_ns > _REPORT_INTERVAL_NS
        if not (is_first or is_sampled or reports_persistence or is_due):
            return
        run.is_persistence_reported |= reports_persistence
        run.last_reported_ns = call.entered_ns
        flags = CheckFlag.NONFINITE
        if is_scaled:
            flags |= CheckFlag.SCALED
        if output:
            flags |= CheckFlag.OUTPUT
        self._table.write_check(
            call,
            flags,
            nan=nan,
            inf=inf,
            first_seq=run.first_seq,
            rounds=rounds,
            overflows=self._overflow_count,
        )


class LossScalingTracker:
    """Tracks whether the job uses loss scaling, and counts its rounds of training.

    Loss scaling tries ever larger scales: gradients with Inf or NaN are normal then, and the step
    is skipped. Something is wrong only if they persist for many rounds. ``is_active`` is true once
    an enabled `torch.amp.GradScaler` was created. ``rounds`` counts the updates of the scaler or,
    if there is none, the optimizers' steps.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.rounds = 0

    def install_hooks(self) -> None:
        """Starts tracking in this process."""
        register_optimizer_step_post_hook(self._count_step)
        faults.extend_method(GradScaler, "__init__", self._track_scaler, "tracking a GradScaler")

    def _count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_active:
            self.rounds += 1

    def _track_scaler(self, scaler: Any, args: Any, kwargs: Any) -> None:
        if scaler.is_enabled():
            self.is_active = True
            owner = next(cls for cls in type(scaler).__mro__ if "update" in vars(cls))
            faults.extend_method(owner, "update", self._count_update, "counting a round")

    def _count_update(self, scaler: Any, args: Any, kwargs: Any) -> None:
        self.rounds += 1


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """The fields of a call's record that its check entries repeat, or that decide what to check."""

    entered_ns: int
    seq: int
    chain: int
    size: int
    uid: int
    signature: int
    site: int
    flags: int


class CheckTableWriter:
    """Writes the check table of a ring."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._indices = itertools.count()  # atomic under the GIL: any thread may write

    def read_call(self, call: EnteredCall) -> CheckedCall:
        """Reads the record of a call that was just entered, and so still exists."""
        record = RECORDS.slot.unpack_from(self._ring.map, RECORDS.locate_slot(call[2]))
        _, entered_ns, _, seq, chain, _, size, uid, signature, site, _, flags, _, _, _ = record
        return CheckedCall(entered_ns, seq, chain, size, uid, signature, site, flags)

    def write_check(
        self,
        call: CheckedCall,
        flags: int,
        *,
        checksum: int = 0,
        nan: int = 0,
        inf: int = 0,
        stats: FiniteStats = (0.0, 0.0, 0.0, 0.0),
        first_seq: int = 0,
        rounds: int = 0,
        overflows: int = 0,
    ) -> None:
        index = next(self._indices)
        entry = CheckEntry(
            call.entered_ns, call.seq, call.chain, checksum, nan, inf, first_seq, *stats,
            call.uid, call.signature, call.site, flags, rounds, overflows & 0xFFFFFFFF,
        )  # fmt: skip
        stamp = index + 1
        offset = CHECKS.locate_slot(index)
        CHECKS.slot.pack_into(self._ring.map, offset, stamp, *entry, 0, stamp & 0xFFFFFFFF)
