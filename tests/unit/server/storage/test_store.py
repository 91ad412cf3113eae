"""The same history in SQLite and in a real PostgreSQL, which the tests start."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.server.alerting.alerter import Delivery
from hangwatch.server.core.job_views import AttemptView
from hangwatch.server.incidents.registry import IncidentRecord
from hangwatch.server.storage.database import DATABASE_FILE, StoreError
from hangwatch.server.storage.store import METADATA, Store, make_attempt_row, make_incident_row
from tests.harness.postgres import clear_database
from tests.unit.incident_documents import make_incident as build_incident

MOMENT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def make_incident(number: int = 0, **more: object) -> Incident:
    fields: dict[str, object] = {
        "id": f"01J{number:023}", "job": "run7", "attempt": 0, "kind": VerdictKind.MISSING_RANK, "severity": Severity.ALERT, "status": "open",
        "onset_at": MOMENT, "opened_at": MOMENT + timedelta(days=number), "summary": "rank 1 has not entered\0", "advice": "Look.",
        "culprits": [1], "waiting": [0], "waits": [{"rank": 0, "for": 1, "group": "0", "seq": 7}],
    }  # fmt: skip
    return build_incident(**{**fields, **more})


def make_attempt(number: int, state: str = "running", **more: Any) -> AttemptView:
    fields: dict[str, Any] = {
        "job": "run7",
        "attempt": number,
        "state": state,
        "world_size": 4,
        "hosts": ["n"],
        "opened_at": MOMENT,
    }
    return AttemptView(**{**fields, "last_seen_at": MOMENT + timedelta(hours=number), **more})


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest) -> str | None:
    """The value of --database; each test finds an empty database."""
    if request.param == "sqlite":
        return None
    url: str = request.getfixturevalue("postgres")
    clear_database(url)
    return url


class StoreOpener:
    """Opens the store again and again, as a server that is started again does."""

    def __init__(self, folder: Path, database: str | None) -> None:
        self.folder, self.database, self.opened = folder, database, list[Store]()

    def __call__(self, name: str = "one") -> Store:
        self.opened.append(Store(self.folder / name, self.database, name))
        return self.opened[-1]


@pytest.fixture
def opener(tmp_path: Path, database: str | None) -> Iterator[StoreOpener]:
    made = StoreOpener(tmp_path, database)
    yield made
    for store in made.opened:
        store.close()


def test_saved_incidents_are_restored(opener: StoreOpener) -> None:
    store = opener()
    record = IncidentRecord(
        incident=make_incident(),
        members={1: "n/1-1"},
        alerted_severity=Severity.ALERT,
        alerted_at=MOMENT,
        reminders=2,
    )
    store.save_changes(incidents=[make_incident_row(record)])
    record.incident = replace(record.incident, status="resolved", resolved_at=MOMENT)
    record.is_resolution_announced = True
    store.save_changes(incidents=[make_incident_row(record)])
    store.close()
    [kept] = opener().load_incidents()
    assert kept == record


def test_attempts_are_restored_with_start_time(opener: StoreOpener) -> None:
    store = opener()
    store.save_changes(
        attempts=[
            make_attempt_row(make_attempt(0, "failed")),
            make_attempt_row(make_attempt(1)),
        ]
    )
    later = make_attempt(
        1, "stalled", opened_at=MOMENT + timedelta(days=1), last_seen_at=MOMENT + timedelta(days=2)
    )
    store.save_changes(attempts=[make_attempt_row(later)])
    assert [(a.attempt, a.state, a.opened_at, a.hosts) for a in store.load_attempts("run7")] == [
        (1, "stalled", MOMENT, ["n"]),
        (0, "failed", MOMENT, ["n"]),
    ]
    assert [a.attempt for a in store.load_latest_attempts()] == [1]
    assert store.load_attempts("another") == []


def test_message_is_pending_until_delivered(opener: StoreOpener) -> None:
    store = opener()
    one, two = (
        Delivery(incident="i", event="opened", channel="a"),
        Delivery(incident="i", event="opened", channel="b"),
    )
    store.save_changes(deliveries=[one, two])
    store.delete_delivery(one)
    store.delete_delivery(one)
    store.close()
    assert opener().load_deliveries() == [two]


def test_retention_by_age_and_size_keeps_live_data(opener: StoreOpener) -> None:
    store = opener()
    records = [IncidentRecord(incident=make_incident(n, advice="x" * 10_000)) for n in range(10)]
    store.save_changes(
        incidents=[make_incident_row(c) for c in records],
        attempts=[make_attempt_row(make_attempt(0))],
    )
    ids = [c.incident.id for c in records]
    assert store.prune_incidents(MOMENT + timedelta(days=3), 1e9, keep=[ids[1]]) == [ids[2], ids[0]]
    assert store.load_attempts() == []
    assert store.prune_incidents(MOMENT, 35_000, keep=[ids[1]]) == ids[6:2:-1]
    assert [c.incident.id for c in store.load_incidents()] == [ids[1], *ids[7:]]


def test_newer_schema_is_reported_and_not_changed(opener: StoreOpener) -> None:
    store = opener()
    store.save_changes(incidents=[make_incident_row(IncidentRecord(incident=make_incident()))])
    with store._engine.begin() as db:
        db.execute(sa.text("UPDATE alembic_version SET version_num = '99'"))
    store.close()
    with pytest.raises(
        StoreError, match=r"written by a newer hangwatch .*schema is 99.*Nothing was changed"
    ):
        opener()
    with store._engine.begin() as db:
        db.execute(sa.text("UPDATE alembic_version SET version_num = '1'"))
    store.close()
    assert len(opener().load_incidents()) == 1


def test_migrations_produce_the_tables(opener: StoreOpener) -> None:
    with opener()._engine.connect() as db:
        assert compare_metadata(MigrationContext.configure(db), METADATA) == []


def test_servers_share_history_and_keep_own_state(opener: StoreOpener) -> None:
    one = opener("one")
    if not one.is_shared:
        pytest.skip("one server a file")
    two = opener("two")
    one.save_changes(
        incidents=[make_incident_row(IncidentRecord(incident=make_incident(1)))],
        attempts=[make_attempt_row(make_attempt(0))],
    )
    two.save_changes(
        incidents=[make_incident_row(IncidentRecord(incident=make_incident(2)))],
        attempts=[make_attempt_row(make_attempt(0))],
    )
    [(seen, revision)] = two.load_other_servers({})
    assert (seen.incident.id, seen.is_own) == (make_incident(1).id, False)
    assert two.load_other_servers({seen.incident.id: revision}) == []
    one.save_changes(
        incidents=[make_incident_row(IncidentRecord(incident=make_incident(1, status="resolved")))]
    )
    [(seen, _)] = two.load_other_servers({seen.incident.id: revision})
    assert seen.incident.status == "resolved"
    assert [c.incident.id for c in two.load_incidents()] == [make_incident(2).id]
    assert {a.server for a in two.load_attempts()} == {"one", "two"}
    assert two.prune_incidents(MOMENT + timedelta(days=99), 1e9) == [make_incident(2).id]
    assert len(one.load_incidents()) == 1


def test_database_without_migrations_is_reported_and_not_changed(tmp_path: Path) -> None:
    made = sqlite3.connect(tmp_path / DATABASE_FILE)
    made.execute("CREATE TABLE incidents (id VARCHAR(26) PRIMARY KEY)")
    made.execute("INSERT INTO incidents VALUES ('01J')")
    made.commit()
    with pytest.raises(StoreError, match="already exists; move it away"):
        Store(tmp_path)
    assert made.execute("SELECT * FROM incidents").fetchall() == [("01J",)]
    assert made.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [
        ("incidents",)
    ]
    made.close()


def test_unusable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--data-dir"):
        Store(tmp_path / "file" / "data")
    first = Store(tmp_path / "used")
    with pytest.raises(StoreError, match="in use by another hangwatch-server"):
        Store(tmp_path / "used")
    first.close()
    (tmp_path / DATABASE_FILE).write_text("this is no database " * 100)
    with pytest.raises(StoreError, match="move it away"):
        Store(tmp_path)


def test_unreachable_database_is_reported_without_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--database") as raised:
        Store(tmp_path, "postgresql://me:hush@127.0.0.1:1/x", "one")
    assert "hush" not in str(raised.value)
