"""Views of a job, its ranks and its groups for the API and the pages, and the status of a job without
an open incident as text. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from hangwatch.diagnosis import UnexplainedWait
from hangwatch.diagnosis.graph.progress import is_process_waiting
from hangwatch.diagnosis.messages import join_notes
from hangwatch.diagnosis.unexplained import describe_losses
from hangwatch.model.calls import Loss, StreamKind
from hangwatch.model.groups import GroupKey
from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import KINDS, Severity
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame, Lifecycle, RankState
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.report import terminal
from hangwatch.report.documents import build_optional_document
from hangwatch.report.text import format_age, name_ranks, truncate_end
from hangwatch.stacks.frames import is_library
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.job_views import (
    GroupMemberView,
    GroupView,
    JobState,
    JobView,
    LossView,
    RankDeviceView,
    RankGroupView,
    RankView,
)
from ..incidents.records import IncidentRecord
from ..incidents.registry import is_hang

MAX_RANKS_SHOWN = 1 << 20  # the limit if a larger world size was reported
MAX_ABSENT_RUNS = 20  # runs of consecutive ranks
MAX_PROCESSES_SEARCHED = 64  # enough to find a setting that all processes of a job have in common
WAITING_AFTER_S = 1.0  # a rank waits if a call is unfinished for so long
LOST_AFTER_S = Limits().lost_after_s


def count_members(attempt: Attempt, number: int) -> int:
    """The number of members that the groups of a rank have together."""
    process = attempt.processes.get(number)
    if process is None:
        return 0
    return sum(
        len(stream.group.ranks)
        for stream in process.streams.values()
        if stream.kind is StreamKind.COLLECTIVE
    )


def describe_rank(
    attempt: Attempt, number: int, state: RankState, now: float, members: bool = True
) -> RankView:
    """A rank and its position in each of its groups, with the ranks of these only if ``members``."""
    process = attempt.processes.get(number)
    if process is None:
        return RankView(job=attempt.job, attempt=attempt.number, rank=number, state=state)
    waiting_s = compute_waiting_s(process, now)
    return RankView(
        job=attempt.job,
        attempt=attempt.number,
        rank=number,
        host=process.host,
        pid=process.identity.pid,
        local_rank=process.identity.local_rank,
        state=state,
        phase=None if process.phase is None else process.phase.name,
        step=process.step,
        last_seen_s=round(max(0.0, now - process.reports.agent_seen_at), 3),
        waiting_s=None if waiting_s is None else round(waiting_s, 3),
        unrecorded=process.recorder.dropped,
        groups=[
            RankGroupView(
                name=s.group.name,
                desc=s.group.desc,
                ranks=s.group.known_ranks if members else (),
                outside=[m.label for m in s.group.outside_members] if members else (),
                entered=s.entered,
                completed=s.completed,
                op=s.op,
                device=_describe_device(s.device, now),
                incomplete=_describe_loss(s.loss),
            )
            for s in process.streams.values()
            if s.kind is StreamKind.COLLECTIVE
        ],
    )


def _describe_loss(loss: Loss | None) -> LossView | None:
    return None if loss is None else LossView(since=loss.from_seq, because=loss.reason.description)


def _describe_device(device: DeviceProgress | None, now: float) -> RankDeviceView | None:
    if device is None:
        return None
    return RankDeviceView(
        enqueued=device.enqueued,
        started=device.started,
        completed=device.completed,
        source=device.source,
        age_s=round(max(0.0, now - device.read_at), 3),
    )


def describe_group(attempt: Attempt, key: GroupKey) -> GroupView:
    """A process group with the positions of its members."""
    members = attempt.streams_by_group[key]
    first = next(iter(members.values()))
    return GroupView(
        job=attempt.job,
        attempt=attempt.number,
        name=first.group.name,
        desc=first.group.desc,
        backend=first.group.backend,
        generation=first.group.generation,
        ranks=first.group.known_ranks,
        outside=[member.label for member in first.group.outside_members],
        members=[
            GroupMemberView(
                rank=r,
                entered=s.entered,
                completed=s.completed,
                op=s.op,
                incomplete=_describe_loss(s.loss),
            )
            for r, s in sorted(members.items())
        ],
    )


def list_groups(attempt: Attempt, rank: int | None = None) -> list[GroupKey]:
    """All process groups, or those of one rank."""
    groups = (
        (key, next(iter(members.values()))) for key, members in attempt.streams_by_group.items()
    )
    return [
        key
        for key, first in groups
        if first.kind is StreamKind.COLLECTIVE and (rank is None or rank in first.group.ranks)
    ]


def describe_job(
    attempt: Attempt, counts: Counter[RankState], records: Iterable[IncidentRecord], now: float
) -> JobView:
    """A job with the number of its ranks in each state, ``counts``."""
    open_records = list(records)
    return JobView(
        job=attempt.job,
        attempt=attempt.number,
        state=_compute_job_state(attempt, counts, open_records),
        world_size=attempt.world_size,
        reported_ranks=len(attempt.processes),
        hosts=sorted({p.host for p in attempt.processes.values()}),
        states=dict(counts),
        open_incidents=len(open_records),
        step=min((p.step for p in attempt.processes.values() if p.step is not None), default=None),
        age_s=round(max(0.0, now - attempt.opened_at), 3),
        last_seen_s=round(max(0.0, now - attempt.last_seen_at), 3),
    )


def _compute_job_state(
    attempt: Attempt, counts: Counter[RankState], records: Iterable[IncidentRecord]
) -> JobState:
    if attempt.is_finished:
        return "failed" if counts[RankState.DEAD] else "finished"
    if any(
        is_hang(record.incident) and record.incident.severity is Severity.ALERT
        for record in records
    ):
        return "stalled"
    has_live_ranks = any(
        counts[state] for state in (RankState.RUNNING, RankState.WAITING, RankState.STARTING)
    )
    if counts[RankState.LOST] and not has_live_ranks:
        return "lost"
    return "starting" if counts[RankState.STARTING] and not counts[RankState.RUNNING] else "running"


def sort_by_severity(records: Iterable[IncidentRecord]) -> tuple[Incident, ...]:
    """Alerts first, then the oldest first."""
    incidents = (record.incident for record in records)
    return tuple(sorted(incidents, key=lambda i: (i.severity is Severity.WARNING, i.opened_at)))


def format_verdict(incident: Incident) -> str:
    """The verdict with the culprit's source line."""
    return terminal.format_summary(
        {
            "kind": incident.kind.value,
            "summary": incident.summary,
            "culprits": incident.culprits,
            "site": build_optional_document(incident.site),
        }
    )


