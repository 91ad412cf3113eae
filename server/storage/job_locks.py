"""Which of several servers diagnoses a job: the one that holds PostgreSQL's advisory lock for it.

A server's locks end with its session, so those of a killed server are free immediately. A server
whose host is cut off, or that is stopped, loses its session after `SESSION_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection

import sqlalchemy as sa

SESSION_TIMEOUT_S = 8
_LOCK_CLASS = 0x686A  # the first of the two numbers of an advisory lock; the second is the job's
_SESSION_SETTINGS = {
    "idle_session_timeout": f"{SESSION_TIMEOUT_S}s",  # since PostgreSQL 14
    "tcp_keepalives_idle": "3",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "4",
}


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
            self.close()
        try:
            return self._lock_jobs(jobs)
        except sa.exc.SQLAlchemyError:
            self.close()
            raise

    def release_lock(self, job: str) -> None:
        """Raises SQLAlchemyError."""
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
                self._connection.invalidate()  # or the pool would keep the session, and the locks
                self._connection.close()
            self._connection = None

    def _lock_jobs(self, jobs: Collection[str]) -> set[str]:
        connection = self._connect()
        connection.execute(sa.select(1))
        for job in sorted(set(jobs) - self._locked):
            lock = sa.select(sa.func.pg_try_advisory_lock(_LOCK_CLASS, _number_job(job)))
            if connection.execute(lock).scalar():
                self._locked.add(job)
        return self._locked.intersection(jobs)

    def _connect(self) -> sa.Connection:
        if self._connection is None:
            engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
            self._connection = engine.connect()
            for name, value in _SESSION_SETTINGS.items():
                with contextlib.suppress(sa.exc.SQLAlchemyError):  # an older PostgreSQL
                    self._connection.execute(sa.select(sa.func.set_config(name, value, False)))
        return self._connection


def _number_job(job: str) -> int:
    """Two jobs with the same number have the same server, no more."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "big") >> 1
