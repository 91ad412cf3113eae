"""Writes what changed, without ever holding up the diagnosis: an alert goes out after it was
written, or in spite of that failing.

A message is written before it is sent and struck out after it was taken. A server that is killed in
between sends it again with the same id: late and twice within milliseconds is better than never.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta

import sqlalchemy as sa

from hangwatch.model.incidents import Incident
from hangwatch.model.ranks import AttemptKey

from ..core.clock import Clock
from ..core.job_views import AttemptView
from ..core.waiting import within
from ..incidents.records import IncidentRecord
from ..incidents.registry import IncidentRegistry
from ..storage.store import Changes, Row, Store, attempt_row, row
from .alerts import Alerter

log = logging.getLogger("hangwatch")

SAVE_EVERY = 1.0  # seconds between two writes of what may wait
ATTEMPT_EVERY = 10.0  # seconds between two writes of an attempt that only went on
OTHERS_EVERY = 2.0  # seconds between two looks at what other servers found
PRUNE_EVERY = 600.0
ALERT_WAITS = 2.0  # seconds an alert waits for a slow database


@dataclass(slots=True, kw_only=True)
class PersistenceWorker:
    """``keep`` names the incidents that are never deleted, whatever their age."""

    store: Store
    clock: Clock
    alerter: Alerter
    book: IncidentRegistry
    retention_days: float
    retention_mb: float
    keep: Callable[[], Collection[str]]
    saved: bool = True  # the last write went well
    failures: int = 0
    _cases: dict[str, IncidentRecord] = field(default_factory=dict)
    _writing: set[str] = field(default_factory=set)
    _attempts: dict[AttemptKey, Row] = field(default_factory=dict)
    _known: dict[AttemptKey, tuple[str, float]] = field(
        default_factory=dict
    )  # attempts: the state last written, and when
    _told: list[tuple[Incident, str]] = field(default_factory=list)
    _revisions: dict[str, int] = field(default_factory=dict)  # of other servers' incidents
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)
    _looked_at: float = float("-inf")
    _pruned_at: float = float("-inf")

    def resume(self) -> None:
        """Sends what the server that was here before could not."""
        for delivery in self.store.undelivered():
            case = self.book.cases.get(delivery.incident)
            if case is None or not self.alerter.resume(case.incident, delivery, self.clock.wall()):
                self.store.delivered(delivery)

    def changed(self, case: IncidentRecord, *, urgent: bool = False) -> None:
        self._cases[case.incident.id] = case
        if urgent:
            self._urgent.set()

    def tell(self, case: IncidentRecord, event: str) -> None:
        """People are told of it as soon as that is written."""
        self._told.append((case.incident, event))
        self.changed(case, urgent=True)

    def stored(self, case: IncidentRecord) -> bool:
        """It is in the database as it stands, and what people were to be told of it is on its way."""
        return case.incident.id not in self._cases and case.incident.id not in self._writing

    def attempt(self, seen: AttemptView) -> None:
        key = AttemptKey(seen.job, seen.attempt)
        now = self.clock.monotonic()
        state, at = self._known.get(key, ("", now))
        over = seen.state in ("finished", "failed")
        if state != seen.state or (not over and now - at >= ATTEMPT_EVERY):
            self._known[key] = (seen.state, now)
            self._attempts[key] = attempt_row(seen)

    def forget_attempt(self, key: AttemptKey) -> None:
        self._known.pop(key, None)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await within(SAVE_EVERY, self._urgent)
            self._urgent.clear()
            await self.save()
            try:
                await self._look_around()
            except sa.exc.SQLAlchemyError as error:
                self._failed(error)

    async def save(self) -> None:
        """Writes what changed, then sends what people are to be told; what cannot be written is
        tried again later.
        """
        cases, self._cases = self._cases, {}
        attempts, self._attempts = self._attempts, {}
        told, self._told = self._told, []
        if not cases and not attempts:
            return
        self._writing = set(cases)
        changes = Changes(
            incidents=[row(case) for case in cases.values()],
            attempts=list(attempts.values()),
            deliveries=[
                due for incident, event in told for due in self.alerter.deliveries(incident, event)
            ],
        )
        writing = asyncio.ensure_future(asyncio.to_thread(self.store.save, changes))
        await asyncio.wait({writing}, timeout=ALERT_WAITS if told else None)
        for incident, event in told:
            self.alerter.announce(incident, event, self.clock.wall())
        try:
            await writing
            self.saved = True
        except sa.exc.SQLAlchemyError as error:
            self._cases = {**cases, **self._cases}
            self._attempts = {**attempts, **self._attempts}
            self._failed(error)
        finally:
            self._writing = set()

    def _failed(self, error: sa.exc.SQLAlchemyError) -> None:
        self.failures += 1
        if self.saved:
            log.error(
                "incidents cannot be written, see to the data folder's disk or the database: %s",
                getattr(error, "orig", error),
            )
        self.saved = False

    async def _look_around(self) -> None:
        now = self.clock.monotonic()
        if self.store.shared and now - self._looked_at >= OTHERS_EVERY:
            self._looked_at = now
            found = await asyncio.to_thread(self.store.others, dict(self._revisions))
            self._revisions.update({case.incident.id: revision for case, revision in found})
            self.book.load_records(case for case, _ in found)
            self.book.changed.update(case.incident.id for case, _ in found)
        if now - self._pruned_at >= PRUNE_EVERY:
            self._pruned_at = now
            before = self.clock.wall() - timedelta(days=self.retention_days)
            self.book.drop_incidents(
                set(
                    await asyncio.to_thread(
                        self.store.prune, before, self.retention_mb * 1e6, self.keep()
                    )
                )
            )