def find_culprit_frame(incident: Incident) -> Frame | None:
    """The culprit's innermost frame outside libraries, with the text of its line if a stack has it;
    else the site of the incident without the text.
    """
    site = incident.site
    for stack in incident.stacks:
        if not set(stack.ranks) & set(incident.culprits):
            continue
        frame = next((frame for frame in stack.frames if not is_library(frame.file)), None)
        if frame is None:
            continue
        if site is None or (frame.file, frame.line) == (site.file, site.line):
            return Frame(function=frame.function, file=frame.file, line=frame.line, text=frame.text)
    if site is None:
        return None
    return Frame(function=site.function, file=site.file, line=site.line)


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
    return f"{status} {join_notes(notes)}", advice


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
        absent = _find_first_absent(attempt)
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
    silent_s = attempt.last_seen_at - attempt.newest_call_at
    if attempt.newest_call_at and silent_s and silent_s >= stall_after_s:
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


def _find_first_absent(attempt: Attempt) -> list[int]:
    """The first ranks that have not reported, of maybe 100,000: `MAX_ABSENT_RUNS` runs of consecutive
    ranks and the start of one more.
    """
    absent: list[int] = []
    remaining_runs = MAX_ABSENT_RUNS
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


def list_expected_ranks(attempt: Attempt) -> list[int]:
    """Every rank of the world, and others that have reported, ascending."""
    world = range(min(attempt.world_size, MAX_RANKS_SHOWN))
    return [*world, *sorted(rank for rank in attempt.processes if rank not in world)]


