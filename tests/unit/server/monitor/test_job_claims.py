"""Which heartbeats a server takes if others share its database."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import sqlalchemy as sa

from hangwatch.protocol.heartbeat import Heartbeat, ProcessIdentity, ProcessUpdate
from hangwatch.server.alerting.alerter import Delivery
from hangwatch.server.core.clock import Clock
from hangwatch.server.core.problems import Problem
from hangwatch.server.monitor.job_claims import (
    CONFIRM_WAIT_S,
    CONFIRMED_S,
    RETRY_INTERVAL_S,
    UNUSED_S,
    JobClaims,
)
from hangwatch.server.shared_state import SharedState
from hangwatch.server.storage.database import JobLocks
from hangwatch.server.storage.persistence import PersistenceWorker
from hangwatch.tracking.attempt import Attempt


@dataclass(slots=True)
class FakeDatabase:
    """The locks and the history of the other servers."""

    taken: set[str] = field(default_factory=set)
    is_down: bool = False
    released: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)

    def hold_locks(self, jobs: list[str]) -> set[str]:
        if self.is_down:
            raise sa.exc.OperationalError("SELECT 1", {}, Exception("connection refused"))
        return set(jobs) - self.taken

    def release_lock(self, job: str) -> None:
        self.released.append(job)

    def adopt_job(self, job: str) -> tuple[list[Any], list[Any], list[Any]]:
        self.adopted.append(job)
        return [], [], []


@dataclass(slots=True)
class FakePersistence:
    store: FakeDatabase

    def resume_deliveries(self, deliveries: list[Delivery]) -> None:
        assert not deliveries


class Scene:
    def __init__(self) -> None:
        self.now = 1000.0
        self.database = FakeDatabase()
        self.given_up: list[str] = []
        self.shared = SharedState(Clock(monotonic=lambda: self.now))
        self.claims = JobClaims(
            shared=self.shared,
            persistence=cast(PersistenceWorker, FakePersistence(self.database)),
            locks=cast(JobLocks, self.database),
            drop_attempt=self.drop_attempt,
        )

    def drop_attempt(self, attempt: Attempt) -> None:
        self.given_up.append(attempt.job)
        self.shared.fleet.forget_attempt(attempt)

    def update(self) -> None:
        asyncio.run(self.claims._update_claims())

    def send(self, job: str = "run7", servers: int = 2) -> int:
        """The status of the answer."""
        identity = ProcessIdentity(job=job, rank=0, world_size=1, pid=1, start_ticks=1, restart=0)
        beat = Heartbeat(
            host="n",
            agent="a",
            number=1,
            servers=servers,
            processes=(ProcessUpdate(key="1-1", identity=identity),),
        )
        try:
            self.claims.check_heartbeat(beat)
        except Problem as problem:
            return problem.status
        self.shared.fleet.apply_heartbeat(beat, self.now)
        return 200


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_job_is_taken_once_it_is_locked(scene: Scene) -> None:
    assert scene.send() == 503, "it is being found out"
    scene.update()
    assert (scene.send(), scene.send("run7/127.0.0.1:29500")) == (200, 200)
    assert len(scene.database.adopted) == 1
    scene.update()
    assert len(scene.database.adopted) == 1, "what was known of it is loaded once"


def test_job_of_another_server_is_refused_until_that_ends(scene: Scene) -> None:
    scene.database.taken = {"run7"}
    scene.send()
    scene.update()
    assert scene.send() == 421
    scene.now += RETRY_INTERVAL_S
    assert scene.send() == 421, "and the lock is tried again"
    scene.database.taken = set()
    scene.update()
    assert scene.send() == 200


def test_agent_that_knows_no_other_server_is_never_refused(scene: Scene) -> None:
    scene.database.taken = {"run7"}
    assert scene.send(servers=1) == 200


def test_lost_job_is_given_up(scene: Scene) -> None:
    scene.send()
    scene.update()
    assert scene.send() == 200
    scene.database.taken = {"run7"}  # the server's session had ended
    scene.update()
    assert scene.given_up == ["run7"] and scene.send() == 421


def test_stopped_server_confirms_its_jobs_before_it_diagnoses(scene: Scene) -> None:
    scene.send()
    scene.update()
    assert scene.send() == 200

    async def confirm() -> bool:
        """Whether the diagnosis waits for the next request of the locks."""
        confirming = asyncio.ensure_future(scene.claims.confirm_jobs())
        await asyncio.sleep(0)
        had_to_wait = not confirming.done()
        await scene.claims._update_claims()
        await confirming
        return had_to_wait

    assert not asyncio.run(confirm())
    scene.now += CONFIRMED_S
    scene.database.taken = {"run7"}
    assert asyncio.run(confirm())
    assert scene.given_up == ["run7"]
    scene.now += CONFIRMED_S
    assert not asyncio.run(confirm()), "it has no job"


def test_diagnosis_does_not_wait_for_ever_for_the_database(scene: Scene) -> None:
    scene.send()
    scene.update()
    scene.now += CONFIRMED_S

    async def confirm() -> None:
        confirming = asyncio.ensure_future(scene.claims.confirm_jobs())
        await asyncio.sleep(0)
        assert not confirming.done()
        scene.now += CONFIRM_WAIT_S
        await confirming

    asyncio.run(confirm())
    assert not scene.given_up


def test_without_the_database_jobs_are_taken(scene: Scene, caplog: Any) -> None:
    scene.database.is_down = True
    scene.send()
    scene.update()
    scene.update()
    assert scene.send() == 200
    assert len(caplog.records) == 1 and "connection refused" in caplog.text
    scene.database.is_down = False
    scene.database.taken = {"run7"}
    scene.update()
    assert scene.given_up == ["run7"], "another server had it all the time"


def test_unused_job_is_given_back(scene: Scene) -> None:
    scene.send()
    scene.update()
    scene.now += UNUSED_S + 1.0
    scene.update()
    assert scene.database.released == ["run7"]
    assert scene.send() == 503
