"""Diagnoses attempts and requests the evidence that the verdicts lack.

The diagnosis of a large attempt takes seconds. It runs in a thread, while heartbeats are queued that
the next diagnosis should take into account, and `DiagnosisBackoff` decides when that one may begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

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

from ..core import load
from ..core.limits import is_large
from ..ingest.heartbeat_queue import HeartbeatQueue
from ..shared_state import SharedState
from .cadence import DiagnosisBackoff, ReportScheduler

# An attempt is still diagnosed for this long after its last heartbeat: other hosts may report late.
DIAGNOSED_AFTER_END_S = 10.0
MAX_CALLS_WAIT_S = 3.0  # the longest delay of a large attempt's diagnosis for requested calls
# Heartbeats that are queued are applied for at least this long before a large attempt is diagnosed.
MIN_APPLY_QUEUED_S = 1.0

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Diagnoser:
    shared: SharedState
    report_scheduler: ReportScheduler
    backoff: DiagnosisBackoff
    reader: AttemptReader
    # The results of each attempt's last diagnosis.
    unexplained_waits: dict[AttemptKey, UnexplainedWait] = field(default_factory=dict)
    failed_attempts: set[AttemptKey] = field(default_factory=set)
    _calls_requested_at: dict[AttemptKey, float] = field(default_factory=dict)

    def is_due(self, attempt: Attempt, now: float) -> bool:
        return not attempt.is_finished or now - attempt.last_seen_at < DIAGNOSED_AFTER_END_S

    async def diagnose_attempt(self, attempt: Attempt) -> None:
        """Updates the attempt's incidents, unless its backoff or requested calls delay that."""
        if self.backoff.skips_diagnosis(attempt, self.shared.clock.monotonic()):
            return
        if (
            attempt.diverged_groups
            and is_large(attempt.rank_count)
            and self._awaits_diverged_calls(attempt)
        ):
            return
        if attempt.has_urgent_changes:
            attempt.has_urgent_changes = False
            self.backoff.record_changes(attempt, self.shared.clock.monotonic())
        known_incidents = set(self.shared.incidents.records)
        spent_s = 0.0
        self.failed_attempts.add(attempt.key)
        with self.shared.failures.isolate(f"the diagnosis of job {attempt.job}"):
            spent_s = await self._run_diagnosis(attempt)
            self.failed_attempts.discard(attempt.key)
        self.shared.counters.diagnoses += 1
        self.shared.counters.diagnosis_s += spent_s
        self.shared.counters.opened += len(set(self.shared.incidents.records) - known_incidents)

    def forget_attempt(self, key: AttemptKey) -> None:
        self._calls_requested_at.pop(key, None)
        self.unexplained_waits.pop(key, None)
        self.failed_attempts.discard(key)
        self.backoff.forget_attempt(key)

    async def _run_diagnosis(self, attempt: Attempt) -> float:
        """Returns the CPU seconds it took."""
        limits = self.report_scheduler.limits

        def update_incidents() -> Diagnosis:
            # Heartbeats that were applied before the work began count as received.
            now = self.shared.clock.monotonic()
            diagnosis = diagnose(attempt, now, limits)
            self.shared.incidents.apply_verdicts(attempt, diagnosis.verdicts, now)
            return diagnosis

        diagnosis, spent_s = Diagnosis(), 0.0
        waited_s = self.shared.load.waited_s
        if not is_quiet(attempt) or self.shared.incidents.list_open(attempt):
            apply_queued_s = max(MIN_APPLY_QUEUED_S, waited_s / 3)
            diagnosis, spent_s = await self.reader.run(attempt, update_incidents, apply_queued_s)
        if diagnosis.unexplained_wait is None:
            self.unexplained_waits.pop(attempt.key, None)
        else:
            self.unexplained_waits[attempt.key] = diagnosis.unexplained_wait
        now = self.shared.clock.monotonic()
        waited_s = self.shared.load.waited_s
        self.backoff.record_diagnosis(attempt, diagnosis, spent_s, waited_s, now)
        self.shared.commands.request_evidence(attempt, diagnosis.requests, now)
        self._suspect_agents(attempt, diagnosis.verdicts, now)
        return spent_s

    def _suspect_agents(self, attempt: Attempt, verdicts: Iterable[Verdict], now: float) -> None:
        """Makes the hosts of the ranks in the verdicts report sooner."""
        ranks: set[int] = set()
        for verdict in verdicts:
            # The next reports of the ranks inside the verdict's calls decide if there is no culprit.
            ranks.update(verdict.culprits or (r for call in verdict.calls for r in call.ranks))
        if len(ranks) > MAX_URGENT_SUSPECTS:
            return  # most of so many ranks have only not reported yet
        processes = (attempt.processes.get(rank) for rank in ranks)
        agents = {process.agent for process in processes if process is not None}
        self.report_scheduler.suspect_agents(agents, now)

    def _awaits_diverged_calls(self, attempt: Attempt) -> bool:
        """Requests the calls at which groups diverge. True while the diagnosis should wait for these
        calls: it takes seconds for a large attempt, and would be inconclusive without them.
        """
        now = self.shared.clock.monotonic()
        groups = {key for key in attempt.diverged_groups if not is_large(len(key[2]))}
        requests = [
            EvidenceRequest.for_calls(
                rank, attempt.streams_by_group[mismatch.group.key][rank], window
            )
            for mismatch in find_call_mismatches(attempt.streams_by_group, groups)
            for rank, window in mismatch.calls_to_fetch
        ]
        self.shared.commands.request_evidence(attempt, requests, now)
        if not requests and not attempt.awaits_calls:
            self._calls_requested_at.pop(attempt.key, None)
            return False
        requested_at = self._calls_requested_at.setdefault(attempt.key, now)
        return now - requested_at < MAX_CALLS_WAIT_S


@dataclass(slots=True)
class AttemptReader:
    """Runs work that reads a whole attempt: for a large one in a thread, while heartbeats wait."""

    heartbeat_queue: HeartbeatQueue
    # The seconds of the current round spent on large attempts, which have a backoff of their own.
    large_attempts_s: float = 0.0

    async def run(
        self, attempt: Attempt, work: Callable[[], T], apply_queued_s: float = 0.0
    ) -> tuple[T, float]:
        """The result of ``work`` and the CPU seconds it took. ``work`` must only read what
        heartbeats change.

        Heartbeats that are queued for a large attempt are applied first, for up to
        ``apply_queued_s`` seconds.
        """
        if not is_large(attempt.rank_count):
            return _measure(work)

        def measure_without_collection() -> tuple[T, float]:
            with load.paused_collection():
                return _measure(work)

        started_at = time.perf_counter()
        try:
            return await self.heartbeat_queue.run_exclusively(
                measure_without_collection, apply_queued_s
            )
        finally:
            self.large_attempts_s += time.perf_counter() - started_at


def _measure(work: Callable[[], T]) -> tuple[T, float]:
    started_at = time.thread_time()
    result = work()
    return result, time.thread_time() - started_at
