"""The status of a job without an open incident, as text for pages, the API and the terminal."""

from __future__ import annotations

import itertools

from hangwatch.model.ranks import RankState
from hangwatch.report.text import format_age, name_ranks, truncate_end
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import JobView
from .views import MAX_RANKS_SHOWN

MAX_PROCESSES_SEARCHED = 64  # for a setting that all processes of a job have in common


def describe_job_status(attempt: Attempt, job: JobView, stall_after_s: float) -> tuple[str, str]:
    """The status of a job without an open incident and how it is known, and advice; the advice is
    empty for a healthy job.
    """
    world, reported = attempt.rank_count, len(attempt.processes)
    dead = job.states.get(RankState.DEAD, 0)
    if job.state == "failed":
        return (
            f"Ended: {dead} of {reported} processes failed.",
            "The job's incidents show which failed first, and why.",
        )
    if job.state == "finished":
        return f"Finished: all {reported} processes that reported have exited normally.", ""
    if job.state == "lost":
        return (
            (
                "Unknown: no node agent of this job has reported for"
                f" {format_age(job.last_seen_s)}. This is the state at that time."
            ),
            (
                "Check that the nodes and the network between them and this server work:"
                " `hangwatch doctor` on a node reports what it can reach."
            ),
        )
    if reported < world:
        absent = _find_first_absent(attempt, 20)
        return (
            (
                f"Starting: {reported} of {world} ranks have reported so far; no rank has waited"
                f" for the others longer than {stall_after_s:g} s."
            ),
            (
                f"Not reported yet: {truncate_end(name_ranks(absent), 80)}. If this does not"
                " change, `hangwatch doctor` on their nodes reports why."
            ),
        )
    if job.state == "starting":
        return (
            (
                f"Starting: all {world} ranks have reported, and not all have set up their process"
                " group."
            ),
            "",
        )
    lost = job.states.get(RankState.LOST, 0)
    if lost:
        return (
            f"Partly unknown: {lost} of {world} ranks do not report any more, the others continue.",
            (
                "Their host or its network has failed, or its node agent was killed: `hangwatch"
                " doctor` there reports what is wrong."
            ),
        )
    if unknown := _describe_uncounted_devices(attempt, stall_after_s):
        return unknown
    facts = [f"{reported} of {world} ranks report, the last {format_age(job.last_seen_s)} ago"]
    if job.steps_per_s is not None:
        facts.append(f"{format_pace(job.steps_per_s)} (at step {job.step})")
    facts.append("all calls compared so far agree")
    return (
        f"All is well: {'; '.join(facts)}, and no rank waits longer than {stall_after_s:g} s.",
        "",
    )


def _describe_uncounted_devices(attempt: Attempt, stall_after_s: float) -> tuple[str, str] | None:
    """The status and advice if no rank makes calls and nothing is known of their devices; None if
    some rank does, or the backend reports how far the devices have come.
    """
    processes = attempt.processes.values()
    # The setting is the same for the whole job, so few of up to 100,000 processes are searched.
    some = itertools.islice(processes, MAX_PROCESSES_SEARCHED)
    setting = next((p.device_setting for p in some if p.device_setting), "")
    if not setting:
        return None
    newest_call_at = 0.0
    for process in processes:
        called_at = max(process.newest_call_at, process.reports.last_progress_at)
        newest_call_at = max(newest_call_at, called_at)
        if attempt.last_seen_at - newest_call_at < stall_after_s:
            return None
    silent_s = attempt.last_seen_at - newest_call_at
    return (
        (
            f"Unknown: no rank has made a call for {format_age(silent_s)}. They may wait for their"
            f" devices, and torch counts how far these have come only with {setting}."
        ),
        f"Set {setting} in the job's environment: then hangwatch can name a device that is stuck.",
    )


def _find_first_absent(attempt: Attempt, remaining_runs: int) -> list[int]:
    """The first ranks that have not reported: ``remaining_runs`` runs of consecutive ranks and the
    start of one more. There may be 100,000, too many to show.
    """
    absent: list[int] = []
    for rank in range(min(attempt.world_size, MAX_RANKS_SHOWN)):
        if rank not in attempt.processes:
            remaining_runs -= not absent or absent[-1] != rank - 1
            absent.append(rank)
            if remaining_runs < 0:
                break
    return absent


def format_pace(steps_per_s: float) -> str:
    """
    >>> format_pace(3.14159), format_pace(0.021)
    ('3.1 steps per second', '1.3 steps per minute')
    """
    return (
        f"{steps_per_s:.1f} steps per second"
        if steps_per_s >= 0.1 or not steps_per_s
        else f"{60 * steps_per_s:.1f} steps per minute"
    )
