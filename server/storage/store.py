"""What outlives the server: incidents, attempts, alerts on their way. In SQLite, or in PostgreSQL
that several servers share.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import msgspec
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite

from hangwatch.model.kinds import Severity
from hangwatch.report.document_parsing import parse_incident
from hangwatch.report.documents import build_incident_document

from ..core.job_views import AttemptView
from ..incidents.records import IncidentRecord
from ..incidents.registry import MAX_RECORDS_KEPT
from . import migrations
from .tables import ATTEMPTS, DELIVERIES, INCIDENTS

FILE = "hangwatch.sqlite3"
_REMEDY = "give a folder that can be written with --data-dir (or HANGWATCH_DATA_DIR)"
LOCK = "lock"
_MIGRATING = 0x68616E67  # PostgreSQL's advisory lock while one of several servers migrates

Row = dict[str, Any]


class StoreError(Exception):
    """What is to hold the incidents cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A message that a channel has yet to take."""

    incident: str
    event: str
    channel: str  # its key


@dataclass(slots=True, kw_only=True)
class Changes:
    """What one `Store.save` writes, all or nothing."""

    incidents: list[Row] = field(default_factory=list)  # see `row`
    attempts: list[Row] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)


class Store:
    """A database. Methods may be called from any thread, and raise sqlalchemy.exc.SQLAlchemyError
    on a full disk and its like.

    Raises StoreError where it cannot be opened: one server at a time may use a data folder, and
    ``name`` tells those apart that share a database.
    """

    def __init__(self, data_dir: Path, database: str | None = None, name: str = "") -> None:
        self._lock = _take(data_dir)
        self.shared = database is not None
        self._server = name if database is not None else ""
        try:
            self._engine = _postgres(database) if database is not None else _sqlite(data_dir)
        except StoreError:
            self._lock.close()
            raise
        self._place = (
            self._engine.url.render_as_string(hide_password=True)
            if database is not None
            else str(data_dir / FILE)
        )
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def load(self) -> list[IncidentRecord]:
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
            (_case(row.body, row.memory) for row in rows), key=lambda case: case.incident.id
        )

    def others(self, known: Mapping[str, int]) -> list[tuple[IncidentRecord, int]]:
        """The newest incidents of other servers that are not ``known`` in their present revision."""
        theirs = sa.select(INCIDENTS.c.id, INCIDENTS.c.revision).where(
            INCIDENTS.c.server != self._server
        )
        with self._engine.connect() as db:
            newest = db.execute(
                theirs.order_by(INCIDENTS.c.id.desc()).limit(MAX_RECORDS_KEPT)
            ).all()
            changed = [row.id for row in newest if known.get(row.id) != row.revision]
            rows = (
                db.execute(sa.select(INCIDENTS).where(INCIDENTS.c.id.in_(changed))).all()
                if changed
                else []
            )
        return [(_case(row.body, row.memory, own=False), row.revision) for row in rows]

    def attempts(self, job: str | None = None, most: int = MAX_RECORDS_KEPT) -> list[AttemptView]:
        """The newest attempts, of every server that shares the database."""
        found = (
            sa.select(ATTEMPTS)
            .order_by(ATTEMPTS.c.opened_at.desc(), ATTEMPTS.c.job, ATTEMPTS.c.number.desc())
            .limit(most)
        )
        with self._engine.connect() as db:
            rows = db.execute(found if job is None else found.where(ATTEMPTS.c.job == job)).all()
        return [_attempt(row) for row in rows]

    def latest_attempts(self) -> list[AttemptView]:
        """The last one of each of this server's jobs."""
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
        return [_attempt(row) for row in rows]

    def aborted(self, job: str) -> set[str]:
        """The incidents of a job for which ranks were ended since an attempt of it last ended well."""
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

    def undelivered(self) -> list[Delivery]:
        """What the server that was here before could not deliver."""
        mine = (
            sa.select(DELIVERIES)
            .where(DELIVERIES.c.server == self._server)
            .order_by(DELIVERIES.c.incident)
        )
        with self._engine.connect() as db:
            return [
                Delivery(incident=row.incident, event=row.event, channel=row.channel)
                for row in db.execute(mine)
            ]

    def save(self, changes: Changes) -> None:
        with self._engine.begin() as db:
            for incident in changes.incidents:
                size = len(incident["body"]) + len(incident["memory"])
                self._put(
                    db,
                    INCIDENTS,
                    {**incident, "size": size},
                    {"revision": INCIDENTS.c.revision + 1},
                )
            for attempt in changes.attempts:
                self._put(db, ATTEMPTS, attempt, {"opened_at": ATTEMPTS.c.opened_at})
            for due in changes.deliveries:
                self._put(
                    db,
                    DELIVERIES,
                    {"incident": due.incident, "event": due.event, "channel": due.channel},
                    {},
                )

    def delivered(self, done: Delivery) -> None:
        """The channel took it, or never will."""
        c = DELIVERIES.c
        with self._engine.begin() as db:
            db.execute(
                sa.delete(DELIVERIES).where(
                    c.incident == done.incident, c.event == done.event, c.channel == done.channel
                )
            )

    def prune(self, before: datetime, most_bytes: float, keep: Collection[str] = ()) -> list[str]:
        """Deletes incidents opened ``before`` then, and the oldest beyond ``most_bytes``; but none
        of ``keep``. What it deleted.
        """
        mine = INCIDENTS.c.server == self._server
        with self._engine.begin() as db:
            sizes = sa.select(INCIDENTS.c.id, INCIDENTS.c.opened_at, INCIDENTS.c.size)
            rows = db.execute(sizes.where(mine).order_by(INCIDENTS.c.id.desc()))
            doomed, total = [], 0.0
            for row in rows:
                total += row.size
                if row.id not in keep and (
                    datetime.fromisoformat(row.opened_at) < before or total > most_bytes
                ):
                    doomed.append(row.id)
                    total -= row.size
            for start in range(0, len(doomed), 500):
                part = doomed[start : start + 500]
                db.execute(sa.delete(DELIVERIES).where(DELIVERIES.c.incident.in_(part)))
                db.execute(sa.delete(INCIDENTS).where(INCIDENTS.c.id.in_(part)))
            old = sa.and_(ATTEMPTS.c.server == self._server, ATTEMPTS.c.heard_at < _stamp(before))
            db.execute(sa.delete(ATTEMPTS).where(old))
            if doomed and not self.shared:
                # Gives the space back to the file system, one page with each row, of which
                # SQLAlchemy believes that there are none.
                db.connection.cursor().execute("PRAGMA incremental_vacuum").fetchall()
        return doomed

    def close(self) -> None:
        self._engine.dispose()
        self._lock.close()

    def _put(self, db: sa.Connection, table: sa.Table, values: Row, also: Row) -> None:
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

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        scripts = ScriptDirectory.from_config(config)
        try:
            with self._engine.begin() as db:
                if self.shared:
                    db.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATING)))
                present = MigrationContext.configure(db).get_current_revision()
                if present not in {None, *(step.revision for step in scripts.walk_revisions())}:
                    raise StoreError(
                        f"{self._place} was written by a newer hangwatch (its schema is {present},"
                        f" this release knows {scripts.get_current_head()}): install that release"
                        " again, or let this one start with another --data-dir or --database."
                        " Nothing was changed"
                    )
                if present != scripts.get_current_head():
                    config.attributes["connection"] = db
                    command.upgrade(config, "head")
        except sa.exc.SQLAlchemyError as error:
            why = str(getattr(error, "orig", None) or error).strip()
            if self.shared:
                raise StoreError(
                    f"{self._place} cannot be used: {why}; see to the server there, and to"
                    " --database"
                ) from error
            raise StoreError(
                f"{self._place} cannot be opened: {why}; move it away, or {_REMEDY}"
            ) from error


