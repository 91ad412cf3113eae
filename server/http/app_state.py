"""What all routes share, and the look-ups that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hangwatch.model.ranks import AttemptKey, RankState, format_ranks
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import JobView
from ..core.limits import large
from ..core.memo import ResultCache
from ..core.problems import Problem
from ..incidents.records import IncidentRecord
from ..monitor import job_status, views
from ..monitor.watch import Watch
from ..settings import Settings


@dataclass(slots=True, kw_only=True)
class AppState:
    """The settings as they came out, and the live state."""

    settings: Settings
    base_url: str
    token: str | None
    watch: Watch
    cache: ResultCache = field(default_factory=ResultCache)

    def now(self) -> float:
        return self.watch.clock.monotonic()

    def list_latest_attempts(self) -> list[Attempt]:
        """The latest attempt of each job, the newest first."""
        latest: dict[str, Attempt] = {}
        for attempt in self.watch.fleet.attempts.values():
            if attempt.job not in latest or latest[attempt.job].number < attempt.number:
                latest[attempt.job] = attempt
        return sorted(latest.values(), key=lambda a: -a.opened_at)

    def find_attempts(self, job: str | None, number: int | None = None) -> list[Attempt]:
        """Those that a query is about: of all jobs the latest, unless it says more. Raises Problem
        for unknown ones.
        """
        if job is None:
            return self.list_latest_attempts()
        latest = [a for a in self.list_latest_attempts() if a.job == job]
        if not latest:
            names = ", ".join(a.job for a in self.list_latest_attempts()) or "none has reported yet"
            raise Problem(404, f"no job {job!r} is known; known are: {names}")
        if number is None:
            return latest
        found = self.watch.fleet.attempts.get(AttemptKey(job, number))
        if found is None:
            known = ", ".join(
                str(key.number) for key in sorted(self.watch.fleet.attempts) if key.job == job
            )
            raise Problem(404, f"job {job!r} has no attempt {number} in memory; there are: {known}")
        return [found]

    def get_rank_states(self, attempt: Attempt) -> dict[int, RankState]:
        """As of now; of a large attempt as of the last round, at most some seconds ago."""
        if (
            large(attempt.rank_count)
            and (known := self.watch.states.rank_states.get(attempt.key)) is not None
        ):
            return known
        return views.compute_states(
            attempt,
            self.watch.incidents.list_open(attempt),
            self.now(),
            self.watch.intervals.lost_after_s,
        )

    def describe_job(self, attempt: Attempt) -> JobView:
        known = self.watch.states.large_jobs.get(attempt.key) if large(attempt.rank_count) else None
        if known is None:
            cases, now = self.watch.incidents.list_open(attempt), self.now()
            known = views.describe_job(
                attempt,
                views.count_states(attempt, cases, now, self.watch.intervals.lost_after_s),
                cases,
                now,
            )
        return self.add_summary(attempt, known)

    def add_summary(self, attempt: Attempt, job: JobView) -> JobView:
        """With its pace, and a sentence on how it stands."""
        pace = self.watch.states.paces.get(attempt.key)
        rate = None if pace is None or pace.steps_per_s is None else round(pace.steps_per_s, 3)
        paced = replace(job, steps_per_s=rate)
        opened = views.sort_by_severity(self.watch.incidents.list_open(attempt))
        is_running = paced.state not in ("lost", "failed", "finished")
        summary = (
            views.format_verdict(opened[0])
            if opened and is_running
            else job_status.describe_job_status(attempt, paced, self.settings.stall_after)[0]
        )
        return replace(paced, summary=summary)

    def find_incidents(
        self, job: str | None = None, status: str | None = None, rank: int | None = None
    ) -> Sequence[IncidentRecord]:
        """Newest first."""
        found = [
            record
            for record in self.watch.incidents.records.values()
            if (job is None or record.incident.job == job)
            and (status is None or record.incident.status == status)
            and (
                rank is None or rank in record.incident.culprits or rank in record.incident.waiting
            )
        ]
        return sorted(found, key=lambda c: c.incident.id, reverse=True)

    def get_incident(self, id: str) -> IncidentRecord:
        """Raises Problem for an unknown one."""
        record = self.watch.incidents.records.get(id)
        if record is None:
            raise Problem(404, f"no incident {id!r} is known; /incidents lists those that are")
        return record


def require_single_attempt(
    attempts: Sequence[Attempt], ranks: Sequence[int], none_detail: str
) -> Attempt:
    """The one attempt that was found, which must have all of ``ranks``. Raises Problem; where none
    was found, it says ``nothing``.
    """
    if len(attempts) != 1:
        names = ", ".join(a.job for a in attempts)
        raise Problem(422, f"say which job: {names}" if attempts else none_detail)
    if unknown := sorted(set(ranks) - set(attempts[0].processes)):
        known = format_ranks(attempts[0].processes)
        raise Problem(
            404,
            f"job {attempts[0].job!r} has no rank {format_ranks(unknown)}; it has {known}",
            ranks=unknown[:100],
        )
    return attempts[0]
