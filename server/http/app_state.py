"""The state that all routes share, and how they find jobs and incidents in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request

from hangwatch.model.ranks import AttemptKey, RankState, format_ranks
from hangwatch.report.job_status import FAILED_DIAGNOSIS
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import JobView, ResultCache
from ..core.limits import is_large
from ..core.peers import PeerConnections
from ..core.problems import Problem
from ..core.supervision import TaskSupervisor
from ..incidents.registry import IncidentRecord
from ..monitor import views
from ..monitor.watch import Watch
from ..performance.views import RankedGroup, rank_groups
from ..settings import Settings
from ..shared_state import SharedState
from .rendering import PageRenderer

NOT_READY_AFTER_S = 10.0  # seconds without a round of diagnosis after which the server is not ready


@dataclass(slots=True, kw_only=True)
class AppState:
    """The settings, and everything that the server knows and runs."""

    settings: Settings
    base_url: str
    token: str | None
    shared: SharedState
    watch: Watch
    pages: PageRenderer
    peers: PeerConnections
    tasks: TaskSupervisor = field(default_factory=TaskSupervisor)
    cache: ResultCache = field(default_factory=ResultCache)

    def now(self) -> float:
        return self.shared.now()

    def list_down_parts(self) -> dict[str, str]:
        """The parts that do not work, with reasons. Shown without the token: they name no job."""
        down = dict.fromkeys(self.tasks.list_down(), "it failed, and is started again")
        round_age_s = self.now() - self.watch.loop.last_round_at
        if round_age_s > NOT_READY_AFTER_S:
            down.setdefault("diagnosis", f"it has not run for {round_age_s:.0f} s")
        if not self.watch.persistence.is_saved:
            down.setdefault(
                "storage and alerts",
                "incidents cannot be written: check the disk of the data folder, or the database",
            )
        return down

    def list_latest_attempts(self) -> list[Attempt]:
        """The latest attempt of each job, the newest first."""
        by_number = sorted(self.shared.fleet.attempts.values(), key=lambda a: a.number)
        latest = {attempt.job: attempt for attempt in by_number}
        return sorted(latest.values(), key=lambda a: -a.opened_at)

    def find_attempts(self, job: str | None, number: int | None = None) -> list[Attempt]:
        """The latest attempt of each job, or of one job and its worlds that run beside it; or the
        attempt of a job with that number. Raises Problem for an unknown job or attempt.
        """
        if job is None:
            return self.list_latest_attempts()
        fleet = self.shared.fleet
        family = fleet.list_family(job)
        if not family:
            names = ", ".join(a.job for a in self.list_latest_attempts()) or "none has reported yet"
            raise Problem(404, f"unknown job {job!r}; known jobs: {names}")
        if number is None:
            return family
        attempt = fleet.attempts.get(AttemptKey(job, number))
        if attempt is None:
            keys = sorted(key for key in fleet.attempts if key.job == job)
            numbers = ", ".join(str(key.number) for key in keys)
            detail = f"job {job!r} has no attempt {number} in memory; there are: {numbers}"
            raise Problem(404, detail)
        return [attempt]

    def get_rank_states(self, attempt: Attempt) -> dict[int, RankState]:
        """The state of each rank; in a large attempt, that of the last round, seconds ago."""
        published_states = self.watch.diagnoser.get_record(attempt).rank_states
        if published_states and is_large(attempt.rank_count):
            return published_states
        records = self.shared.incidents.list_open(attempt)
        lost_after_s = self.watch.report_scheduler.get_limits(attempt.job).lost_after_s
        return views.compute_states(attempt, records, self.now(), lost_after_s)

    def describe_job(self, attempt: Attempt) -> JobView:
        view = self.watch.diagnoser.get_record(attempt).large_job
        if view is None:
            counts = Counter(self.get_rank_states(attempt).values())
            records = self.shared.incidents.list_open(attempt)
            view = views.describe_job(attempt, counts, records, self.now())
        return self.add_summary(attempt, view)[0]

    def add_summary(self, attempt: Attempt, job: JobView) -> tuple[JobView, str]:
        """The view with the job's pace and condition; and advice, empty for a healthy job."""
        last = self.watch.diagnoser.get_record(attempt)
        pace = last.steps_per_s
        paced = replace(job, steps_per_s=None if pace is None else round(pace, 3))
        if last.has_failed:
            summary, advice = FAILED_DIAGNOSIS
        else:
            summary, advice = views.describe_job_status(
                attempt,
                paced,
                self.settings.stall_after,
                last.unexplained_wait,
                self.now(),
                pause_note=last.pause_note,
            )
        opened = views.sort_by_severity(self.shared.incidents.list_open(attempt))
        if opened and job.state not in ("lost", "failed", "finished"):
            summary = views.format_verdict(opened[0])
        return replace(paced, summary=summary), advice

    def get_ranked_groups(self, attempt: Attempt) -> list[RankedGroup]:
        """The process groups with measured calls; the longest waiting for a straggler first."""
        return self.cache.get_or_compute(
            ("performance", attempt.key),
            lambda: rank_groups(self.shared.performance.get_job(attempt)),
        )

    def choose_attempt(self, job: str | None, ranks: Sequence[int]) -> Attempt:
        """The latest attempt of the job, which must have all of ``ranks``. Without a name, there
        must be only one job, or only one that is not finished. Raises Problem.
        """
        if job is not None:
            attempt = self.find_attempts(job)[0]  # the worlds that run beside the job come later
        else:
            latest = self.list_latest_attempts()
            candidates = [attempt for attempt in latest if not attempt.is_finished] or latest
            if len(candidates) != 1:
                names = ", ".join(attempt.job for attempt in candidates)
                detail = f"name one of these jobs: {names}" if names else "no job has reported yet"
                raise Problem(422, detail)
            [attempt] = candidates
        if unknown := sorted(set(ranks) - attempt.processes.keys()):
            known, missing = format_ranks(attempt.processes), format_ranks(unknown)
            detail = f"job {attempt.job!r} has no rank {missing}; it has {known}"
            raise Problem(404, detail, ranks=unknown[:100])
        return attempt

    def find_incidents(
        self, job: str | None, status: str | None, rank: int | None
    ) -> Sequence[IncidentRecord]:
        """The incidents of the job, with the status, about the rank; the newest first."""
        records = self.shared.incidents.records
        matching = [records[incident_id] for incident_id in sorted(records, reverse=True)]
        if job is not None:
            jobs = {job, *(attempt.job for attempt in self.shared.fleet.list_family(job))}
            matching = [record for record in matching if record.incident.job in jobs]
        if status is not None:
            matching = [record for record in matching if record.incident.status == status]
        if rank is not None:
            matching = [record for record in matching if rank in record.incident.involved_ranks]
        return matching

    def get_incident(self, id: str) -> IncidentRecord:
        """Raises Problem if the id is unknown."""
        record = self.shared.incidents.records.get(id)
        if record is None:
            raise Problem(404, f"unknown incident {id!r}; /incidents lists all known ones")
        return record


async def _get_state(request: Request) -> AppState:
    state: AppState = request.app.state.hangwatch
    return state


# The parameter of routes that is the state of their application.
State = Annotated[AppState, Depends(_get_state)]
