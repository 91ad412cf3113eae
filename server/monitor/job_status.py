"""The status of a job without an open incident, as text for pages, the API and the terminal."""

from __future__ import annotations

import itertools

from hangwatch.diagnosis import UnexplainedWait, messages
from hangwatch.diagnosis.losses import describe_losses
from hangwatch.model.ranks import RankState
from hangwatch.report.text import format_age, name_ranks, truncate_end
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import JobView
from .rank_states import MAX_RANKS_SHOWN

MAX_PROCESSES_SEARCHED = 64  # for a setting that all processes of a job have in common


def describe_job_status(
    attempt: Attempt, job: JobView, stall_after_s: float, wait: UnexplainedWait | None, now: float
) -> tuple[str, str]:
    """The status of a job without an open incident and how it is known, and advice; the advice is
    empty for a healthy job. ``wait`` is one that no verdict explains.
    """
    status, advice = _describe_job(attempt, job, stall_after_s, wait, now)
    notes = describe_losses(attempt, attempt.lossy_ranks | attempt.incomplete_ranks)
    if not notes or attempt.is_finished:
        return status, advice
    return f"{status} {messages.join_notes(notes)}", advice


def _describe_job(
    attempt: Attempt, job: JobView, stall_after_s: float, wait: UnexplainedWait | None, now: float
) -> tuple[str, str]:
    world, reported = attempt.rank_count, len(attempt.processes)
    dead = job.states.get(RankState.DEAD, 0)
    if job.state == "failed":
        return (
            f"Ended: {dead} of {reported} processes did not exit with status 0.",
            "An incident shows which failed first, and why. Without one, they had finished their"
            " work when they were ended.",
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
    if wait is not None:
        return _describe_unexplained_wait(wait, now)
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
    facts = [f"{reported} of {world} ranks report, the last {format_age(job.last_seen_s)} ago"]
    if job.steps_per_s is not None:
        facts.append(f"{format_pace(job.steps_per_s)} (at step {job.step})")
    facts.append("all calls compared so far agree")
    silent_s = _measure_silence(attempt, stall_after_s)
    if silent_s:
        return _describe_silence(attempt, silent_s, facts)
    return (
        f"All is well: {'; '.join(facts)}, and no rank waits longer than {stall_after_s:g} s.",
        "",
    )


def _describe_unexplained_wait(wait: UnexplainedWait, now: float) -> tuple[str, str]:
    count = wait.rank_count
    have_waited = f"{count} ranks have waited" if count > 1 else "1 rank has waited"
    ranks = ",".join(str(rank) for rank in wait.ranks_to_dump)
    return (
        (
            f"Unclear: {have_waited} for up to {format_age(now - wait.began_at)},"
            f" {wait.description}. Nothing is concluded: {wait.reason}."
        ),
        f"`hangwatch dump {ranks}` shows the current stacks.",
    )


def _measure_silence(attempt: Attempt, stall_after_s: float) -> float:
    """For how many seconds no rank has made a call; 0 if that is less than ``stall_after_s``."""
    silent_s = attempt.last_seen_at - attempt.newest_call_at
    return silent_s if attempt.newest_call_at and silent_s >= stall_after_s else 0.0


def _describe_silence(attempt: Attempt, silent_s: float, facts: list[str]) -> tuple[str, str]:
    """The status and advice if no rank makes calls and none is known to wait."""
    # The setting is the same for the whole job, so few of up to 100,000 processes are searched.
    some = itertools.islice(attempt.processes.values(), MAX_PROCESSES_SEARCHED)
    setting = next((p.device_setting for p in some if p.device_setting), "")
    if not setting:
        return (
            (
                f"Quiet: no rank has made a call for {format_age(silent_s)}, and none is known to"
                f" wait; {'; '.join(facts)}."
            ),
            "`hangwatch dump RANKS` shows what they do.",
        )
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
