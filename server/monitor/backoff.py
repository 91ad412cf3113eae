"""When a large attempt is diagnosed again. A diagnosis takes seconds, during which heartbeats are
queued that the next diagnosis should take into account.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.diagnosis import Diagnosis
from hangwatch.model.kinds import select_kinds
from hangwatch.model.ranks import AttemptKey
from hangwatch.tracking.attempt import Attempt

from ..core.limits import is_large

# The pause before the next run, as a multiple of the CPU time of the last one.
DIAGNOSIS_FACTOR = 0.8
UNCHANGED_FACTOR = 2.0  # if the verdicts did not change
# where ranks came meanwhile: all that it was about is different again, and the server has the most
# to take in; at most
STARTING_FACTOR = 3.0
STATES_FACTOR = 20.0  # of telling the states of ranks
BACKLOG_STEP_S = (
    2.5  # seconds of waiting heartbeats, for each of which a diagnosis rests once more for as long
)
_EARLY_KINDS = frozenset(select_kinds(lambda spec: spec.is_due_early))


@dataclass(slots=True)
class _AttemptBackoff:
    """The backoff of one attempt."""

    diagnosis: float = 0.0  # no diagnosis before this time
    states: float = 0.0  # no report of rank states before this time
    known_ranks: int = 0  # at the last diagnosis
    last_verdicts: frozenset[object] = frozenset()  # of the last diagnosis


@dataclass(slots=True)
class DiagnosisBackoff:
    """All times are seconds on the monotonic clock. A small attempt has no backoff."""

    stall_after: float
    _by_attempt: dict[AttemptKey, _AttemptBackoff] = field(default_factory=dict)

    def skips_diagnosis(self, attempt: Attempt, now: float) -> bool:
        """Whether the attempt must not be diagnosed yet."""
        return now < self._at(attempt).diagnosis

    def skips_states(self, attempt: Attempt, now: float) -> bool:
        """Whether the states of its ranks must not be reported yet."""
        return now < self._at(attempt).states

    def record_diagnosis(
        self, attempt: Attempt, found: Diagnosis, spent: float, waited_s: float, now: float
    ) -> None:
        """Records a diagnosis that took ``spent`` CPU seconds, while heartbeats wait ``waited_s``."""
        if not is_large(attempt.rank_count):
            return
        rest = self._at(attempt)
        told = frozenset((v.kind, v.culprits, v.is_confirmed) for v in found.verdicts)
        due_at = min(
            (v.began_at + self.stall_after for v in found.verdicts if not v.is_confirmed),
            default=float("inf"),
        )
        same = bool(told) and told == rest.last_verdicts and not found.requests and due_at > now
        if len(attempt.processes) > rest.known_ranks > 0:
            times = STARTING_FACTOR
        else:
            times = UNCHANGED_FACTOR if same else DIAGNOSIS_FACTOR
            if not any(v.kind in _EARLY_KINDS and not v.is_confirmed for v in found.verdicts):
                times = min(times * (1 + waited_s / BACKLOG_STEP_S), STARTING_FACTOR)
        rest.known_ranks, rest.last_verdicts = len(attempt.processes), told
        rest.diagnosis = min(now + times * spent, due_at if due_at > now else float("inf"))

    def record_states_report(self, attempt: Attempt, spent: float, now: float) -> None:
        """Records a report of rank states that took ``spent`` CPU seconds."""
        if is_large(attempt.rank_count):
            self._at(attempt).states = now + STATES_FACTOR * spent

    def forget_attempt(self, key: AttemptKey) -> None:
        self._by_attempt.pop(key, None)

    def _at(self, attempt: Attempt) -> _AttemptBackoff:
        return self._by_attempt.setdefault(attempt.key, _AttemptBackoff())
