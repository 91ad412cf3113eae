"""When a large attempt is looked at again: a look takes seconds, in which heartbeats wait of which
the next one should know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.diagnosis import Diagnosis
from hangwatch.model.kinds import select_kinds
from hangwatch.model.ranks import AttemptKey
from hangwatch.tracking.attempt import Attempt

from ..core.limits import large

# Times what a look took, until the next one.
USUAL = 0.8  # of a diagnosis
SAME = 2.0  # where it came to the same as the one before
# where ranks came meanwhile: all that it was about is different again, and the server has the most
# to take in; at most
STARTING = 3.0
STATES = 20.0  # of telling the states of ranks
BACKLOG = (
    2.5  # seconds of waiting heartbeats, for each of which a diagnosis rests once more for as long
)
_SOON = frozenset(select_kinds(lambda spec: spec.is_due_early))


@dataclass(slots=True)
class _AttemptBackoff:
    """Of one attempt."""

    diagnosis: float = 0.0  # until when it is not diagnosed
    states: float = 0.0  # until when the states of its ranks are not told
    known_ranks: int = 0  # ranks, at the last diagnosis
    last_verdicts: frozenset[object] = frozenset()  # what that came to


@dataclass(slots=True)
class DiagnosisBackoff:
    """All times are seconds on the monotonic clock. A small attempt never rests."""

    stall_after: float
    _of: dict[AttemptKey, _AttemptBackoff] = field(default_factory=dict)

    def skips_diagnosis(self, attempt: Attempt, now: float) -> bool:
        """It is not diagnosed yet."""
        return now < self._at(attempt).diagnosis

    def skips_states(self, attempt: Attempt, now: float) -> bool:
        """The states of its ranks are not told yet."""
        return now < self._at(attempt).states

    def record_diagnosis(
        self, attempt: Attempt, found: Diagnosis, spent: float, waited_s: float, now: float
    ) -> None:
        """A diagnosis took ``spent`` seconds of CPU, while heartbeats wait for ``waited_s``."""
        if not large(attempt.rank_count):
            return
        rest = self._at(attempt)
        told = frozenset((v.kind, v.culprits, v.is_confirmed) for v in found.verdicts)
        due_at = min(
            (v.began_at + self.stall_after for v in found.verdicts if not v.is_confirmed),
            default=float("inf"),
        )
        same = bool(told) and told == rest.last_verdicts and not found.requests and due_at > now
        if len(attempt.processes) > rest.known_ranks > 0:
            times = STARTING
        else:
            times = SAME if same else USUAL
            if not any(v.kind in _SOON and not v.is_confirmed for v in found.verdicts):
                times = min(times * (1 + waited_s / BACKLOG), STARTING)
        rest.known_ranks, rest.last_verdicts = len(attempt.processes), told
        rest.diagnosis = min(now + times * spent, due_at if due_at > now else float("inf"))

    def record_states_report(self, attempt: Attempt, spent: float, now: float) -> None:
        """To tell the states of its ranks took ``spent`` seconds of CPU."""
        if large(attempt.rank_count):
            self._at(attempt).states = now + STATES * spent

    def forget_attempt(self, key: AttemptKey) -> None:
        self._of.pop(key, None)

    def _at(self, attempt: Attempt) -> _AttemptBackoff:
        return self._of.setdefault(attempt.key, _AttemptBackoff())
