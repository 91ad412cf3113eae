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

# The pause before the next run, as a multiple of the CPU time of the last one. That is short as long
# as few ranks wait.
WAITING_FACTOR = 6.0
QUIET_FACTOR = 12.0  # if no rank is suspected: none can be due soon, and a change is urgent
MAX_PAUSE_S = 4.0  # without a backlog
EVIDENCE_FACTOR = 2.0  # if what is reported next may decide a verdict
URGENT_FACTOR = 1.5  # if a verdict is due early, or after urgent changes
STARTING_FACTOR = 6.0  # if new ranks reported: earlier verdicts are outdated, and it takes long
STATES_FACTOR = 30.0  # for reports of the states of ranks
# As long as some ranks make calls, most others that seem to wait have only not reported since.
STILL_AFTER_S = 3.0
# Changes decide a verdict only after they have lasted for a while.
RECENT_CHANGES_S = 5.0
# For this long after its onset a verdict is new, and after it is due it may become more precise.
FRESH_VERDICT_S = 10.0
# The pause grows by its own length for each of these seconds that heartbeats have been queued.
BACKLOG_STEP_S = 2.5
_EARLY_KINDS = frozenset(select_kinds(lambda spec: spec.is_due_early))


@dataclass(slots=True)
class _AttemptBackoff:
    """The backoff of one attempt."""

    diagnosis_until: float = 0.0  # no diagnosis before this time
    changes_until: float = 0.0  # the same after urgent changes
    changed_at: float = float("-inf")  # when the last diagnosis after urgent changes began
    states_until: float = 0.0  # no report of rank states before this time
    last_rank_count: int = 0  # ranks that had reported at the last diagnosis


@dataclass(slots=True)
class DiagnosisBackoff:
    """All times are seconds on the monotonic clock. A small attempt has no backoff."""

    stall_after: float
    _by_attempt: dict[AttemptKey, _AttemptBackoff] = field(default_factory=dict)

    def skips_diagnosis(self, attempt: Attempt, now: float) -> bool:
        """Whether the attempt must not be diagnosed yet."""
        backoff = self._get_backoff(attempt)
        return now < (
            backoff.changes_until if attempt.has_urgent_changes else backoff.diagnosis_until
        )

    def record_changes(self, attempt: Attempt, now: float) -> None:
        """Records that a diagnosis begins after urgent changes."""
        self._get_backoff(attempt).changed_at = now

    def skips_states(self, attempt: Attempt, now: float) -> bool:
        """Whether the states of its ranks must not be reported yet."""
        return now < self._get_backoff(attempt).states_until

    def record_diagnosis(
        self, attempt: Attempt, diagnosis: Diagnosis, spent: float, waited_s: float, now: float
    ) -> None:
        """Records a diagnosis that took ``spent`` CPU seconds. The oldest queued heartbeat has
        waited for ``waited_s``.
        """
        if not is_large(attempt.rank_count):
            return
        backoff = self._get_backoff(attempt)
        rank_count = len(attempt.processes)
        unconfirmed = [v for v in diagnosis.verdicts if not v.is_confirmed]
        due_at = min((v.began_at + self.stall_after for v in unconfirmed), default=float("inf"))
        if rank_count > backoff.last_rank_count > 0:
            pause_s = STARTING_FACTOR * spent
        elif any(v.kind in _EARLY_KINDS for v in unconfirmed):
            pause_s = URGENT_FACTOR * spent
        else:
            usual_factor = WAITING_FACTOR if diagnosis.verdicts else QUIET_FACTOR
            factor = usual_factor
            if self._awaits_evidence(attempt, diagnosis, now):
                factor = EVIDENCE_FACTOR
            pause_s = min(factor * spent, MAX_PAUSE_S) * (1 + waited_s / BACKLOG_STEP_S)
            pause_s = min(pause_s, usual_factor * spent)
        backoff.last_rank_count = rank_count
        backoff.changes_until = now + URGENT_FACTOR * spent
        backoff.diagnosis_until = now + pause_s
        if due_at > now:
            backoff.diagnosis_until = min(backoff.diagnosis_until, due_at)

    def _awaits_evidence(self, attempt: Attempt, diagnosis: Diagnosis, now: float) -> bool:
        """Whether what is reported within the next seconds may decide a verdict."""
        if now - self._get_backoff(attempt).changed_at < RECENT_CHANGES_S:
            # A verdict on what has just begun has probably taken them into account.
            return not any(
                verdict.is_confirmed and now - verdict.began_at < FRESH_VERDICT_S
                for verdict in diagnosis.verdicts
            )
        if now - attempt.newest_call_at < STILL_AFTER_S:
            return False
        for verdict in diagnosis.verdicts:
            due_s = now - verdict.began_at - self.stall_after
            if due_s >= 0.0 and (not verdict.is_confirmed or due_s < FRESH_VERDICT_S):
                return True
        return False

    def record_states_report(self, attempt: Attempt, spent: float, now: float) -> None:
        """Records a report of rank states that took ``spent`` CPU seconds."""
        if is_large(attempt.rank_count):
            self._get_backoff(attempt).states_until = now + STATES_FACTOR * spent

    def forget_attempt(self, key: AttemptKey) -> None:
        self._by_attempt.pop(key, None)

    def _get_backoff(self, attempt: Attempt) -> _AttemptBackoff:
        return self._by_attempt.setdefault(attempt.key, _AttemptBackoff())
