"""Tracks runs of calls with NaN or Inf, and decides which of these calls to report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hangwatch.model.limits import PERSISTENT_ROUNDS
from hangwatch.ring.layout import CheckFlag

from .scaling import LossScalingTracker
from .table import CheckedCall, CheckTableWriter
from .tensors import has_half_precision

_MAX_RUNS = 256  # kinds of calls that are tracked as non-finite
# The first calls of a run are always reported, further ones if they are sampled, and at least one
# per interval, to show that the run continues.
_ALWAYS_REPORTED_CALLS = 2
_REPORT_INTERVAL_NS = 30_000_000_000
# A run of this many calls is persistent, even if no rounds of training can be counted.
_PERSISTENT_CALLS = 2048


@dataclass(slots=True)
class _NonfiniteRun:
    """Consecutive non-finite calls of one kind."""

    first_seq: int
    first_round: int
    call_count: int = 0
    last_reported_ns: int = 0  # when the last reported call was entered
    is_persistence_reported: bool = False

    def count_rounds(self, current_round: int) -> int:
        """The length of the run in rounds of training."""
        rounds = current_round - self.first_round
        return max(rounds, PERSISTENT_ROUNDS) if self.call_count >= _PERSISTENT_CALLS else rounds


class NonfiniteReporter:
    """Writes non-finite calls into the check table."""

    def __init__(self, table: CheckTableWriter) -> None:
        self.scaling = LossScalingTracker()
        self._table = table
        self._overflow_count = 0  # calls with an Inf that loss scaling or half precision explains
        # By (stream uid, signature, whether the result is non-finite rather than the input).
        self._runs: dict[tuple[int, int, bool], _NonfiniteRun] = {}

    @property
    def has_open_runs(self) -> bool:
        return bool(self._runs)

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
            self._runs.pop(key, None)
            return
        if len(self._runs) >= _MAX_RUNS:
            self._runs.clear()
        run = self._runs.setdefault(key, _NonfiniteRun(call.seq, self.scaling.rounds))
        run.call_count += 1
        is_scaled = self.scaling.is_active or any(str(t.dtype) == "torch.float16" for t in tensors)
        self._overflow_count += bool(inf) and (is_scaled or has_half_precision(tensors))
        rounds = run.count_rounds(self.scaling.rounds)
        reports_persistence = rounds >= PERSISTENT_ROUNDS and not run.is_persistence_reported
        if not (
            run.call_count <= _ALWAYS_REPORTED_CALLS
            or is_sampled
            or reports_persistence
            or call.entered_ns - run.last_reported_ns > _REPORT_INTERVAL_NS
        ):
            return
        run.is_persistence_reported |= reports_persistence
        run.last_reported_ns = call.entered_ns
        flags = CheckFlag.NONFINITE
        flags |= CheckFlag.SCALED if is_scaled else CheckFlag(0)
        flags |= CheckFlag.OUTPUT if output else CheckFlag(0)
        self._table.write_check(
            call,
            flags,
            nan=nan,
            inf=inf,
            first_seq=run.first_seq,
            rounds=rounds,
            overflows=self._overflow_count,
        )
