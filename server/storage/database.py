"""Opens the database: locks the data folder, connects, and migrates the schema.

Among servers that share a database, the one that holds PostgreSQL's advisory lock for a job diagnoses
it. A server's locks end with its session, so those of a killed server are free immediately. A server
whose host is cut off, or that is stopped, loses its session after `SESSION_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from . import migrations

DATABASE_FILE = "hangwatch.sqlite3"
LOCK_FILE = "lock"
_REMEDY = "give a folder that can be written with --data-dir (or HANGWATCH_DATA_DIR)"
# A query to a database that was cut off would otherwise take a quarter of an hour to fail. The names
# are libpq's; the last one is in milliseconds.
_DEAD_PEER_LIMITS = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_MIGRATION_LOCK = 0x68616E67  # PostgreSQL's advisory lock while one of several servers migrates

SESSION_TIMEOUT_S = 8
_LOCK_CLASS = 0x686A  # the first of the two numbers of an advisory lock; the second is the job's
_SESSION_SETTINGS = {
    "idle_session_timeout": f"{SESSION_TIMEOUT_S}s",  # since PostgreSQL 14
    "tcp_keepalives_idle": "3",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "4",
}


class StoreError(Exception):
    """The database cannot be used. The message gives the reason and the remedy."""


def lock_data_dir(data_dir: Path) -> IO[str]:
    """Creates the data folder, and locks it for this process. Raises StoreError."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (data_dir / LOCK_FILE).open("a")
    except OSError as error:
        raise StoreError(
            f"data folder {data_dir} cannot be written: {error.strerror or error}; {_REMEDY}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StoreError(
            f"data folder {data_dir} is in use by another hangwatch-server: stop that one, or"
            f" {_REMEDY}"
        ) from None
    return lock


def open_engine(data_dir: Path, database: str | None) -> sa.Engine:
    """SQLite in the data folder, or PostgreSQL at the URL ``database``. Raises StoreError."""
    if database is None:
        path = data_dir / DATABASE_FILE
        # SQLite gives its other files the permissions of the database.
        with contextlib.suppress(OSError):  # the first connection reports the error
            path.touch(mode=0o600)
            path.chmod(0o600)
        url = sa.URL.create("sqlite", database=str(path))
        engine = sa.create_engine(url, connect_args={"timeout": 5})
        sa.event.listen(engine, "connect", _configure_connection)
        sa.event.listen(engine, "begin", lambda db: db.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    url = sa.make_url(database).set(drivername="postgresql+psycopg")
    options = "-c statement_timeout=15000 -c lock_timeout=10000"
    connect_args = {"connect_timeout": 5, "options": options, **_DEAD_PEER_LIMITS}
    try:
        return sa.create_engine(url, pool_pre_ping=True, connect_args=connect_args)
    except ModuleNotFoundError:
        raise StoreError("PostgreSQL needs its driver: pip install 'hangwatch[postgres]'") from None


def _configure_connection(connection: Any, _record: Any) -> None:
    # The driver's own transactions do not include changes of the schema. Ours do, so that a
    # migration is applied completely or not at all.
    # https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
    connection.isolation_level = None
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # takes effect in a new file only
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def migrate(engine: sa.Engine) -> None:
    """Upgrades the schema to this release's, completely or not at all. Raises StoreError."""
    is_shared = engine.dialect.name == "postgresql"
    place = engine.url.render_as_string(hide_password=True) if is_shared else engine.url.database
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    scripts = ScriptDirectory.from_config(config)
    newest = scripts.get_current_head()
    try:
        with engine.begin() as db:
            if is_shared:
                db.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            present = MigrationContext.configure(db).get_current_revision()
            known = [step.revision for step in scripts.walk_revisions()]
            if present is not None and present not in known:
                raise StoreError(
                    f"{place} was written by a newer hangwatch (its schema is {present},"
                    f" this release supports {newest}): install that release again, or start this"
                    " one with another --data-dir or --database. Nothing was changed"
                )
            if present != newest:
                config.attributes["connection"] = db
                command.upgrade(config, "head")
    except sa.exc.SQLAlchemyError as error:
        why = str(getattr(error, "orig", None) or error).strip()
        problem = f"{place} cannot be opened: {why}; move it away, or {_REMEDY}"
        if is_shared:
            problem = f"{place} cannot be used: {why}; check the server there, and --database"
        raise StoreError(problem) from error


class JobLocks:
    """The locks of this server, in a session of their own. Not thread-safe; may block for seconds."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._connection: sa.Connection | None = None
        self._locked: set[str] = set()

    def hold_locks(self, jobs: Collection[str]) -> set[str]:
        """Keeps the session alive, and returns those of ``jobs`` that this server has locked. To be
        called well within `SESSION_TIMEOUT_S`. Raises SQLAlchemyError.
        """
        try:
            return self._lock_jobs(jobs)
        except sa.exc.SQLAlchemyError:
            self.close()  # the session was lost: a second try begins a new one
        try:
            return self._lock_jobs(jobs)
        except sa.exc.SQLAlchemyError:
            self.close()
            raise

    def release_lock(self, job: str) -> None:
        """Gives up the lock of one job. Raises SQLAlchemyError."""
        if job in self._locked and self._connection is not None:
            self._locked.discard(job)
            self._connection.execute(
                sa.select(sa.func.pg_advisory_unlock(_LOCK_CLASS, _number_job(job)))
            )

    def close(self) -> None:
        """Gives all locks up."""
        self._locked.clear()
        if self._connection is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                self._connection.invalidate()  # the pool would keep the session, and the locks
                self._connection.close()
            self._connection = None

    def _lock_jobs(self, jobs: Collection[str]) -> set[str]:
        if self._connection is None:
            engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
            self._connection = engine.connect()
            for name, value in _SESSION_SETTINGS.items():
                with contextlib.suppress(sa.exc.SQLAlchemyError):  # an older PostgreSQL
                    self._connection.execute(sa.select(sa.func.set_config(name, value, False)))
        self._connection.execute(sa.select(1))
        for job in sorted(set(jobs) - self._locked):
            lock = sa.select(sa.func.pg_try_advisory_lock(_LOCK_CLASS, _number_job(job)))
            if self._connection.execute(lock).scalar():
                self._locked.add(job)
        return self._locked.intersection(jobs)


def _number_job(job: str) -> int:
    """The number of a job's lock. Two jobs with the same number have the same server, no more."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "big") >> 1
