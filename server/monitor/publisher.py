"""Publishes what changed in a round of the diagnosis: incidents, and the states of ranks and jobs. Each
change goes to the readers of events and to the database; alerts go out when they are due.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import msgspec

from hangwatch.model.ranks import RankState
from hangwatch.report.documents import build_incident_event
from hangwatch.tracking.attempt import Attempt

from ..alerting.alerter import take_due_event
from ..core.job_views import AttemptView, JobView
from ..core.limits import is_large
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker
from . import views
from .cadence import STATES_FACTOR
from .diagnoser import Diagnoser

# Ranks by (previous state, new state). The previous one is None for a new rank.
StateChanges = dict[tuple[RankState | None, RankState], list[int]]

MAX_ALERT_DELAY_S = 1.5  # the longest wait of an alert for its culprits' stacks
SAMPLE_INTERVAL_S = 1.0  # the interval of the samples of a job's step number
STORE_INTERVAL_S = 10.0  # an attempt whose state does not change is stored at this interval


@dataclass(slots=True, kw_only=True)
class ChangePublisher:
    """``repeat_after_s`` is the time between reminders of a job that still hangs; 0 for none."""

    shared: SharedState
    persistence: PersistenceWorker
    diagnoser: Diagnoser
    repeat_after_s: float

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

    async def publish_states(self, attempt: Attempt) -> None:
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
        if is_large(attempt.rank_count):
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
                shared.events.publish_event("job", msgspec.to_builtins(job))
