"""Publishes and stores changed incidents, and sends their alerts when these are due."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from hangwatch.report.documents import build_incident_event

from ..alerting.alerter import take_due_event
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker

MAX_ALERT_DELAY_S = 1.5  # the longest wait of an alert for its culprits' stacks


@dataclass(slots=True, kw_only=True)
class IncidentAnnouncer:
    """``repeat_after_s`` is the time between reminders of a job that still hangs; 0 for none."""

    shared: SharedState
    persistence: PersistenceWorker
    repeat_after_s: float

    async def publish_changes(self, last_round_at: float) -> None:
        """Stores and publishes the incidents that changed in this round."""
        for record in self.shared.incidents.take_changed():
            with self.shared.counters.failures.isolate(
                f"the display of incident {record.incident.id}"
            ):
                if record.is_own:
                    is_new = record.opened_at >= last_round_at
                    self.persistence.mark_changed(record, urgent=is_new or not record.is_open)
                # The event is encoded once, not for each reader: 100,000 ranks may be waiting.
                event = msgspec.json.encode(build_incident_event(record.incident))
                self.shared.events.publish_event("incident", msgspec.Raw(event))
            await asyncio.sleep(0)

    def send_due_alerts(self, now: float) -> None:
        """Sends an alert for each incident that opened, became more severe or was resolved."""
        wall = self.shared.clock.wall()
        for record in self.shared.incidents.records.values():
            with self.shared.counters.failures.isolate(
                f"the alerts of incident {record.incident.id}"
            ):
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
