"""Incidents on disk: they outlive the job and the server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from hangwatch.types import Severity

from . import schema
from .incidents import CASES_KEPT, Case

FILE = "hangwatch.sqlite3"

_METADATA = sa.MetaData()
_INCIDENTS = sa.Table(
    "incidents",
    _METADATA,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("job", sa.String, nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("opened_at", sa.String, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # as the API shows it
    sa.Column("memory", sa.Text, nullable=False),  # what only the server needs of it
)


class StoreError(Exception):
    """The data folder cannot be used. The message says why and what to do."""


class Store:
    """One SQLite file in the data folder. Raises StoreError where it cannot be opened."""

    def __init__(self, data_dir: Path) -> None:
        remedy = "give a folder that can be written with --data-dir (or HANGWATCH_DATA_DIR)"
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = data_dir / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"data folder {data_dir} cannot be written: {error.strerror or error}; {remedy}") from error
        self._engine = sa.create_engine(f"sqlite:///{data_dir / FILE}", connect_args={"timeout": 5})
        sa.event.listen(self._engine, "connect", _write_ahead)
        try:
            _METADATA.create_all(self._engine)
        except sa.exc.DatabaseError as error:
            self._engine.dispose()
            raise StoreError(f"{data_dir / FILE} cannot be opened: {error.orig}; move it away, or {remedy}") from error

    def load(self) -> list[Case]:
        """The newest incidents, oldest first, open ones whatever their age."""
        newest = sa.select(_INCIDENTS).order_by(_INCIDENTS.c.status != "open", _INCIDENTS.c.id.desc()).limit(CASES_KEPT)
        with self._engine.connect() as db:
            rows = db.execute(newest).all()
        return [_case(row.body, row.memory) for row in sorted(rows, key=lambda row: str(row.id))]

    def save(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes what `row` made. Raises sqlalchemy.exc.DatabaseError on a full disk and its like."""
        with self._engine.begin() as db:
            for row in rows:
                rest = {name: value for name, value in row.items() if name != "id"}
                db.execute(insert(_INCIDENTS).values(row).on_conflict_do_update(index_elements=["id"], set_=rest))

    def close(self) -> None:
        self._engine.dispose()


def row(case: Case) -> dict[str, Any]:
    """A case as it stands now, for a later `Store.save` on another thread."""
    incident = case.incident
    memory = {"members": case.members, "alerted": case.alerted.value if case.alerted else None}
    return {
        "id": incident.id,
        "job": incident.job,
        "attempt": incident.attempt,
        "kind": incident.kind.value,
        "status": incident.status,
        "opened_at": incident.opened_at.isoformat(),
        "body": incident.model_dump_json(),
        "memory": json.dumps(memory),
    }


def _case(body: str, memory: str) -> Case:
    kept = json.loads(memory)
    return Case(
        incident=schema.Incident.model_validate_json(body),
        members={int(rank): str(key) for rank, key in kept["members"].items()},
        alerted=Severity(kept["alerted"]) if kept["alerted"] else None,
    )


def _write_ahead(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
