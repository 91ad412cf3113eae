"""Writes changes to the database without delaying the diagnosis, and sends alerts after the write
succeeded or failed.

An alert is written before it is sent and deleted after a channel accepted it. If the server is
killed in between, the next one sends it again with the same id, so that receivers can drop it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from hangwatch.model.incidents import Incident
from hangwatch.model.ranks import AttemptKey

from ..alerting.alerter import Alerter, Delivery
from ..core.events import wait_for_event
from ..core.job_views import AttemptView
from ..incidents.registry import IncidentRecord
from ..shared_state import SharedState
from .store import Row, Store, make_attempt_row, make_incident_row

log = logging.getLogger("hangwatch")

SAVE_INTERVAL_S = 1.0  # the interval of writes that are not urgent
OTHER_SERVERS_INTERVAL_S = 2.0  # the interval of reads of other servers' incidents
PRUNE_INTERVAL_S = 600.0
ALERT_DELAY_LIMIT_S = 2.0  # the longest wait of an alert for a slow database


@dataclass(slots=True, kw_only=True)
class PersistenceWorker:
    """Writes incidents, attempts and alerts, and deletes incidents beyond the retention."""

    shared: SharedState
    store: Store
    alerter: Alerter
    retention_days: float
    retention_mb: float
    is_saved: bool = True  # the last write succeeded
    failures: int = 0
    _changed_records: dict[str, IncidentRecord] = field(default_factory=dict)
    _writing: set[str] = field(default_factory=set)
    _attempts: dict[AttemptKey, Row] = field(default_factory=dict)
    _queued_alerts: list[tuple[Incident, str]] = field(default_factory=list)
    _revisions: dict[str, int] = field(default_factory=dict)  # other servers' incidents
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)
    _synchronised_at: float = float("-inf")
    _pruned_at: float = float("-inf")

    def resume_deliveries(self, deliveries: Iterable[Delivery]) -> None:
        """Sends the alerts that the previous server could not deliver."""
        for delivery in deliveries:
            record = self.shared.incidents.records.get(delivery.incident)
            if record is None or not self.alerter.resume_delivery(
                record.incident, delivery, self.shared.clock.wall()
            ):
                self.store.delete_delivery(delivery)

    def mark_changed(self, record: IncidentRecord, *, urgent: bool = False) -> None:
        self._changed_records[record.incident.id] = record
        if urgent:
            self._urgent.set()

    def queue_alert(self, record: IncidentRecord, event: str) -> None:
        """Sends the alert once it has been written."""
        self._queued_alerts.append((record.incident, event))
        self.mark_changed(record, urgent=True)

    def is_stored(self, record: IncidentRecord) -> bool:
        """Whether the incident's current state is in the database, and its alerts are being sent."""
        incident_id = record.incident.id
        return incident_id not in self._changed_records and incident_id not in self._writing

    def record_attempt(self, seen: AttemptView) -> None:
        self._attempts[AttemptKey(seen.job, seen.attempt)] = make_attempt_row(seen)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await wait_for_event(SAVE_INTERVAL_S, self._urgent)
            self._urgent.clear()
            await self.save_changes()
            try:
                await self._synchronise()
            except sa.exc.SQLAlchemyError as error:
                self._report_failure(error)

    async def save_changes(self) -> None:
        """Writes the changes, then sends the queued alerts. A write that fails is retried later; rows
        that the database refuses are logged and dropped.
        """
        records, self._changed_records = self._changed_records, {}
        attempts, self._attempts = self._attempts, {}
        alerts, self._queued_alerts = self._queued_alerts, []
        if not records and not attempts:
            return
        self._writing = set(records)
        incidents = []
        for record in records.values():
            if record.is_own:  # no other server has taken it over meanwhile
                with self.shared.failures.isolate(f"storing incident {record.incident.id}"):
                    incidents.append(make_incident_row(record))
        deliveries: list[Delivery] = []
        for incident, event in alerts:
            deliveries += self.alerter.list_deliveries(incident, event)
        writing = asyncio.ensure_future(
            asyncio.to_thread(self._write_rows, incidents, list(attempts.values()), deliveries)
        )
        await asyncio.wait({writing}, timeout=ALERT_DELAY_LIMIT_S if alerts else None)
        for incident, event in alerts:
            with self.shared.failures.isolate(f"the alert of incident {incident.id}"):
                self.alerter.announce(incident, event, self.shared.clock.wall())
        try:
            await writing
            self.is_saved = True
        except Exception as error:
            self._changed_records = {**records, **self._changed_records}
            self._attempts = {**attempts, **self._attempts}
            self._report_failure(error)
        finally:
            self._writing = set()

    def _write_rows(
        self, incidents: list[Row], attempts: list[Row], deliveries: list[Delivery]
    ) -> None:
        """Writes everything together or, where the database refuses some row, each row by itself.

        Raises SQLAlchemyError if the database does not work.
        """
        try:
            self.store.save_changes(incidents, attempts, deliveries)
            return
        except Exception as error:
            if not _is_refusal(error):
                raise
            log.error("rows are written one by one, as the database refuses some: %s", error)
        parts: dict[str, dict[str, Any]] = {}
        for row in attempts:
            parts[f"attempt {row['number']} of job {row['job']}"] = {"attempts": [row]}
        for row in incidents:
            own = [due for due in deliveries if due.incident == row["id"]]
            parts[f"incident {row['id']}"] = {"incidents": [row], "deliveries": own}
        for what, rows in parts.items():
            try:
                self.store.save_changes(**rows)
            except Exception as error:
                if not _is_refusal(error):
                    raise
                self.shared.failures.count += 1
                log.exception("%s cannot be stored and is dropped; please report this", what)

    def _report_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.is_saved:
            log.error(
                "incidents cannot be written, check the data folder's disk or the database: %s",
                getattr(error, "orig", error),
            )
        self.is_saved = False

    async def _synchronise(self) -> None:
        shared = self.shared
        store = self.store
        incidents = shared.incidents
        now = shared.now()
        if store.is_shared and now - self._synchronised_at >= OTHER_SERVERS_INTERVAL_S:
            self._synchronised_at = now
            changed = await asyncio.to_thread(store.load_other_servers, dict(self._revisions))
            for record, revision in changed:
                self._revisions[record.incident.id] = revision
            incidents.changed.update(record.incident.id for record, _ in changed)
            incidents.load_records(record for record, _ in changed)
        if now - self._pruned_at >= PRUNE_INTERVAL_S:
            self._pruned_at = now
            before = shared.clock.wall() - timedelta(days=self.retention_days)
            # The open incidents of running jobs are kept, whatever their age.
            kept_ids = set()
            for record in incidents.records.values():
                attempt = shared.fleet.attempts.get(record.attempt_key)
                if record.is_live and attempt is not None and not attempt.is_finished:
                    kept_ids.add(record.incident.id)
            deleted_ids = await asyncio.to_thread(
                store.prune_incidents, before, self.retention_mb * 1e6, kept_ids
            )
            incidents.drop_incidents(set(deleted_ids))


def _is_refusal(error: Exception) -> bool:
    """Whether the database refuses a value that is written, instead of failing altogether. Drivers
    raise errors of their own, or Python's, for a value that does not fit its column.
    """
    if isinstance(error, (sa.exc.DataError, sa.exc.IntegrityError)):
        return True
    if isinstance(error, sa.exc.DBAPIError):
        return False
    return isinstance(error, (sa.exc.StatementError, ArithmeticError, ValueError, TypeError))
