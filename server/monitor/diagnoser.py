"""Diagnoses attempts and requests the evidence that the verdicts lack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.diagnosis import (
    Diagnosis,
    EvidenceRequest,
    UnexplainedWait,
    diagnose,
    find_call_mismatches,
    is_quiet,
)
from hangwatch.model.ranks import AttemptKey
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS

from ..core.clock import Clock
from ..core.limits import is_large
from ..incidents.registry import IncidentRegistry
from ..ingest.command_queue import CommandQueue
from .attempt_reader import AttemptReader
from .backoff import DiagnosisBackoff
from .counters import Counters
from .report_intervals import ReportIntervals
from .report_scheduler import ReportScheduler

# An attempt is still diagnosed for this long after its last heartbeat: other hosts may report late.
DIAGNOSED_AFTER_END_S = 10.0
MAX_CALLS_WAIT_S = 3.0  # for which the diagnosis of a large attempt is delayed for requested calls
# Heartbeats that are queued are applied for at least this long before a large attempt is diagnosed.
MIN_APPLY_QUEUED_S = 1.0


@dataclass(slots=True, kw_only=True)
class Diagnoser:
    clock: Clock
    incidents: IncidentRegistry
    commands: CommandQueue
    report_scheduler: ReportScheduler
    intervals: ReportIntervals
    backoff: DiagnosisBackoff
    reader: AttemptReader
    counters: Counters
    # As of each attempt's last diagnosis.
    unexplained_waits: dict[AttemptKey, UnexplainedWait] = field(default_factory=dict)
    failed_attempts: set[AttemptKey] = field(default_factory=set)
    _calls_requested_at: dict[AttemptKey, float] = field(default_factory=dict)

    def is_due(self, attempt: Attempt, now: float) -> bool:
        return not attempt.is_finished or now - attempt.last_seen_at < DIAGNOSED_AFTER_END_S

    async def diagnose_attempt(self, attempt: Attempt) -> None:
        """Updates the attempt's incidents, unless its backoff or requested calls delay that."""
        if self.backoff.skips_diagnosis(attempt, self.clock.monotonic()):
            return
        if (
            attempt.diverged_groups
            and is_large(attempt.rank_count)
            and self._awaits_diverged_calls(attempt)
        ):
            return
        if attempt.has_urgent_changes:
            attempt.has_urgent_changes = False
            self.backoff.record_changes(attempt, self.clock.monotonic())
        known_incidents = set(self.incidents.records)
        spent_s = 0.0
        self.failed_attempts.add(attempt.key)
        with self.counters.failures.isolate(f"the diagnosis of job {attempt.job}"):
            spent_s = await self._run_diagnosis(attempt)
            self.failed_attempts.discard(attempt.key)
        self.counters.diagnoses += 1
        self.counters.diagnosis_s += spent_s
        self.counters.opened += len(set(self.incidents.records) - known_incidents)

    def forget_attempt(self, key: AttemptKey) -> None:
        self._calls_requested_at.pop(key, None)
        self.unexplained_waits.pop(key, None)
        self.failed_attempts.discard(key)
        self.backoff.forget_attempt(key)

    async def _run_diagnosis(self, attempt: Attempt) -> float:
        """Returns the CPU seconds it took."""
        limits = self.intervals.limits

        def update_incidents() -> Diagnosis:
            # Read here: heartbeats that were applied before the work began count as received.
            now = self.clock.monotonic()
            diagnosis = diagnose(attempt, now, limits)
            self.incidents.apply_verdicts(attempt, diagnosis.verdicts, now)
            return diagnosis

        diagnosis, spent_s = Diagnosis(), 0.0
        waited_s = self.intervals.load.waited_s
        if not is_quiet(attempt) or self.incidents.list_open(attempt):
            apply_queued_s = max(MIN_APPLY_QUEUED_S, waited_s / 3)
            diagnosis, spent_s = await self.reader.run(attempt, update_incidents, apply_queued_s)
        if diagnosis.unexplained_wait is None:
            self.unexplained_waits.pop(attempt.key, None)
        else:
            self.unexplained_waits[attempt.key] = diagnosis.unexplained_wait
        now = self.clock.monotonic()
        waited_s = self.intervals.load.waited_s
        self.backoff.record_diagnosis(attempt, diagnosis, spent_s, waited_s, now)
        self.commands.request_evidence(attempt, diagnosis.requests, now)
        self._suspect_agents(attempt, diagnosis.verdicts, now)
        return spent_s

    def _suspect_agents(self, attempt: Attempt, verdicts: Iterable[Verdict], now: float) -> None:
        """Makes the hosts of the ranks in the verdicts report sooner."""
        ranks: set[int] = set()
        for verdict in verdicts:
            ranks.update(verdict.culprits or _list_calling_ranks(verdict))
        if len(ranks) > MAX_URGENT_SUSPECTS:
            return  # most of so many have only not reported yet
        processes = (attempt.processes.get(rank) for rank in ranks)
        agents = {process.agent for process in processes if process is not None}
        self.report_scheduler.suspect_agents(agents, now)

    def _awaits_diverged_calls(self, attempt: Attempt) -> bool:
        """Requests the calls at which groups diverge. True while the diagnosis should wait for
        them: it takes seconds for a large attempt, and would be inconclusive without them.
        """
        now = self.clock.monotonic()
        groups = {key for key in attempt.diverged_groups if not is_large(len(key[2]))}
        requests = [
            EvidenceRequest.for_calls(
                rank, attempt.streams_by_group[mismatch.group.key][rank], window
            )
            for mismatch in find_call_mismatches(attempt.streams_by_group, groups)
            for rank, window in mismatch.calls_to_fetch
        ]
        self.commands.request_evidence(attempt, requests, now)
        if not requests and not attempt.awaits_calls:
            self._calls_requested_at.pop(attempt.key, None)
            return False
        requested_at = self._calls_requested_at.setdefault(attempt.key, now)
        return now - requested_at < MAX_CALLS_WAIT_S


def _list_calling_ranks(verdict: Verdict) -> list[int]:
    """The ranks inside the verdict's calls: their next reports decide if there is no culprit."""
    return [rank for call in verdict.calls for rank in call.ranks]
