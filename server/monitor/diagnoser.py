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
    diagnose,
    find_call_mismatches,
    is_quiet,
)
from hangwatch.model.ranks import AttemptKey
from hangwatch.model.verdicts import Verdict
from hangwatch.report.job_status import UnexplainedWait
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS

from ..core import load
from ..core.limits import is_large
from ..ingest.heartbeat_queue import HeartbeatQueue
from ..shared_state import SharedState
from .cadence import DiagnosisBackoff, ReportScheduler

MAX_CALLS_WAIT_S = 3.0  # the longest delay of a large attempt's diagnosis for requested calls
# Heartbeats that are queued are applied for at least this long before a large attempt is diagnosed.
MIN_APPLY_QUEUED_S = 1.0

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class DiagnosedAttempt:
    """What is kept of one attempt from one diagnosis to the next."""

    backoff: DiagnosisBackoff
    unexplained_wait: UnexplainedWait | None = None
    has_failed: bool = False  # the last diagnosis raised an exception
    calls_requested_at: float | None = None  # set while the diagnosis waits for these calls


@dataclass(slots=True, kw_only=True)
class Diagnoser:
    shared: SharedState
    report_scheduler: ReportScheduler
    heartbeat_queue: HeartbeatQueue
    # What is kept of each attempt that was diagnosed.
    diagnosed: dict[AttemptKey, DiagnosedAttempt] = field(default_factory=dict)
    # The seconds of the current round spent on large attempts, which have a backoff of their own.
    large_attempts_s: float = 0.0

    async def diagnose_attempt(self, attempt: Attempt) -> None:
        """Updates the attempt's incidents, unless its backoff or requested calls delay that."""
        shared, last = self.shared, self.diagnosed.get(attempt.key)
        if last is None:
            stall_after_s = self.report_scheduler.configured_limits.stall_after_s
            last = DiagnosedAttempt(backoff=DiagnosisBackoff(attempt, stall_after_s))
            self.diagnosed[attempt.key] = last
        if last.backoff.skips_diagnosis(shared.clock.monotonic()):
            return
        if (
            attempt.diverged_groups
            and is_large(attempt.rank_count)
            and self._awaits_diverged_calls(attempt, last)
        ):
            return
        if attempt.has_urgent_changes:
            attempt.has_urgent_changes = False
            last.backoff.record_changes(shared.clock.monotonic())
        known_incidents = set(shared.incidents.records)
        has_failed = True
        with shared.failures.isolate(f"the diagnosis of job {attempt.job}"):
            await self._run_diagnosis(attempt, last)
            has_failed = False
        last.has_failed = has_failed
        shared.counters.diagnoses += 1
        shared.counters.opened += len(set(shared.incidents.records) - known_incidents)

    async def _run_diagnosis(self, attempt: Attempt, last: DiagnosedAttempt) -> None:
        shared, limits = self.shared, self.report_scheduler.limits

        def update_incidents() -> Diagnosis:
            # Heartbeats that were applied before the work began count as received.
            now = shared.clock.monotonic()
            diagnosis = diagnose(attempt, now, limits)
            shared.incidents.apply_verdicts(attempt, diagnosis.verdicts, now)
            return diagnosis

        diagnosis, spent_s = Diagnosis(), 0.0
        if not is_quiet(attempt) or shared.incidents.list_open(attempt):
            apply_queued_s = max(MIN_APPLY_QUEUED_S, shared.load.waited_s / 3)
            diagnosis, spent_s = await self.read_attempt(attempt, update_incidents, apply_queued_s)
        last.unexplained_wait = diagnosis.unexplained_wait
        now = shared.clock.monotonic()
        last.backoff.record_diagnosis(diagnosis, spent_s, shared.load.waited_s, now)
        shared.commands.request_evidence(attempt, diagnosis.requests, now)
        self._suspect_agents(attempt, diagnosis.verdicts, now)
        shared.counters.diagnosis_s += spent_s

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

    def _awaits_diverged_calls(self, attempt: Attempt, last: DiagnosedAttempt) -> bool:
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
            last.calls_requested_at = None
            return False
        if last.calls_requested_at is None:
            last.calls_requested_at = now
        return now - last.calls_requested_at < MAX_CALLS_WAIT_S

    async def read_attempt(
        self, attempt: Attempt, work: Callable[[], T], apply_queued_s: float = 0.0
    ) -> tuple[T, float]:
        """The result of ``work``, which must only read what heartbeats change, and the CPU seconds it
        took. For a large attempt it runs in a thread, while heartbeats wait: those that are queued
        are applied before, for up to ``apply_queued_s`` seconds.
        """
        if not is_large(attempt.rank_count):
            return _measure(work)

        def measure_without_collection() -> tuple[T, float]:
            with load.paused_collection():
                return _measure(work)

        started_at = time.perf_counter()
        try:
            run = self.heartbeat_queue.run_exclusively
            return await run(measure_without_collection, apply_queued_s)
        finally:
            self.large_attempts_s += time.perf_counter() - started_at


def _measure(work: Callable[[], T]) -> tuple[T, float]:
    started_at = time.thread_time()
    result = work()
    return result, time.thread_time() - started_at
