"""Several servers that share a database share its jobs: each job is diagnosed by one of them.

Node agents that know several servers report to the one that their job's name chooses. If that one
does not answer, they try the next, which takes the job over if no other server has it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa

from hangwatch.protocol.heartbeat import Heartbeat, get_family
from hangwatch.tracking.fleet import Fleet

from ..core.clock import Clock
from ..core.problems import Problem
from ..core.waiting import wait_for_event
from ..storage.job_locks import JobLocks
from ..storage.store import JobHistory, Store

log = logging.getLogger("hangwatch")

PING_INTERVAL_S = 2.0  # well within the session's timeout
RETRY_INTERVAL_S = 0.5  # between two attempts to lock a job of another server
RETRY_AFTER_S = 1
NOT_HERE_STATUSES = (421, 503)  # another server has the job, or may have it
UNUSED_S = 60.0  # a job without processes is given up after that


class _State(enum.Enum):
    PENDING = enum.auto()
    HELD = enum.auto()
    FOREIGN = enum.auto()  # another server has it


@dataclass(slots=True)
class _Claim:
    state: _State
    changed_at: float
    is_adopted: bool = False
    refused_at: float = float("-inf")
    used_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class JobClaims:
    """Knows which jobs this server diagnoses. ``adopt_job`` gets what an earlier server knew of a
    job; ``give_up_job`` is called if this server has lost it, for example because it was stopped.
    """

    clock: Clock
    store: Store
    locks: JobLocks
    fleet: Fleet
    adopt_job: Callable[[JobHistory], None]
    give_up_job: Callable[[str], None]
    _claims: dict[str, _Claim] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_database_lost: bool = False

    def check_heartbeat(self, beat: Heartbeat) -> None:
        """Raises Problem 421 if another server has the job, and 503 until that is known. Node agents
        that know only one server are not refused.
        """
        if beat.servers < 2:
            return
        named = {update.identity.job for update in beat.processes if update.identity is not None}
        jobs = sorted(map(get_family, named or self.fleet.list_jobs(beat.agent)))
        if jobs:
            self._check_job(jobs[0])  # whatever else runs there follows

    def _check_job(self, job: str) -> None:
        now = self.clock.monotonic()
        claim = self._claims.get(job)
        if claim is None:
            claim = self._claims[job] = _Claim(_State.PENDING, now)
            self._wake.set()
        claim.used_at = now
        if claim.state is _State.HELD:
            return
        if claim.state is _State.FOREIGN and now - claim.changed_at >= RETRY_INTERVAL_S:
            claim.state = _State.PENDING
            claim.refused_at = now
            self._wake.set()
        if claim.state is _State.FOREIGN or claim.refused_at == now:
            raise Problem(421, f"another server of this database has job {job!r}")
        raise Problem(
            503,
            "the database is being asked which server has the job",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                await wait_for_event(PING_INTERVAL_S, self._wake)
                self._wake.clear()
                await self._update_claims()
        finally:
            self.locks.close()

    async def _update_claims(self) -> None:
        wanted = [job for job, claim in self._claims.items() if claim.state is not _State.FOREIGN]
        try:
            held = await asyncio.to_thread(self.locks.hold_locks, wanted)
            await self._apply_locks(wanted, held)
            self._is_database_lost = False
        except sa.exc.SQLAlchemyError as error:
            self._grant_pending(error)

    async def _apply_locks(self, wanted: list[str], held: set[str]) -> None:
        now = self.clock.monotonic()
        for job in wanted:
            claim = self._claims[job]
            if job not in held:
                was_held = claim.state is _State.HELD
                self._claims[job] = _Claim(_State.FOREIGN, now, used_at=claim.used_at)
                if was_held:
                    log.warning("another server has taken job %s over", job)
                    self.give_up_job(job)
                continue
            if not claim.is_adopted:
                self.adopt_job(await asyncio.to_thread(self.store.adopt_job, job))
                claim.is_adopted = True
            claim.state = _State.HELD
        for job in self._find_unused(now):
            await asyncio.to_thread(self.locks.release_lock, job)
            del self._claims[job]

    def _find_unused(self, now: float) -> list[str]:
        running = {get_family(key.job) for key in self.fleet.attempts}
        return [
            job
            for job, claim in self._claims.items()
            if now - claim.used_at > UNUSED_S and job not in running
        ]

    def _grant_pending(self, error: sa.exc.SQLAlchemyError) -> None:
        """Without the database no server can take a job over, and a hang must be reported still."""
        if not self._is_database_lost:
            log.error(
                "jobs are accepted without asking the other servers, as the database fails: %s",
                getattr(error, "orig", error),
            )
        self._is_database_lost = True
        now = self.clock.monotonic()
        for claim in self._claims.values():
            if claim.state is _State.PENDING:
                claim.state, claim.changed_at = _State.HELD, now
