"""The loop that diagnoses every job at short intervals, reports what changed, and drops attempts and
node agents that need not stay in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from hangwatch.model.ranks import RankState
from hangwatch.report.documents import build_incident_event
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import SUCCEEDED_SILENT_S
from hangwatch.tracking.tenants import take_turns

from ..alerting.alerter import take_due_event
from ..core import limits, load, memory
from ..core.events import wait_for_event
from ..core.job_views import AttemptView, JobView
from ..incidents.registry import NOT_REPORTING_LIMIT_S
from ..ingest.heartbeat_queue import SLICE_S
from ..recovery.aborter import Aborter
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker
from . import views
from .cadence import DECIDING_FACTOR, MIN_PAUSE_S, ROUND_INTERVAL_S, STATES_FACTOR, RoundTurns
from .diagnoser import Diagnoser
from .job_claims import JobClaims

log = logging.getLogger("hangwatch")

# Ranks by (previous state, new state). The previous one is None for a new rank.
StateChanges = dict[tuple[RankState | None, RankState], list[int]]

MAX_ALERT_DELAY_S = 1.5  # the longest wait of an alert for its culprits' stacks
SAMPLE_INTERVAL_S = 1.0  # the interval of the samples of a job's step number
STORE_INTERVAL_S = 10.0  # an attempt whose state does not change is stored at this interval
# A finished attempt is still diagnosed for this long after its last heartbeat: other hosts may report
# late.
DIAGNOSED_AFTER_END_S = 10.0
FINISHED_ATTEMPTS_KEPT = 20
FINISHED_KEPT_S = 3600.0
# The processes of all finished attempts together that have a successor.
SUCCEEDED_PROCESSES_KEPT = 20_000
MEMORY_CHECK_INTERVAL_S = 1.0
RESTRICTION_FACTOR = 30.0  # the pause after finding the largest job, by the time that this took
SILENCE_CHECK_INTERVAL_S = 3.0  # a large job that was cut off leaves thousands of silent agents
PROCESSES_DROPPED_PER_STEP = 10  # a step takes this many processes of a large attempt


@dataclass(slots=True, kw_only=True)
class DiagnosisLoop:
    """The rounds of the diagnosis, on the event loop's thread; `Diagnoser` may use another. What changed
    in a round goes to the readers of events and to the database; alerts go out when they are due.
    """

    shared: SharedState
    diagnoser: Diagnoser
    persistence: PersistenceWorker
    retention: Retention
    aborter: Aborter | None
    job_claims: JobClaims | None  # None: no other server shares the database
    repeat_after_s: float  # the time between reminders of a job that still hangs; 0 for none
    last_round_at: float = 0.0
    _diagnosis_turns: RoundTurns = field(default_factory=RoundTurns)
    _display_turns: RoundTurns = field(default_factory=RoundTurns)
    _garbage: load.GarbageScheduler = field(default_factory=load.GarbageScheduler)

    async def run(self) -> None:
        """Runs rounds until the task is cancelled."""
        diagnoser = self.diagnoser
        has_changes = self.shared.has_changes
        while True:
            started_at = time.perf_counter()
            diagnoser.large_attempts_s = 0.0
            await self.run_round()
            spent_s = time.perf_counter() - started_at - diagnoser.large_attempts_s
            has_changes.clear()
            if await wait_for_event(ROUND_INTERVAL_S, has_changes):
                # However many hosts report, their heartbeats have most of the time.
                await asyncio.sleep(max(MIN_PAUSE_S, DECIDING_FACTOR * spent_s))

    async def run_round(self) -> None:
        """Diagnoses the current attempts and reports all changes, whatever fails in one of them."""
        if self.job_claims is not None:
            await self.job_claims.confirm_jobs()
        shared = self.shared
        fleet = shared.fleet
        incidents = shared.incidents
        scheduler = self.diagnoser.report_scheduler
        isolate = shared.failures.isolate
        now = shared.now()
        current = [a for a in fleet.attempts.values() if fleet.is_current(a, now)]
        current_keys = {attempt.key for attempt in current}
        paused_at = time.perf_counter()
        for attempt in self._diagnosis_turns.iter_due(current):
            with isolate(f"the incidents of job {attempt.job}"):
                silent_s = now - attempt.last_seen_at
                if not attempt.is_finished or silent_s < DIAGNOSED_AFTER_END_S:
                    await self.diagnoser.diagnose_attempt(attempt)
                    incidents.resolve_earlier_attempts(attempt, now, current_keys)
            if time.perf_counter() - paused_at > MIN_PAUSE_S:
                # The reports that have arrived: the next job would seem to be silent without them.
                await asyncio.sleep(MIN_PAUSE_S)
                paused_at = time.perf_counter()
        now = shared.now()
        with isolate("resolving the incidents of finished jobs"):
            incidents.resolve_finished_jobs(fleet, now)
        if self.aborter is not None:
            with isolate("the recovery of jobs"):
                await self.aborter.advance_recoveries(scheduler.get_recent_s)
        await self._publish_incidents()
        self._send_due_alerts(now)
        for attempt in self._display_turns.iter_due(list(fleet.attempts.values())):
            with isolate(f"the display of job {attempt.job}"):
                await self._publish_states(attempt)
        with isolate("dropping what is no longer needed"):
            shared.commands.drop_expired(now, scheduler.longest_gap_s)
            self.retention.drop_expired(now)
            self.retention.save_memory(now)
            self._garbage.update(len(fleet.processes), now)
        with isolate("scheduling reports"):
            scheduler.start_round(now)
        self.last_round_at = now

    async def _publish_incidents(self) -> None:
        """Stores and publishes the incidents that changed in this round."""
        isolate = self.shared.failures.isolate
        for record in self.shared.incidents.take_changed():
            with isolate(f"the display of incident {record.incident.id}"):
                if record.is_own:
                    is_new = record.opened_at >= self.last_round_at
                    self.persistence.mark_changed(record, urgent=is_new or not record.is_open)
                event = build_incident_event(record.incident)
                self.shared.events.publish_event("incident", event)
            await asyncio.sleep(0)

    def _send_due_alerts(self, now: float) -> None:
        """Sends an alert for each incident that opened, became more severe or was resolved."""
        shared = self.shared
        wall = shared.clock.wall()
        for record in shared.incidents.records.values():
            with shared.failures.isolate(f"the alerts of incident {record.incident.id}"):
                attempt = shared.fleet.attempts.get(record.attempt_key)
                is_ready = (
                    attempt is None
                    or now - record.opened_at >= MAX_ALERT_DELAY_S
                    or not shared.awaits_stacks(record, attempt)
                )
                event = take_due_event(
                    record,
                    ready=is_ready,
                    hangs_on=attempt is not None and not attempt.is_finished,
                    now=wall,
                    repeat_after=self.repeat_after_s,
                )
                if event:
                    self.persistence.queue_alert(record, event)

    async def _publish_states(self, attempt: Attempt) -> None:
        """Publishes the ranks, and the job, whose state changed since the last round."""
        shared = self.shared
        published = self.diagnoser.get_record(attempt)
        now = shared.now()
        if now < published.states_due_at:
            return
        records = shared.incidents.list_open(attempt)
        lost_after_s = self.diagnoser.report_scheduler.get_limits(attempt.job).lost_after_s

        def compute_states() -> tuple[dict[int, RankState], JobView, StateChanges]:
            """The state of each rank, the job, and the ranks whose state changed."""
            before = published.rank_states
            states = views.compute_states(attempt, records, now, lost_after_s)
            changes: StateChanges = {}
            if states != before:
                for rank, state in states.items():
                    if (previous := before.get(rank)) is not state:
                        changes.setdefault((previous, state), []).append(rank)
            job = views.describe_job(attempt, Counter(states.values()), records, now)
            return states, job, changes

        (states, job, changes), spent_s = await self.diagnoser.read_attempt(attempt, compute_states)
        published.rank_states = states
        if limits.is_large(attempt.rank_count):
            published.large_job = job
            published.states_due_at = shared.now() + STATES_FACTOR * spent_s
        # All ranks with the same change share one event: thousands may change in one round.
        for (before, state), ranks in changes.items():
            event = {
                "job": attempt.job,
                "attempt": attempt.number,
                "ranks": ranks,
                "state": state.value,
                "before": None if before is None else before.value,
            }
            shared.events.publish_event("rank", event)
        is_latest = shared.fleet.latest_attempt(attempt.job) is attempt
        has_changed = published.stored_state != job.state
        if not attempt.is_finished:
            has_changed = has_changed or now - published.stored_at >= STORE_INTERVAL_S
        if has_changed and (is_latest or not attempt.is_finished):
            published.stored_state = job.state
            published.stored_at = now
            stored = AttemptView(
                job=job.job,
                attempt=job.attempt,
                state=job.state,
                world_size=job.world_size,
                hosts=job.hosts,
                opened_at=shared.clock.date(attempt.opened_at),
                last_seen_at=shared.clock.date(attempt.last_seen_at),
                restart=attempt.restart,
            )
            self.persistence.record_attempt(stored)
        if is_latest:
            steps = published.steps
            is_due = not steps or now - steps[-1][0] >= SAMPLE_INTERVAL_S
            if job.step is not None and is_due:
                steps.append((now, job.step))
            if published.job_state != job.state:
                published.job_state = job.state
                shared.events.publish_event("job", job)


@dataclass(slots=True, kw_only=True)
class Retention:
    """Drops attempts and node agents, and what each part keeps for them."""

    shared: SharedState
    diagnoser: Diagnoser
    _large_dropped: list[Attempt] = field(default_factory=list)  # their processes remain
    _dropping: asyncio.Task[None] | None = None
    _silence_check_due_at: float = float("-inf")
    _memory_check_due_at: float = float("-inf")
    _restriction_due_at: float = float("-inf")

    def drop_expired(self, now: float) -> None:
        """Drops old attempts, and silent agents that are silent for long or have no live rank."""
        attempts = self.shared.fleet.attempts
        # The keys are sorted by job and number, so that each job's last number remains.
        latest_numbers = {key.job: key.number for key in sorted(attempts)}
        finished_count = process_count = 0
        newest_first = sorted(attempts.values(), key=lambda a: -a.last_seen_at)
        for attempt in take_turns(newest_first, lambda a: a.job):
            is_succeeded = attempt.number != latest_numbers[attempt.job]
            silent_s = now - attempt.last_seen_at
            # The exit of ranks on a lost host is never reported.
            is_over = attempt.is_finished or (is_succeeded and silent_s > SUCCEEDED_SILENT_S)
            is_expired = silent_s > (FINISHED_KEPT_S if is_over else NOT_REPORTING_LIMIT_S)
            is_expired |= not attempt.processes  # all have joined another world
            if is_over:
                finished_count += 1
                process_count += len(attempt.processes)
                is_expired |= finished_count > FINISHED_ATTEMPTS_KEPT
                is_expired |= is_succeeded and process_count > SUCCEEDED_PROCESSES_KEPT
            if is_expired:
                self.drop_attempt(attempt)
        if self._large_dropped and (self._dropping is None or self._dropping.done()):
            self._dropping = asyncio.create_task(self._drop_processes())
        if now < self._silence_check_due_at:
            return
        self._silence_check_due_at = now + SILENCE_CHECK_INTERVAL_S
        shared = self.shared
        for agent_id, silent_s in shared.agents.update_silent(now):
            processes = shared.fleet.list_processes(agent_id)
            has_finished = all(process.exit is not None for process in processes)
            if silent_s > FINISHED_KEPT_S or has_finished:
                shared.agents.forget_silent(agent_id)
                shared.performance.forget_agent(agent_id)

    def save_memory(self, now: float) -> None:
        """Drops stacks if the server comes near the limit on its memory. From `GROWTH_SHARE` on, drops calls
        of the largest job, too, and lets it grow no more.
        """
        if now < self._memory_check_due_at:
            return
        self._memory_check_due_at = now + MEMORY_CHECK_INTERVAL_S
        fleet = self.shared.fleet
        resident_bytes = limits.read_resident_bytes()
        is_scarce = resident_bytes > memory.GROWTH_SHARE * limits.MEMORY.maximum
        if not is_scarce:
            fleet.restricted_family = None
        elif now >= self._restriction_due_at:
            began_at = time.perf_counter()
            family = memory.find_largest_family(fleet)
            fleet.restricted_family = family
            if family is not None:
                log.warning("for lack of memory, job %s may add no processes and groups", family)
                if sum(attempt.drop_spare_calls() for attempt in fleet.iter_related(family)):
                    memory.return_freed_memory()
            spent_s = time.perf_counter() - began_at
            self._restriction_due_at = now + RESTRICTION_FACTOR * spent_s
        excess_bytes = resident_bytes - int(memory.EVIDENCE_SHARE * limits.MEMORY.maximum)
        if excess_bytes <= 0:
            return
        dropped = memory.drop_samples(fleet.processes.values(), excess_bytes)
        for job, count in dropped.items():
            self.shared.counters.dropped_samples += count
            log.warning("for lack of memory, dropped the oldest %d stacks of job %s", count, job)
        if dropped:
            memory.return_freed_memory()

    def drop_attempt(self, attempt: Attempt) -> None:
        fleet = self.shared.fleet
        fleet.forget_attempt(attempt)
        if limits.is_large(attempt.rank_count):
            self._large_dropped.append(attempt)
        else:
            fleet.drop_processes(attempt, len(attempt.processes))
        self.diagnoser.attempts.pop(attempt.key, None)
        self.shared.performance.attempts.pop(attempt.key, None)

    async def _drop_processes(self) -> None:
        """Frees the memory of dropped large attempts in small steps: each takes a second in all."""
        while self._large_dropped:
            slice_ends_at = time.perf_counter() + SLICE_S
            while self.shared.fleet.drop_processes(
                self._large_dropped[-1], PROCESSES_DROPPED_PER_STEP
            ):
                if time.perf_counter() > slice_ends_at:
                    load.collect_new_objects()
                    await asyncio.sleep(0)
                    slice_ends_at = time.perf_counter() + SLICE_S
            self._large_dropped.pop()
