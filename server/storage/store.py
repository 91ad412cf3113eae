"""The database of incidents, attempts and pending alerts: SQLite, or a PostgreSQL that several
servers share. The tables are as the newest migration leaves them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import Severity
from hangwatch.report.documents import build_document, parse_document

from ..alerting.alerter import Delivery
from ..core.job_views import AttemptView
from ..incidents.registry import MAX_RECORDS_KEPT, IncidentRecord
from .database import JobLocks, lock_data_dir, migrate, open_engine

log = logging.getLogger("hangwatch")

METADATA = sa.MetaData()

INCIDENTS = sa.Table(
    "incidents",
    METADATA,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("job", sa.String, nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("opened_at", sa.String, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the document that the API returns
    sa.Column("is_aborted", sa.Boolean, nullable=False),
    sa.Column("server_state", sa.Text, nullable=False),  # what only the server uses
    sa.Column("server", sa.String, nullable=False, server_default=""),  # the server that owns it
    sa.Column("revision", sa.Integer, nullable=False, server_default="0"),  # the number of updates
    sa.Column("size", sa.Integer, nullable=False, server_default="0"),  # characters of both texts
)

ATTEMPTS = sa.Table(
    "attempts",
    METADATA,
    sa.Column("server", sa.String, primary_key=True),
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("restart", sa.Integer, nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("hosts", sa.Text, nullable=False),  # a JSON list
    sa.Column("state", sa.String, nullable=False),
    sa.Column("opened_at", sa.String, nullable=False),
    sa.Column("last_seen_at", sa.String, nullable=False),
)

# Messages that a channel has not accepted yet. A row is written before the first attempt to send
# it and deleted after the last one.
DELIVERIES = sa.Table(
    "deliveries",
    METADATA,
    sa.Column("incident", sa.String(26), primary_key=True),
    sa.Column("event", sa.String, primary_key=True),
    sa.Column("channel", sa.String(16), primary_key=True),
    sa.Column("server", sa.String, nullable=False),
)

Row = dict[str, Any]


class _ServerState(TypedDict):
    """The fields of `IncidentRecord` that are kept beside the document."""

    members: dict[int, str]
    alerted_severity: Severity | None
    alerted_at: datetime | None
    reminders: int
    is_resolution_announced: bool


class Store:
    """The database. Methods may be called from any thread. They raise SQLAlchemyError when a read
    or write fails, for example because the disk is full.

    Only one server at a time may use a data folder; ``name`` distinguishes servers that share a
    database. Raises StoreError if the database cannot be opened.
    """

    def __init__(self, data_dir: Path, database: str | None = None, name: str = "") -> None:
        self.is_shared = database is not None
        self._server = name if self.is_shared else ""
        with contextlib.ExitStack() as opened:
            self._lock = opened.enter_context(lock_data_dir(data_dir))
            self._engine = open_engine(data_dir, database)
            opened.callback(self._engine.dispose)
            migrate(self._engine)
            opened.pop_all()  # all of it stays open until `close`
        self.job_locks = JobLocks(self._engine) if self.is_shared else None

    def load_incidents(self) -> list[IncidentRecord]:
        """The newest incidents of this server, oldest first, and open ones whatever their age."""
        newest = (
            sa.select(INCIDENTS)
            .filter_by(server=self._server)
            .order_by(INCIDENTS.c.status != "open", INCIDENTS.c.id.desc())
            .limit(MAX_RECORDS_KEPT)
        )
        records = [_parse_incident(row) for row in self._read_rows(newest)]
        return sorted(records, key=lambda record: record.incident.id)

    def load_other_servers(
        self, known_revisions: Mapping[str, int]
    ) -> list[tuple[IncidentRecord, int]]:
        """The newest incidents of other servers and their revisions, unless these are known."""
        newest = (
            sa.select(INCIDENTS.c.id, INCIDENTS.c.revision)
            .where(INCIDENTS.c.server != self._server)
            .order_by(INCIDENTS.c.id.desc())
            .limit(MAX_RECORDS_KEPT)
        )
        changed = []
        for row in self._read_rows(newest):
            if known_revisions.get(row.id) != row.revision:
                changed.append(row.id)
        if not changed:
            return []
        rows = self._read_rows(sa.select(INCIDENTS).where(INCIDENTS.c.id.in_(changed)))
        return [(_parse_incident(row, is_own=False), row.revision) for row in rows]

    def load_attempts(self, job: str | None = None) -> list[AttemptView]:
        """The newest attempts, of every server that shares the database."""
        newest = (
            sa.select(ATTEMPTS)
            .order_by(ATTEMPTS.c.opened_at.desc(), ATTEMPTS.c.job, ATTEMPTS.c.number.desc())
            .limit(MAX_RECORDS_KEPT)
        )
        query = newest if job is None else newest.filter_by(job=job)
        return [_parse_attempt(row) for row in self._read_rows(query)]

    def load_latest_attempts(self) -> list[AttemptView]:
        """The latest attempt of each of this server's jobs."""
        c = ATTEMPTS.c
        mine = sa.select(ATTEMPTS).filter_by(server=self._server)
        latest = mine.with_only_columns(c.job, sa.func.max(c.number)).group_by(c.job)
        is_latest = sa.tuple_(c.job, c.number).in_(latest)
        query = mine.where(is_latest).order_by(c.last_seen_at)
        return [_parse_attempt(row) for row in self._read_rows(query)]

    def load_aborted_ids(self, job: str) -> set[str]:
        """The incidents of a job for which ranks were ended since its last successful attempt."""
        last_success = (
            sa.select(sa.func.coalesce(sa.func.max(ATTEMPTS.c.number), -1))
            .select_from(ATTEMPTS)
            .filter_by(server=self._server, job=job, state="finished")
        )
        since = (
            sa.select(INCIDENTS.c.id)
            .filter_by(server=self._server, job=job, is_aborted=True)
            .where(INCIDENTS.c.attempt > last_success.scalar_subquery())
        )
        return {row.id for row in self._read_rows(since)}

    def adopt_job(self, job: str) -> tuple[list[IncidentRecord], list[Delivery], list[AttemptView]]:
        """Makes this server the owner of a job, and of the jobs that were started in it. Returns
        their open incidents, the alerts of these that were not delivered, and each job's latest
        attempt.
        """
        with self._engine.begin() as db:
            incidents = db.execute(
                sa.update(INCIDENTS)
                .where(_is_of_family(INCIDENTS, job), INCIDENTS.c.server != self._server)
                .where(INCIDENTS.c.status == "open")
                .values(server=self._server, revision=INCIDENTS.c.revision + 1)
                .returning(INCIDENTS)
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
                .order_by(ATTEMPTS.c.last_seen_at)
            ).all()
        latest = {row.job: row for row in attempts}
        return (
            [_parse_incident(row) for row in incidents],
            [_parse_delivery(row) for row in deliveries],
            [_parse_attempt(row) for row in latest.values()],
        )

    def load_deliveries(self) -> list[Delivery]:
        """The alerts that the previous server did not deliver."""
        mine = sa.select(DELIVERIES).filter_by(server=self._server).order_by(DELIVERIES.c.incident)
        return [_parse_delivery(row) for row in self._read_rows(mine)]

    def save_changes(
        self,
        incidents: Sequence[Row] = (),
        attempts: Sequence[Row] = (),
        deliveries: Sequence[Delivery] = (),
    ) -> None:
        """Writes all or nothing of `make_incident_row`, `make_attempt_row` and alerts to be sent."""
        with self._engine.begin() as db:
            self._upsert_rows(db, INCIDENTS, incidents)
            self._upsert_rows(db, ATTEMPTS, attempts)
            self._upsert_rows(db, DELIVERIES, [asdict(due) for due in deliveries])

    def delete_delivery(self, done: Delivery) -> None:
        """Deletes an alert that its channel accepted, or will never accept. Logs a failure."""
        try:
            with self._engine.begin() as db:
                db.execute(sa.delete(DELIVERIES).filter_by(**asdict(done)))
        except sa.exc.SQLAlchemyError as error:
            log.error(
                "cannot record that an alert was sent, so it may be sent again: %s",
                getattr(error, "orig", error),
            )

    def prune_incidents(
        self, before: datetime, max_bytes: float, keep: Collection[str] = ()
    ) -> list[str]:
        """Deletes incidents that were opened before a time, and the oldest ones beyond
        ``max_bytes`` in all, except those in ``keep``. Returns the deleted ids.
        """
        newest = (
            sa.select(INCIDENTS.c.id, INCIDENTS.c.opened_at, INCIDENTS.c.size)
            .filter_by(server=self._server)
            .order_by(INCIDENTS.c.id.desc())
        )
        oldest = format_timestamp(before)
        deleted = []
        total = 0
        with self._engine.begin() as db:
            for row in db.execute(newest):
                is_surplus = row.opened_at < oldest or total + row.size > max_bytes
                if is_surplus and row.id not in keep:
                    deleted.append(row.id)
                else:
                    total += row.size
            for start in range(0, len(deleted), 500):
                part = deleted[start : start + 500]
                db.execute(sa.delete(DELIVERIES).where(DELIVERIES.c.incident.in_(part)))
                db.execute(sa.delete(INCIDENTS).where(INCIDENTS.c.id.in_(part)))
            mine = sa.delete(ATTEMPTS).filter_by(server=self._server)
            db.execute(mine.where(ATTEMPTS.c.last_seen_at < oldest))
            if deleted and not self.is_shared:
                # Returns the space to the file system. The pragma yields one row for each page,
                # but SQLAlchemy assumes that it yields none.
                db.connection.cursor().execute("PRAGMA incremental_vacuum").fetchall()
        return deleted

    def close(self) -> None:
        self._engine.dispose()
        self._lock.close()

    def _read_rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._engine.connect() as db:
            return db.execute(query).all()

    def _upsert_rows(self, db: sa.Connection, table: sa.Table, rows: Sequence[Row]) -> None:
        """Inserts rows of this server, or updates them; their owner and their start stay."""
        if not rows:
            return
        insert = (postgresql.insert if self.is_shared else sqlite.insert)(table)
        kept = {*table.primary_key.columns.keys(), "server", "opened_at"}
        changed: Row = {name: insert.excluded[name] for name in rows[0] if name not in kept}
        if "revision" in table.c:
            changed["revision"] = table.c.revision + 1
        statement = insert.on_conflict_do_nothing()
        if changed:
            statement = insert.on_conflict_do_update(index_elements=table.primary_key, set_=changed)
        db.execute(statement, [{**row, "server": self._server} for row in rows])


