"""The status of a job without an open incident, and advice, as text. Pure, from facts about the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .text import format_age, name_ranks, truncate_end

FAILED_DIAGNOSIS = (
    "Unknown: the diagnosis of this job fails because of an error in hangwatch.",
    "The server's stderr has the error: please report it. `hangwatch dump RANKS` shows what the"
    " ranks do.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnexplainedWait:
    """The longest wait that no confirmed verdict covers.

    ``began_at`` is a time of the server's monotonic clock. ``rank_count`` ranks wait as long as
    `--stall-after`. ``description`` says who waits for whom and where the awaited ranks are, ``reason``
    why nothing is concluded. ``ranks_to_dump`` are the ranks whose stacks would show more.
    """

    began_at: float
    rank_count: int
    description: str
    reason: str
    ranks_to_dump: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the status of a job is made of. Counts are of ranks."""

    state: str
    expected: int
    reported: int
    dead: int = 0
    lost: int = 0
    absent: Sequence[int] = ()  # the first ranks that have not reported
    last_seen_s: float
    step: int | None = None
    steps_per_s: float | None = None
    stall_after_s: float
    wait: UnexplainedWait | None = None
    waited_s: float = 0.0  # since that wait began
    silent_s: float | None = None  # the time without calls, if it is longer than a stall
    pause_note: str = ""  # why the job is not suspected meanwhile
    # The setting with which torch would count how far devices have come; empty if it does.
    device_setting: str = ""


def format_job_status(job: JobFacts) -> tuple[str, str]:
    """The status and how it is known, and advice; the advice is empty for a healthy job."""
    if job.state == "failed":
        return (
            f"Ended: {job.dead} of {job.reported} processes did not exit with status 0.",
            "An incident shows which failed first, and why. Without one, they had finished their"
            " work when they were ended.",
        )
    if job.state == "finished":
        return f"Finished: all {job.reported} processes that reported have exited normally.", ""
    if job.state == "lost":
        return (
            f"Unknown: no node agent of this job has reported for {format_age(job.last_seen_s)}."
            " This is the state at that time.",
            "Check that the nodes and the network between them and this server work: `hangwatch"
            " doctor` on a node reports what it can reach.",
        )
    if job.wait is not None:
        wait = job.wait
        ranks = f"{wait.rank_count} ranks have" if wait.rank_count > 1 else "1 rank has"
        return (
            f"Unclear: {ranks} waited for up to {format_age(job.waited_s)}, {wait.description}."
            f" Nothing is concluded: {wait.reason}.",
            f"`hangwatch dump {','.join(map(str, wait.ranks_to_dump))}` shows the current stacks.",
        )
    if job.reported < job.expected:
        return (
            f"Starting: {job.reported} of {job.expected} ranks have reported so far; no rank has"
            f" waited for the others longer than {job.stall_after_s:g} s.",
            f"Not reported yet: {truncate_end(name_ranks(job.absent), 80)}. If this does not"
            " change, `hangwatch doctor` on their nodes reports why.",
        )
    if job.state == "starting":
        return (
            f"Starting: all {job.expected} ranks have reported, and not all have set up their"
            " process group.",
            "",
        )
    if job.lost:
        return (
            f"Partly unknown: {job.lost} of {job.expected} ranks do not report any more, the others"
            " continue.",
            "Their host or its network has failed, or its node agent was killed: `hangwatch"
            " doctor` there reports what is wrong.",
        )
    return _format_healthy_status(job)


def _format_healthy_status(job: JobFacts) -> tuple[str, str]:
    last_seen = format_age(job.last_seen_s)
    facts = [f"{job.reported} of {job.expected} ranks report, the last {last_seen} ago"]
    if job.steps_per_s is not None:
        pace = f"{job.steps_per_s:.1f} steps per second"
        if 0 < job.steps_per_s < 0.1:
            pace = f"{60 * job.steps_per_s:.1f} steps per minute"
        facts.append(f"{pace} (at step {job.step})")
    facts.append("all calls compared so far agree")
    if job.silent_s is None:
        waits_longer = f"no rank waits longer than {job.stall_after_s:g} s"
        return f"All is well: {'; '.join(facts)}, and {waits_longer}.", ""
    silence = f"no rank has made a call for {format_age(job.silent_s)}"
    setting = job.device_setting
    if job.pause_note or not setting:
        note = job.pause_note or "none is known to wait in one"
        return (
            f"Quiet: {silence}, and {note}; {'; '.join(facts)}.",
            "`hangwatch dump RANKS` shows what they do.",
        )
    return (
        f"Unknown: {silence}. They may wait for their devices, and torch counts how far these have"
        f" come only with {setting}.",
        f"Set {setting} in the job's environment: then hangwatch can name a device that is stuck.",
    )


def add_device_advice(advice: str, setting: str) -> str:
    """The advice of a verdict that might name a device if torch's ``setting`` were set."""
    return (
        f"{advice} torch does not count how far the devices have come: with {setting} in the job's"
        " environment, hangwatch can name a device that lags."
    )
