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

from hangwatch.ring.layout import CheckFlag, RecordFlag
from hangwatch.ring.sampling import min_sampling_level, sampling_level
from hangwatch.tracking.checks import PERSISTENT_ROUNDS

from .. import faults
from ..groups import GroupTrack
from ..streams import Entered
from ..writer import RingWriter
from . import tensors as examine
from .arguments import Arguments
from .scaling import Scaling
from .settings import Asked
from .table import Noted, Table

_LARGE = 64 << 20  # bytes: larger calls are sampled less often, so that no step waits for long
_RUNS = 256  # kinds of calls that are not finite at the moment
_TOLD = 2  # calls of a run that are always told; then samples
_AGAIN_NS = 30_000_000_000  # and one as often as this, to say that it goes on
_MANY = 2048  # calls that are not finite in a row last, too, where no rounds can be counted


@dataclass(slots=True)
class _Run:
    """Calls of one kind that were not finite, one after the other."""

    first: int
    round: int
    calls: int = 0
    told_ns: int = 0  # the last one that was told
    told: bool = False  # that it lasts


@dataclass(slots=True, kw_only=True)
class Pending:
    """A call whose result is to be examined."""

    call: Noted
    operator: Arguments
    tensors: list[Any]
    sampled: bool
    gloo: bool
    checksum: bool = False
    overflow: bool = False
    values: bool = False