def _is_of_family(table: sa.Table, job: str) -> sa.ColumnElement[bool]:
    return sa.or_(table.c.job == job, table.c.job.startswith(f"{job}/", autoescape=True))


def _parse_delivery(row: sa.Row[Any]) -> Delivery:
    return Delivery(incident=row.incident, event=row.event, channel=row.channel)


def format_timestamp(moment: datetime) -> str:
    """A UTC time that sorts as text."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def make_incident_row(record: IncidentRecord) -> Row:
    """The row of a record as it is now, for a later `Store.save_changes` in another thread."""
    incident = record.incident
    body = _encode_json(build_document(incident))
    kept = {name: getattr(record, name) for name in _ServerState.__annotations__}
    server_state = _encode_json(kept)
    return {
        "id": incident.id,
        "job": incident.job,
        "attempt": incident.attempt,
        "kind": incident.kind.value,
        "status": incident.status,
        "opened_at": format_timestamp(incident.opened_at),
        "is_aborted": record.is_aborted,
        "body": body,
        "server_state": server_state,
        "size": len(body) + len(server_state),
    }


def _parse_incident(row: sa.Row[Any], *, is_own: bool = True) -> IncidentRecord:
    incident = parse_document(Incident, msgspec.json.decode(row.body))
    kept = msgspec.json.decode(row.server_state, type=_ServerState)
    return IncidentRecord(incident=incident, is_own=is_own, **kept)


def make_attempt_row(attempt: AttemptView) -> Row:
    row = asdict(attempt)
    row["number"] = row.pop("attempt")
    row["hosts"] = _encode_json(attempt.hosts)
    row["opened_at"] = format_timestamp(attempt.opened_at)
    row["last_seen_at"] = format_timestamp(attempt.last_seen_at)
    return row


def _parse_attempt(row: sa.Row[Any]) -> AttemptView:
    fields = row._asdict()
    fields["attempt"] = fields.pop("number")
    fields["server"] = row.server or None
    fields["hosts"] = msgspec.json.decode(row.hosts)
    fields["opened_at"] = datetime.fromisoformat(row.opened_at)
    fields["last_seen_at"] = datetime.fromisoformat(row.last_seen_at)
    return AttemptView(**fields)
