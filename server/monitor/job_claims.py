"""Several servers that share a database share its jobs: each job is diagnosed by one of them.

Node agents that know several servers report to the one that their job's name chooses. If that one
does not answer, they try the next, which takes the job over if no other server has it. The new
server then continues as after a restart of the former one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import sqlalchemy as sa

from hangwatch.protocol.heartbeat import Heartbeat, get_family
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import FormerAttempt

from ..core.events import wait_for_event
from ..core.job_views import AttemptView
from ..core.problems import Problem
from ..shared_state import SharedState
from ..storage.database import SESSION_TIMEOUT_S, JobLocks
from ..storage.persistence import PersistenceWorker

log = logging.getLogger("hangwatch")

PING_INTERVAL_S = 2.0  # well within the session's timeout
RETRY_INTERVAL_S = 0.5  # the pause between two attempts to lock jobs
# Locks that were seen to be held so long ago may have been lost since.
CONFIRMED_S = SESSION_TIMEOUT_S - PING_INTERVAL_S
CONFIRM_POLL_S = 0.05
CONFIRM_WAIT_S = 5.0  # the longest delay of a diagnosis because of the database
UNUSED_S = 60.0  # a job without processes is given up after this time


@dataclass(slots=True, kw_only=True)
class JobClaims:
    """The jobs that this server diagnoses."""

    shared: SharedState
    persistence: PersistenceWorker
    locks: JobLocks
    drop_attempt: Callable[[Attempt], None]
    _used_at: dict[str, float] = field(default_factory=dict)  # the time of a job's last heartbeat
    _held: set[str] = field(default_factory=set)
    _adopted: set[str] = field(default_factory=set)  # the held jobs whose history was loaded
    _foreign: set[str] = field(default_factory=set)  # the jobs that another server has
    _wanted: set[str] = field(default_factory=set)  # the jobs refused since the last update
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_database_lost: bool = False
    _confirmed_at: float = float("-inf")  # when the last request for the locks began

    def check_heartbeat(self, beat: Heartbeat) -> None:
        """Raises Problem 421 if another server has the job of a heartbeat, and 503 until that is known.
        Node agents that know only one server are not refused.
        """
        if beat.servers < 2:
            return
        named = {update.identity.job for update in beat.processes if update.identity is not None}
        jobs = named or self.shared.fleet.list_jobs(beat.agent)
        if not jobs:
            return
        job = min(map(get_family, jobs))  # all other jobs of the host follow it
        self._used_at[job] = self.shared.now()
        if job in self._held:
            return
        self._wanted.add(job)
        self._wake.set()
        if job in self._foreign:
            raise Problem(421, f"another server of this database has job {job!r}")
        raise Problem(
            503,
            "the database is being asked which server has the job",
            headers={"Retry-After": "1"},
        )

    async def confirm_jobs(self) -> None:
        """Returns once it is known which jobs this server still has. If it was stopped for a while,
        another server may have taken them over, and what this one knows of them is out of date.
        """
        give_up_at = self.shared.now() + CONFIRM_WAIT_S
        while self._held and give_up_at > (now := self.shared.now()):
            if now - self._confirmed_at < CONFIRMED_S:
                return
            self._wake.set()
            await asyncio.sleep(CONFIRM_POLL_S)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                await wait_for_event(PING_INTERVAL_S, self._wake)
                self._wake.clear()
                await self._update_claims()
                await asyncio.sleep(RETRY_INTERVAL_S)
        finally:
            self.locks.close()

    async def _update_claims(self) -> None:
        wanted, self._wanted = self._wanted, set()
        began_at = self.shared.now()
        try:
            locked = await asyncio.to_thread(self.locks.hold_locks, self._held | wanted)
            await self._apply_locks(wanted, locked)
            self._is_database_lost = False
        except sa.exc.SQLAlchemyError as error:
            # No server can take a job over without the database, and a hang must still be reported.
            if not self._is_database_lost:
                log.error(
                    "jobs are accepted without asking the other servers, as the database fails: %s",
                    getattr(error, "orig", error),
                )
            self._is_database_lost = True
            self._held |= wanted
            self._foreign -= wanted
        self._confirmed_at = began_at

    async def _apply_locks(self, wanted: set[str], locked: set[str]) -> None:
        fleet = self.shared.fleet
        incidents = self.shared.incidents
        self._foreign = (self._foreign | self._held | wanted) - locked
        for job in self._held - locked:
            log.warning("another server has taken job %s over", job)
            for attempt in list(fleet.attempts.values()):
                if get_family(attempt.job) == job:
                    self.drop_attempt(attempt)
            # The job's incidents stay open: the other server has them now.
            for record in incidents.records.values():
                if record.is_live and get_family(record.incident.job) == job:
                    record.is_own = False
        self._held &= locked
        self._adopted &= locked
        for job in locked - self._adopted:
            # The job continues as after a restart of the server that had it.
            records, deliveries, attempts = await asyncio.to_thread(
                self.persistence.store.adopt_job, job
            )
            incidents.load_records(records)
            incidents.changed.update(record.incident.id for record in records)
            self.persistence.resume_deliveries(deliveries)
            restore_former_attempts(self.shared, attempts)
            self._adopted.add(job)
            self._held.add(job)
        running = {get_family(key.job) for key in fleet.attempts}
        oldest_at = self.shared.now() - UNUSED_S
        for job, used_at in list(self._used_at.items()):
            if used_at >= oldest_at or job in running:
                continue
            await asyncio.to_thread(self.locks.release_lock, job)
            del self._used_at[job]
            for jobs in (self._held, self._adopted, self._foreign):
                jobs.discard(job)


def restore_former_attempts(shared: SharedState, attempts: Iterable[AttemptView]) -> None:
    """Restores the last attempt of each job that is unknown, whose number the next one follows."""
    for stored in attempts:
        if shared.fleet.latest_attempt(stored.job) is not None:
            continue
        shared.fleet.former_attempts[stored.job] = FormerAttempt(
            number=stored.attempt,
            restart=stored.restart,
            last_seen_at=shared.clock.monotonic_at(stored.last_seen_at),
            is_finished=stored.state in ("finished", "failed"),
        )