class Look:
    """Serves the kernels of one recorder. What it writes into the ring is all that it does; it
    keeps no tensor past a backward.
    """

    def __init__(self, ring: RingWriter, asked: Asked) -> None:
        self.asked = asked
        self.table = Table(ring)
        self.scaling = Scaling()
        self.overflows = 0
        self._lowest = min_sampling_level(asked.every, 0, _LARGE)
        self._runs: dict[tuple[int, int, bool], _Run] = {}
        if asked.nonfinite:
            self.scaling.watch()

    def before(
        self,
        entered: Entered,
        operator: Arguments,
        args: tuple[Any, ...],
        track: GroupTrack,
        caller: FrameType,
    ) -> Pending | None:
        """Examines what this rank puts in; gives what is to be examined of the result, if anything.
        To be called `examine.Unseen`.
        """
        given = operator.given(args, track)
        nan = inf = 0
        if self.asked.nonfinite and given:
            nan, inf = examine.nonfinite(given)
        height = sampling_level(entered[1])
        reduces = (
            operator.reduces
            and self.asked.nonfinite
            and not nan
            and not inf
            and len(track.ranks) > 1
        )
        overflow = reduces and examine.is_reduced(given)
        if height < self._lowest and not (nan or inf or overflow or self._runs):
            return None
        call = self.table.noted(entered)
        sampled = height >= self._lowest and height >= min_sampling_level(
            self.asked.every, call.size, _LARGE
        )
        if nan or inf or (self._runs and given):
            inf = inf if inf and operator.sums(args, caller) else 0
            self._note(call, nan, inf, given, output=False, sampled=sampled)
        if self.asked.values and sampled and given:
            self._note_values(call, given, output=False)
        if operator.equal_at < 0:
            return None
        results = examine.tensors_of(args[operator.equal_at])
        if not all(map(examine.readable, results)):
            return None
        pending = Pending(
            call=call, operator=operator, tensors=results, sampled=sampled, gloo=_on_gloo(track)
        )
        pending.overflow = (overflow or (reduces and sampled)) and operator.sums(args, caller)
        pending.values = self.asked.values and sampled and not given
        compared = self.asked.replicas and sampled and len(track.ranks) > 1
        # A float's sum is one computation whose bytes all get where each part is added up on one
        # rank, as in gloo's ring. Elsewhere each rank may add up for itself, in an order of its own
        # (MPI leaves that open), and legally differ in the last bit.
        pending.checksum = compared and (
            not operator.reduces or pending.gloo or not any(t.is_floating_point() for t in results)
        )
        return pending if pending.checksum or pending.values or pending.overflow else None

    def after(self, pending: Pending, work: Any, caller: FrameType) -> None:
        """The call has returned ``work``, or None where it is complete by then."""
        if pending.call.flags & RecordFlag.BLOCKING:
            if work is None or (_waited_for(work) if pending.gloo else work.is_completed()):
                self._result(pending)
        elif (
            work is not None
            and pending.gloo
            and pending.operator.name == "allreduce_"
            and caller.f_code is _engine()
        ):
            self._behind_the_reducer(pending, work.get_future())

    def _behind_the_reducer(self, pending: Pending, future: Any) -> None:
        """The engine runs its callbacks in the order in which they came: when ours runs, the
        reducer's is in line, and ours goes behind it.

        That is one and the same moment on every rank, whichever bucket came when.
        """
        queue = _queue()

        def behind() -> None:
            with faults.ours("waiting for the reducer"):
                queue(look)

        def look() -> None:
            with faults.ours("examining a bucket"):
                if future.done() and _succeeded(future):
                    self._result(pending)

        try:
            queue(behind)
        except RuntimeError:  # no backward is under way in this thread
            return

    def _result(self, pending: Pending) -> None:
        with examine.Unseen():
            found = examine.checksum(pending.tensors) if pending.checksum else None
            if found is not None:
                self.table.write(
                    pending.call, CheckFlag.OUTPUT | CheckFlag.CHECKSUM, checksum=found
                )
            if pending.overflow:
                nan, inf = examine.nonfinite(pending.tensors)
                self._note(
                    pending.call, nan, inf, pending.tensors, output=True, sampled=pending.sampled
                )
            if pending.values:
                self._note_values(pending.call, pending.tensors, output=True)

    def _note_values(self, call: Noted, tensors: list[Any], *, output: bool) -> None:
        found = examine.values(tensors)
        if found is not None:
            flags = CheckFlag.VALUES | (CheckFlag.OUTPUT if output else CheckFlag(0))
            self.table.write(call, flags, stats=found[0], nan=found[1])

    def _note(
        self, call: Noted, nan: int, inf: int, tensors: list[Any], *, output: bool, sampled: bool
    ) -> None:
        """Tells of a call that is not finite: the first ones of a run, samples of the rest, and
        that it lasts.
        """
        key = (call.uid, call.signature, output)
        if not nan and not inf:
            self._runs.pop(key, None)
            return
        if len(self._runs) >= _RUNS:
            self._runs.clear()
        run = self._runs.setdefault(key, _Run(call.seq, self.scaling.rounds))
        run.calls += 1
        scaled = self.scaling.active or any(str(t.dtype) == "torch.float16" for t in tensors)
        self.overflows += bool(inf) and (scaled or examine.is_reduced(tensors))
        rounds = max(
            self.scaling.rounds - run.round, PERSISTENT_ROUNDS if run.calls >= _MANY else 0
        )
        lasts = rounds >= PERSISTENT_ROUNDS and not run.told
        if run.calls <= _TOLD or sampled or lasts or call.entered_ns - run.told_ns > _AGAIN_NS:
            run.told |= lasts
            run.told_ns = call.entered_ns
            flags = CheckFlag.NONFINITE
            flags |= CheckFlag.SCALED if scaled else CheckFlag(0)
            flags |= CheckFlag.OUTPUT if output else CheckFlag(0)
            self.table.write(
                call,
                flags,
                nan=nan,
                inf=inf,
                first=run.first,
                rounds=rounds,
                overflows=self.overflows,
            )


def _waited_for(work: Any) -> bool:
    """False where the call failed: its caller's own wait says so."""
    try:
        work.wait()
    except Exception:
        return False
    return True


def _succeeded(future: Any) -> bool:
    """False where the call failed: the reducer has raised the same."""
    try:
        future.value()
    except Exception:
        return False
    return True


def _on_gloo(track: GroupTrack) -> bool:
    """Its calls on tensors in the host's memory go to gloo."""
    return any(name in ("gloo", "cpu:gloo") for name in str(track.described["backend"]).split(","))


@functools.cache
def _engine() -> CodeType:
    """The frame from which a call comes that autograd's engine starts by itself."""
    from torch.autograd import graph

    code: CodeType = graph._engine_run_backward.__code__
    return code


@functools.cache
def _queue() -> Callable[[Callable[[], None]], None]:
    import torch

    engine: Any = torch.autograd.Variable._execution_engine
    queue: Callable[[Callable[[], None]], None] = engine.queue_callback
    return queue
