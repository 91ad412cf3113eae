"""Publishes what changed in a round of the diagnosis: incidents, and the states of ranks and jobs. Each
change goes to the readers of events and to the database; alerts go out when they are due.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from hangwatch.model.ranks import AttemptKey, RankState
from hangwatch.report.documents import build_incident_event
from hangwatch.tracking.attempt import Attempt

from ..alerting.alerter import take_due_event
from ..core.job_views import AttemptView, JobView
from ..core.limits import is_large
from ..incidents.records import IncidentRecord
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker
from . import views
from .cadence import DiagnosisBackoff, ReportScheduler
from .diagnoser import AttemptReader

# Ranks by (previous state, new state). The previous one is None for a new rank.
StateChanges = dict[tuple[RankState | None, RankState], list[int]]

MAX_ALERT_DELAY_S = 1.5  # the longest wait of an alert for its culprits' stacks
SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 60
MIN_SPAN_S = 2.0  # a pace needs this time between the first and the last sample


@dataclass(slots=True, kw_only=True)
class ChangePublisher:
    """Pages and the API show the `rank_states` and `large_jobs` of the last round for large attempts,
    instead of computing their own. ``repeat_after_s`` is the time between reminders of a job that
    still hangs; 0 for none.
    """

    shared: SharedState
    persistence: PersistenceWorker
    report_scheduler: ReportScheduler
    backoff: DiagnosisBackoff
    reader: AttemptReader
    repeat_after_s: float
    rank_states: dict[AttemptKey, dict[int, RankState]] = field(default_factory=dict)
    large_jobs: dict[AttemptKey, JobView] = field(default_factory=dict)
    paces: dict[AttemptKey, Pace] = field(default_factory=dict)
    # The attempt's number and the state that were last published of each job.
    _published_jobs: dict[str, tuple[int, str]] = field(default_factory=dict)

    async def publish_incidents(self, last_round_at: float) -> None:
        """Stores and publishes the incidents that changed in this round."""
        isolate = self.shared.failures.isolate
        for record in self.shared.incidents.take_changed():
            with isolate(f"the display of incident {record.incident.id}"):
                if record.is_own:
                    is_new = record.opened_at >= last_round_at
                    self.persistence.mark_changed(record, urgent=is_new or not record.is_open)
                # The event is encoded once, not for each reader: 100,000 ranks may be waiting.
                event = msgspec.json.encode(build_incident_event(record.incident))
                self.shared.events.publish_event("incident", msgspec.Raw(event))
            await asyncio.sleep(0)

    def send_due_alerts(self, now: float) -> None:
        """Sends an alert for each incident that opened, became more severe or was resolved."""
        wall, isolate = self.shared.clock.wall(), self.shared.failures.isolate
        for record in self.shared.incidents.records.values():
            with isolate(f"the alerts of incident {record.incident.id}"):
                attempt = self.shared.fleet.attempts.get(record.attempt_key)
                event = take_due_event(
                    record,
                    ready=now - record.opened_at >= MAX_ALERT_DELAY_S
                    or attempt is None
                    or not self.shared.awaits_stacks(record, attempt),
                    hangs_on=attempt is not None and not attempt.is_finished,
                    now=wall,
                    repeat_after=self.repeat_after_s,
                )
                if event:
                    self.persistence.queue_alert(record, event)

    async def publish_states(self, attempt: Attempt) -> None:
        """Publishes the ranks, and the job, whose state changed since the last round."""
        records = self.shared.incidents.list_open(attempt)
        now = self.shared.clock.monotonic()
        if self.backoff.skips_states(attempt, now):
            return

        (states, job, changes), spent_s = await self.reader.run(
            attempt, lambda: self._compute_states(attempt, records, now)
        )
        self.backoff.record_states_report(attempt, spent_s, self.shared.clock.monotonic())
        # All ranks with the same change share one event: thousands may change in one round.
        for (before, state), ranks in changes.items():
            event = {
                "job": attempt.job,
                "attempt": attempt.number,
                "ranks": ranks,
                "state": state.value,
                "before": None if before is None else before.value,
            }
            self.shared.events.publish_event("rank", event)
        self.rank_states[attempt.key] = states
        if is_large(attempt.rank_count):
            self.large_jobs[attempt.key] = job
        is_latest = self.shared.fleet.latest_attempt(attempt.job) is attempt
        if is_latest or not attempt.is_finished:
            self.persistence.record_attempt(
                AttemptView(
                    job=job.job,
                    attempt=job.attempt,
                    state=job.state,
                    world_size=job.world_size,
                    hosts=job.hosts,
                    opened_at=self.shared.clock.date(attempt.opened_at),
                    last_seen_at=self.shared.clock.date(attempt.last_seen_at),
                    restart=attempt.restart,
                )
            )
        if is_latest:
            self.paces.setdefault(attempt.key, Pace()).record_step(job.step, now)
            published = (attempt.number, job.state)
            if self._published_jobs.get(attempt.job) != published:
                self._published_jobs[attempt.job] = published
                self.shared.events.publish_event("job", msgspec.to_builtins(job))

    def forget_attempt(self, attempt: Attempt) -> None:
        """Drops what is kept for an attempt that the fleet has dropped."""
        self.rank_states.pop(attempt.key, None)
        self.large_jobs.pop(attempt.key, None)
        self.paces.pop(attempt.key, None)
        if self.shared.fleet.latest_attempt(attempt.job) is None:
            self._published_jobs.pop(attempt.job, None)

    def _compute_states(
        self, attempt: Attempt, records: Iterable[IncidentRecord], now: float
    ) -> tuple[dict[int, RankState], JobView, StateChanges]:
        """The state of each rank, the job, and the ranks whose state changed."""
        before = self.rank_states.get(attempt.key, {})
        states = views.compute_states(attempt, records, now, self.report_scheduler.lost_after_s)
        changes: StateChanges = {}
        if states != before:
            for rank, state in states.items():
                if (previous := before.get(rank)) is not state:
                    changes.setdefault((previous, state), []).append(rank)
        job = views.describe_job(attempt, Counter(states.values()), records, now)
        return states, job, changes


@dataclass(slots=True)
class Pace:
    """The training speed of one attempt, from samples of its step number. Times are the monotonic
    clock's.
    """

    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def record_step(self, step: int | None, now: float) -> None:
        if step is not None and (
            not self._samples or now - self._samples[-1][0] >= SAMPLE_INTERVAL_S
        ):
            self._samples.append((now, step))

    @property
    def steps_per_s(self) -> float | None:
        """The pace over the last minute at most; None while too little is known."""
        if not self._samples or (span := self._samples[-1][0] - self._samples[0][0]) < MIN_SPAN_S:
            return None
        return max(0.0, (self._samples[-1][1] - self._samples[0][1]) / span)