def compute_states(
    attempt: Attempt,
    records: Iterable[IncidentRecord],
    now: float,
    lost_after_s: float = LOST_AFTER_S,
) -> dict[int, RankState]:
    """The state of each expected rank. ``records`` are the attempt's open incidents; a rank is lost
    after ``lost_after_s`` without a heartbeat.
    """
    stalled: set[int] = set()
    slow: set[int] = set()
    frozen: set[int] = set()
    for record in records:
        incident = record.incident
        culprit_state = KINDS[incident.kind].culprit_state
        if culprit_state is RankState.FROZEN:
            frozen.update(incident.culprits)
        if incident.severity is Severity.ALERT and is_hang(incident):
            stalled.update(incident.culprits, incident.waiting)
        elif culprit_state is RankState.SLOW:
            slow.update(incident.culprits)
    states = {
        **dict.fromkeys(slow, RankState.SLOW),
        **dict.fromkeys(stalled, RankState.STALLED),
        **dict.fromkeys(frozen, RankState.FROZEN),
    }
    for rank in attempt.unable_ranks:
        state = _find_unable_state(attempt.processes[rank], now)
        if state is not None:
            states[rank] = state
    states.update(dict.fromkeys(attempt.list_unreported(now - lost_after_s), RankState.LOST))
    return dict.fromkeys(list_expected_ranks(attempt), RankState.MISSING) | {
        rank: states.get(rank) or _compute_usual_state(process, now)
        for rank, process in attempt.processes.items()
    }


def _find_unable_state(process: Process, now: float) -> RankState | None:
    """The state of a process that has exited or is frozen; None for others."""
    if process.exit is not None:
        exited_cleanly = process.exit.exit_status == 0 or process.lifecycle >= Lifecycle.DESTROYED
        return (
            RankState.EXITED if exited_cleanly and not process.exit.has_failed else RankState.DEAD
        )
    return RankState.FROZEN if process.freeze_reason(now) is not None else None


def _compute_usual_state(process: Process, now: float) -> RankState:
    if process.lifecycle < Lifecycle.INITIALISED:
        return RankState.STARTING
    waiting_s = compute_waiting_s(process, now) or 0.0
    return RankState.WAITING if waiting_s > WAITING_AFTER_S else RankState.RUNNING


def compute_waiting_s(process: Process, now: float) -> float | None:
    """Seconds since the process entered its oldest unfinished call, or its newest one if none is
    known to block it. None if all are finished, or if it is busy with other work and no call blocks
    it.
    """
    unfinished = process.open_calls.unfinished_streams
    if not unfinished or process.exit is not None:
        return None
    if process.reports.last_progress_at > process.reports.last_seen_at:
        return None
    oldest_at: float | None = None
    for stream in unfinished:  # this loop runs for thousands of ranks, four times a second
        pending_at = stream.pending_at
        if pending_at is not None and (oldest_at is None or pending_at < oldest_at):
            oldest_at = pending_at
    if oldest_at is None:
        return None
    if _is_free_to_continue(process):
        if is_process_waiting(process) is False:
            return None
        oldest_at = max(oldest_at, process.newest_call_at)  # the process continued until then
    return max(0.0, now - oldest_at)


def _is_free_to_continue(process: Process) -> bool:
    """Whether all unfinished calls of the process are known, and none is known to block it. An
    ``isend`` stays unfinished unless the program waits for it.
    """
    oldest = (
        stream.calls.get(stream.first_unfinished)
        for stream in process.open_calls.unfinished_streams
        if stream.pending_at is not None
    )
    return all(call is not None and call.blocking is not True for call in oldest)
