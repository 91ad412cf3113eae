"""The database of incidents, attempts and pending alerts: SQLite, or a PostgreSQL that several
servers share.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..core.job_views import AttemptView
from ..incidents.records import IncidentRecord
from ..incidents.registry import MAX_RECORDS_KEPT
from .database import (
    DATABASE_FILE,
    StoreError,
    lock_data_dir,
    migrate,
    open_postgres,
    open_sqlite,
)
from .job_locks import JobLocks
from .rows import (
    Changes,
    Delivery,
    Row,
    format_timestamp,
    parse_attempt_row,
    parse_incident_row,
)
from .tables import ATTEMPTS, DELIVERIES, INCIDENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """What the database has of a job that another server had: its open incidents, their alerts that
    were not delivered, and the latest attempt of each job of the family.
    """

    incidents: list[IncidentRecord]
    deliveries: list[Delivery]
    attempts: list[AttemptView]


class Store:
    """The database. Methods may be called from any thread. They raise SQLAlchemyError when a read
    or write fails, for example because the disk is full.

    Only one server at a time may use a data folder; ``name`` distinguishes servers that share a
    database. Raises StoreError if the database cannot be opened.
    """

    def __init__(self, data_dir: Path, database: str | None = None, name: str = "") -> None:
        self._lock = lock_data_dir(data_dir)
        self.shared = database is not None
        self._server = name if database is not None else ""
        try:
            self._engine = (
                open_postgres(database) if database is not None else open_sqlite(data_dir)
            )
        except StoreError:
            self._lock.close()
            raise
        self.job_locks = JobLocks(self._engine) if self.shared else None
        self._place = (
            self._engine.url.render_as_string(hide_password=True)
            if database is not None
            else str(data_dir / DATABASE_FILE)
        )
        try:
            migrate(self._engine, self._place, self.shared)
        except BaseException:
            self.close()
            raise

    def load_incidents(self) -> list[IncidentRecord]:
        """This server's newest incidents, oldest first, open ones whatever their age."""
        mine = sa.select(INCIDENTS.c.body, INCIDENTS.c.memory).where(
            INCIDENTS.c.server == self._server
        )
        newest = mine.order_by(INCIDENTS.c.status != "open", INCIDENTS.c.id.desc()).limit(
            MAX_RECORDS_KEPT
        )
        with self._engine.connect() as db:
            rows = db.execute(newest).all()
        return sorted(
            (parse_incident_row(row.body, row.memory) for row in rows),
            key=lambda record: record.incident.id,
        )

    def load_other_servers(
        self, known_revisions: Mapping[str, int]
    ) -> list[tuple[IncidentRecord, int]]:
        """The newest incidents of other servers, with their revisions, unless ``known_revisions``
        has the current one.
        """
        theirs = sa.select(INCIDENTS.c.id, INCIDENTS.c.revision).where(
            INCIDENTS.c.server != self._server
        )
        with self._engine.connect() as db:
            newest = db.execute(
                theirs.order_by(INCIDENTS.c.id.desc()).limit(MAX_RECORDS_KEPT)
            ).all()
            changed = [row.id for row in newest if known_revisions.get(row.id) != row.revision]
            rows = (
                db.execute(sa.select(INCIDENTS).where(INCIDENTS.c.id.in_(changed))).all()
                if changed
                else []
            )
        return [
            (parse_incident_row(row.body, row.memory, is_own=False), row.revision) for row in rows
        ]

    def load_attempts(
        self, job: str | None = None, max_count: int = MAX_RECORDS_KEPT
    ) -> list[AttemptView]:
        """The newest attempts, of every server that shares the database."""
        newest = (
            sa.select(ATTEMPTS)
            .order_by(ATTEMPTS.c.opened_at.desc(), ATTEMPTS.c.job, ATTEMPTS.c.number.desc())
            .limit(max_count)
        )
        with self._engine.connect() as db:
            query = newest if job is None else newest.where(ATTEMPTS.c.job == job)
            rows = db.execute(query).all()
        return [parse_attempt_row(row) for row in rows]

    def load_latest_attempts(self) -> list[AttemptView]:
        """The latest attempt of each of this server's jobs."""
        last = sa.select(ATTEMPTS.c.job, sa.func.max(ATTEMPTS.c.number).label("number"))
        last_of = last.where(ATTEMPTS.c.server == self._server).group_by(ATTEMPTS.c.job).subquery()
        same = sa.and_(
            ATTEMPTS.c.job == last_of.c.job,
            ATTEMPTS.c.number == last_of.c.number,
            ATTEMPTS.c.server == self._server,
        )
        with self._engine.connect() as db:
            rows = db.execute(
                sa.select(ATTEMPTS).join(last_of, same).order_by(ATTEMPTS.c.heard_at)
            ).all()
        return [parse_attempt_row(row) for row in rows]

    def load_aborted_ids(self, job: str) -> set[str]:
        """The incidents of a job for which ranks were ended since its last successful attempt."""
        mine, wells = INCIDENTS.c, ATTEMPTS.c
        well = sa.and_(wells.server == self._server, wells.job == job, wells.state == "finished")
        with self._engine.connect() as db:
            last = db.execute(sa.select(sa.func.max(wells.number)).where(well)).scalar()
            since = sa.and_(
                mine.server == self._server,
                mine.job == job,
                mine.attempt > (-1 if last is None else last),
            )
            rows = db.execute(sa.select(mine.id, mine.memory).where(since)).all()
        return {row.id for row in rows if json.loads(row.memory).get("aborted")}

    def adopt_job(self, job: str) -> JobHistory:
        """Makes this server the owner of what other servers knew of a job, and of the jobs that
        were started in it.
        """
        with self._engine.begin() as db:
            incidents = db.execute(
                sa.update(INCIDENTS)
                .where(_is_of_family(INCIDENTS, job), INCIDENTS.c.server != self._server)
                .where(INCIDENTS.c.status == "open")
                .values(server=self._server, revision=INCIDENTS.c.revision + 1)
                .returning(INCIDENTS.c.id, INCIDENTS.c.body, INCIDENTS.c.memory)
            ).all()
            ids = [row.id for row in incidents]
            deliveries = db.execute(
                sa.update(DELIVERIES)
                .where(DELIVERIES.c.incident.in_(ids))
                .values(server=self._server)
                .returning(DELIVERIES)
            ).all()
            attempts = db.execute(
                sa.select(ATTEMPTS)
                .where(_is_of_family(ATTEMPTS, job), ATTEMPTS.c.server != self._server)
                .order_by(ATTEMPTS.c.heard_at)
            ).all()
        latest = {row.job: row for row in attempts}
        return JobHistory(
            incidents=[parse_incident_row(row.body, row.memory) for row in incidents],
            deliveries=[_parse_delivery(row) for row in deliveries],
            attempts=[parse_attempt_row(row) for row in latest.values()],
        )

    def load_deliveries(self) -> list[Delivery]:
        """The alerts that the previous server did not deliver."""
        mine = (
            sa.select(DELIVERIES)
            .where(DELIVERIES.c.server == self._server)
            .order_by(DELIVERIES.c.incident)
        )
        with self._engine.connect() as db:
            return [_parse_delivery(row) for row in db.execute(mine)]

    def save_changes(self, changes: Changes) -> None:
        with self._engine.begin() as db:
            for incident in changes.incidents:
                size = len(incident["body"]) + len(incident["memory"])
                self._upsert_row(
                    db,
                    INCIDENTS,
                    {**incident, "size": size},
                    {"revision": INCIDENTS.c.revision + 1},
                )
            for attempt in changes.attempts:
                self._upsert_row(db, ATTEMPTS, attempt, {"opened_at": ATTEMPTS.c.opened_at})
            for due in changes.deliveries:
                self._upsert_row(
                    db,
                    DELIVERIES,
                    {"incident": due.incident, "event": due.event, "channel": due.channel},
                    {},
                )

    def delete_delivery(self, done: Delivery) -> None:
        """Deletes an alert that its channel accepted, or will never accept."""
        c = DELIVERIES.c
        with self._engine.begin() as db:
            db.execute(
                sa.delete(DELIVERIES).where(
                    c.incident == done.incident, c.event == done.event, c.channel == done.channel
                )
            )

    def prune_incidents(
        self, before: datetime, max_bytes: float, keep: Collection[str] = ()
    ) -> list[str]:
        """Deletes incidents that were opened before a time, and the oldest ones beyond
        ``max_bytes`` in all, except those in ``keep``. Returns the deleted ids.
        """
        mine = INCIDENTS.c.server == self._server
        with self._engine.begin() as db:
            sizes = sa.select(INCIDENTS.c.id, INCIDENTS.c.opened_at, INCIDENTS.c.size)
            rows = db.execute(sizes.where(mine).order_by(INCIDENTS.c.id.desc()))
            deleted, total = [], 0.0
            for row in rows:
                total += row.size
                if row.id not in keep and (
                    datetime.fromisoformat(row.opened_at) < before or total > max_bytes
                ):
                    deleted.append(row.id)
                    total -= row.size
            for start in range(0, len(deleted), 500):
                part = deleted[start : start + 500]
                db.execute(sa.delete(DELIVERIES).where(DELIVERIES.c.incident.in_(part)))
                db.execute(sa.delete(INCIDENTS).where(INCIDENTS.c.id.in_(part)))
            old = sa.and_(
                ATTEMPTS.c.server == self._server, ATTEMPTS.c.heard_at < format_timestamp(before)
            )
            db.execute(sa.delete(ATTEMPTS).where(old))
            if deleted and not self.shared:
                # Returns the space to the file system. The pragma yields one row for each page,
                # but SQLAlchemy assumes that it yields none.
                db.connection.cursor().execute("PRAGMA incremental_vacuum").fetchall()
        return deleted

    def close(self) -> None:
        self._engine.dispose()
        self._lock.close()

    def _upsert_row(self, db: sa.Connection, table: sa.Table, values: Row, also: Row) -> None:
        insert = postgresql.insert if self.shared else sqlite.insert
        keys = [column.name for column in table.primary_key]
        new = insert(table).values({**values, "server": self._server})
        rest = {name: value for name, value in values.items() if name not in keys}
        changed = {**rest, **also}
        db.execute(
            new.on_conflict_do_update(index_elements=keys, set_=changed)
            if changed
            else new.on_conflict_do_nothing()
        )


def _is_of_family(table: sa.Table, job: str) -> sa.ColumnElement[bool]:
    return sa.or_(table.c.job == job, table.c.job.startswith(f"{job}/", autoescape=True))


def _parse_delivery(row: sa.Row[Any]) -> Delivery:
    return Delivery(incident=row.incident, event=row.event, channel=row.channel)
