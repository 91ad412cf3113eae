"""Diagnoses attempts and requests the evidence that the verdicts lack.

The diagnosis of a large attempt takes seconds. It runs in a thread, while heartbeats are queued that
the next diagnosis should take into account, and `DiagnosisBackoff` decides when that one may begin.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hangwatch.diagnosis import Diagnosis, EvidenceRequest, diagnose, find_call_mismatches, is_quiet
from hangwatch.model.ranks import AttemptKey, RankState
from hangwatch.protocol.heartbeat import get_family
from hangwatch.report.job_status import UnexplainedWait
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS

from ..core import load
from ..core.job_views import JobView
from ..core.limits import is_large
from ..ingest.heartbeat_queue import HeartbeatQueue
from ..shared_state import SharedState
from .cadence import DiagnosisBackoff, ReportScheduler

MAX_CALLS_WAIT_S = 3.0  # the longest delay of a large attempt's diagnosis for requested calls
# Heartbeats that are queued are applied for at least this long before a large attempt is diagnosed.
MIN_APPLY_QUEUED_S = 1.0
MAX_STEP_SAMPLES = 60
MIN_SPAN_S = 2.0  # the training speed needs this time between the first and the last sample

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """What is kept of one attempt from one round to the next. Times are monotonic."""

    backoff: DiagnosisBackoff
    unexplained_wait: UnexplainedWait | None = None
    pause_note: str = ""  # see `Diagnosis`
    has_failed: bool = False  # the last diagnosis raised an exception
    calls_requested_at: float | None = None  # set while the diagnosis waits for these calls
    # What was last published. For a large attempt, pages and the API show it as well.
    rank_states: dict[int, RankState] = field(default_factory=dict)
    large_job: JobView | None = None  # None for a small attempt
    job_state: str = ""  # as the last event on the job said
    stored_state: str = ""  # as the database holds it
    stored_at: float = 0.0
    states_due_at: float = 0.0  # the states of a large attempt are not read before this time
    # Step numbers, and when they were sampled.
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_STEP_SAMPLES))

    @property
    def steps_per_s(self) -> float | None:
        """The training speed over the last minute at most; None while too little is known."""
        if not self.steps:
            return None
        began_at, first_step = self.steps[0]
        ended_at, last_step = self.steps[-1]
        span_s = ended_at - began_at
        return max(0.0, (last_step - first_step) / span_s) if span_s >= MIN_SPAN_S else None


@dataclass(slots=True, kw_only=True)
class Diagnoser:
    shared: SharedState
    report_scheduler: ReportScheduler
    heartbeat_queue: HeartbeatQueue
    attempts: dict[AttemptKey, AttemptRecord] = field(default_factory=dict)
    # The seconds of the current round spent on large attempts, which have a backoff of their own.
    large_attempts_s: float = 0.0

    def get_record(self, attempt: Attempt) -> AttemptRecord:
        if attempt.key not in self.attempts:
            stall_after_s = self.report_scheduler.configured_limits.stall_after_s
            backoff = DiagnosisBackoff(attempt, stall_after_s)
            self.attempts[attempt.key] = AttemptRecord(backoff=backoff)
        return self.attempts[attempt.key]

    async def diagnose_attempt(self, attempt: Attempt) -> None:
        """Updates the attempt's incidents, unless its backoff or requested calls delay that."""
        shared = self.shared
        last = self.get_record(attempt)
        if last.backoff.skips_diagnosis(shared.now()):
            return
        if (
            attempt.diverged_groups
            and is_large(attempt.rank_count)
            and self._awaits_diverged_calls(attempt, last)
        ):
            return
        if attempt.has_urgent_changes:
            attempt.has_urgent_changes = False
            last.backoff.changed_at = shared.now()
        has_failed = True
        with shared.failures.isolate(f"the diagnosis of job {attempt.job}"):
            await self._run_diagnosis(attempt, last)
            has_failed = False
        last.has_failed = has_failed
        shared.counters.diagnoses += 1

    async def _run_diagnosis(self, attempt: Attempt, last: AttemptRecord) -> None:
        shared = self.shared
        limits = self.report_scheduler.get_limits(attempt.job)
        family = get_family(attempt.job)

        def update_incidents() -> Diagnosis:
            # Heartbeats that were applied before the work began count as received.
            now = shared.now()
            diagnosis = diagnose(attempt, now, limits)
            shared.incidents.apply_verdicts(attempt, diagnosis.verdicts, now)
            return diagnosis

        diagnosis = Diagnosis()
        spent_s = 0.0
        if not is_quiet(attempt, shared.now(), limits) or shared.incidents.list_open(attempt):
            apply_queued_s = max(MIN_APPLY_QUEUED_S, shared.load.get_wait_s(family) / 3)
            diagnosis, spent_s = await self.read_attempt(attempt, update_incidents, apply_queued_s)
        shared.counters.diagnosis_s += spent_s
        last.unexplained_wait = diagnosis.unexplained_wait
        last.pause_note = diagnosis.pause_note
        now = shared.now()
        wait_s = shared.load.get_wait_s(family)
        last.backoff.record_diagnosis(diagnosis, spent_s, wait_s, now)
        shared.commands.request_evidence(attempt, diagnosis.requests, now)
        # The hosts of the verdicts' ranks report sooner. If there is no culprit, the next reports of
        # the ranks inside the verdict's calls decide.
        ranks: set[int] = set()
        for verdict in diagnosis.verdicts:
            ranks.update(verdict.culprits)
            if not verdict.culprits:
                ranks.update(*(call_class.ranks for call_class in verdict.calls))
        if len(ranks) <= MAX_URGENT_SUSPECTS:  # most of more ranks have only not reported yet
            agents = {process.agent for process in attempt.find_processes(ranks)}
            self.report_scheduler.suspect_agents(agents, now)

    def _awaits_diverged_calls(self, attempt: Attempt, last: AttemptRecord) -> bool:
        """Requests the calls at which groups diverge. True while the diagnosis should wait for these
        calls: it takes seconds for a large attempt, and would be inconclusive without them.
        """
        now = self.shared.now()
        groups = {key for key in attempt.diverged_groups if not is_large(len(key[2]))}
        requests = []
        for mismatch in find_call_mismatches(attempt.streams_by_group, groups):
            streams = attempt.streams_by_group[mismatch.group.key]
            for rank, window in mismatch.calls_to_fetch:
                requests.append(EvidenceRequest.for_calls(rank, streams[rank], window))
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

        def measure() -> tuple[T, float]:
            started_at = time.thread_time()
            result = work()
            return result, time.thread_time() - started_at

        if not is_large(attempt.rank_count):
            return measure()
        started_at = time.perf_counter()
        try:
            run = self.heartbeat_queue.run_exclusively
            return await run(load.paused_collection()(measure), apply_queued_s)
        finally:
            self.large_attempts_s += time.perf_counter() - started_at