def _take(data_dir: Path) -> IO[str]:
    """Makes the data folder and locks it against a second server. The lock goes with the process,
    however that ends.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = (data_dir / LOCK).open("a")
    except OSError as error:
        raise StoreError(
            f"data folder {data_dir} cannot be written: {error.strerror or error}; {_REMEDY}"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise StoreError(
            f"data folder {data_dir} is in use by another hangwatch-server: stop that one, or"
            f" {_REMEDY}"
        ) from None
    return held


def _sqlite(data_dir: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{data_dir / FILE}", connect_args={"timeout": 5})
    sa.event.listen(engine, "connect", _configure)
    sa.event.listen(engine, "begin", lambda db: db.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _configure(connection: Any, _record: Any) -> None:
    # The driver's own transactions leave out changes of the schema; ours hold them too, so that a
    # migration is done or not begun.
    # https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
    connection.isolation_level = None
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # takes effect in a new file only
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _postgres(database: str) -> sa.Engine:
    url = sa.make_url(database).set(drivername="postgresql+psycopg")
    patience = {"connect_timeout": 5, "options": "-c statement_timeout=15000 -c lock_timeout=10000"}
    try:
        return sa.create_engine(url, pool_pre_ping=True, connect_args=patience)
    except ModuleNotFoundError:
        raise StoreError("PostgreSQL needs its driver: pip install 'hangwatch[postgres]'") from None


def _stamp(moment: datetime) -> str:
    """Sorts as text."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")


def row(case: IncidentRecord) -> Row:
    """A case as it stands now, for a later `Store.save` on another thread."""
    incident = case.incident
    memory = {
        "members": case.members,
        "alerted": case.alerted.value if case.alerted else None,
        "closed": case.closed,
        "aborted": case.aborted,
        "reminders": case.reminders,
        "told_at": case.told_at.isoformat() if case.told_at else None,
    }
    return {
        "id": incident.id,
        "job": incident.job,
        "attempt": incident.attempt,
        "kind": incident.kind.value,
        "status": incident.status,
        "opened_at": _stamp(incident.opened_at),
        "body": msgspec.json.encode(build_incident_document(incident)).decode(),
        "memory": json.dumps(memory),
    }


def attempt_row(attempt: AttemptView) -> Row:
    return {
        "job": attempt.job,
        "number": attempt.attempt,
        "restart": attempt.restart,
        "world_size": attempt.world_size,
        "hosts": json.dumps(attempt.hosts),
        "state": attempt.state,
        "opened_at": _stamp(attempt.opened_at),
        "heard_at": _stamp(attempt.last_seen_at),
    }


def _case(body: str, memory: str, *, own: bool = True) -> IncidentRecord:
    kept = json.loads(memory)
    incident = parse_incident(json.loads(body))
    return IncidentRecord(
        incident=incident,
        members={int(rank): str(key) for rank, key in kept["members"].items()},
        alerted=Severity(kept["alerted"]) if kept["alerted"] else None,
        closed=kept.get("closed", incident.status != "open"),
        reminders=kept.get("reminders", 0),
        told_at=datetime.fromisoformat(kept["told_at"]) if kept.get("told_at") else None,
        own=own,
    )


def _attempt(row: sa.Row[Any]) -> AttemptView:
    return AttemptView(
        job=row.job,
        attempt=row.number,
        server=row.server or None,
        state=row.state,
        world_size=row.world_size,
        hosts=json.loads(row.hosts),
        opened_at=datetime.fromisoformat(row.opened_at),
        last_seen_at=datetime.fromisoformat(row.heard_at),
        restart=row.restart,
    )
