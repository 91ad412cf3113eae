"""Opens the database: locks the data folder, connects, and migrates the schema."""

from __future__ import annotations

import contextlib
import fcntl
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
# Without them, a query to a database that was cut off takes a quarter of an hour to fail. The names
# are libpq's; the last one is in milliseconds.
_DEAD_PEER_LIMITS = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_MIGRATION_LOCK = 0x68616E67  # PostgreSQL's advisory lock while one of several servers migrates


class StoreError(Exception):
    """The database cannot be used. The message says why and gives the remedy."""


def lock_data_dir(data_dir: Path) -> IO[str]:
    """Creates the data folder and locks it against a second server. The lock ends with the process.
    Raises StoreError.
    """
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


def open_sqlite(data_dir: Path) -> sa.Engine:
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


def _configure_connection(connection: Any, _record: Any) -> None:
    # The driver's own transactions do not include changes of the schema. Ours do, so that a
    # migration is applied completely or not at all.
    # https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
    connection.isolation_level = None
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # takes effect in a new file only
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def open_postgres(database: str) -> sa.Engine:
    url = sa.make_url(database).set(drivername="postgresql+psycopg")
    options = "-c statement_timeout=15000 -c lock_timeout=10000"
    try:
        return sa.create_engine(
            url,
            pool_pre_ping=True,
            connect_args={"connect_timeout": 5, "options": options, **_DEAD_PEER_LIMITS},
        )
    except ModuleNotFoundError:
        raise StoreError("PostgreSQL needs its driver: pip install 'hangwatch[postgres]'") from None


def migrate(engine: sa.Engine) -> None:
    """Upgrades the schema to this release's, completely or not at all. Raises StoreError."""
    is_shared = engine.dialect.name == "postgresql"
    place = engine.url.render_as_string(hide_password=True) if is_shared else engine.url.database
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    scripts = ScriptDirectory.from_config(config)
    try:
        with engine.begin() as db:
            if is_shared:
                db.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            present = MigrationContext.configure(db).get_current_revision()
            if present not in {None, *(step.revision for step in scripts.walk_revisions())}:
                raise StoreError(
                    f"{place} was written by a newer hangwatch (its schema is {present},"
                    f" this release supports {scripts.get_current_head()}): install that release"
                    " again, or start this one with another --data-dir or --database."
                    " Nothing was changed"
                )
            if present != scripts.get_current_head():
                config.attributes["connection"] = db
                command.upgrade(config, "head")
    except sa.exc.SQLAlchemyError as error:
        why = str(getattr(error, "orig", None) or error).strip()
        if is_shared:
            raise StoreError(
                f"{place} cannot be used: {why}; check the server there, and --database"
            ) from error
        raise StoreError(f"{place} cannot be opened: {why}; move it away, or {_REMEDY}") from error
