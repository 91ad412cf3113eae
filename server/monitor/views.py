"""Views of a job, its ranks and its groups for the API and the pages. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

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
from hangwatch.report.job_status import JobFacts, UnexplainedWait, format_job_status
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
from ..incidents.registry import IncidentRecord, is_hang

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
        unrecorded=process.dropped_records,
        groups=[
            RankGroupView(
                name=s.group.name,
                desc=s.group.desc,
                ranks=s.group.known_ranks if members else (),
                outside=s.group.outside_labels if members else (),
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
        outside=first.group.outside_labels,
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
    keys = []
    for key, members in attempt.streams_by_group.items():
        first = next(iter(members.values()))
        if first.kind is StreamKind.COLLECTIVE and (rank is None or rank in first.group.ranks):
            keys.append(key)
    return keys


def describe_job(
    attempt: Attempt, counts: Counter[RankState], records: Sequence[IncidentRecord], now: float
) -> JobView:
    """A job with the number of its ranks in each state, ``counts``, and its open ``records``."""
    return JobView(
        job=attempt.job,
        attempt=attempt.number,
        state=_compute_job_state(attempt, counts, records),
        world_size=attempt.world_size,
        reported_ranks=len(attempt.processes),
        hosts=sorted({p.host for p in attempt.processes.values()}),
        states=dict(counts),
        open_incidents=len(records),
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
    site, culprits = incident.site, set(incident.culprits)
    for stack in incident.stacks:
        frame = next((frame for frame in stack.frames if not is_library(frame.file)), None)
        if frame is None or culprits.isdisjoint(stack.ranks):
            continue
        if site is None or (frame.file, frame.line) == (site.file, site.line):
            return frame
    if site is None:
        return None
    return Frame(function=site.function, file=site.file, line=site.line)


def describe_job_status(
    attempt: Attempt, job: JobView, stall_after_s: float, wait: UnexplainedWait | None, now: float
) -> tuple[str, str]:
    """The status of a job without an open incident and how it is known, and advice; the advice is
    empty for a healthy job. ``wait`` is one that no verdict explains.
    """
    expected, reported = attempt.rank_count, len(attempt.processes)
    silent_s = attempt.last_seen_at - attempt.newest_call_at
    is_silent = attempt.newest_call_at and silent_s and silent_s >= stall_after_s
    # The setting is the same for the whole job, so few of up to 100,000 processes are searched.
    searched = itertools.islice(
        attempt.processes.values(), MAX_PROCESSES_SEARCHED if is_silent else 0
    )
    facts = JobFacts(
        state=job.state,
        expected=expected,
        reported=reported,
        dead=job.states.get(RankState.DEAD, 0),
        lost=job.states.get(RankState.LOST, 0),
        absent=_find_first_absent(attempt) if reported < expected else (),
        last_seen_s=job.last_seen_s,
        step=job.step,
        steps_per_s=job.steps_per_s,
        stall_after_s=stall_after_s,
        wait=wait,
        waited_s=0.0 if wait is None else now - wait.began_at,
        silent_s=silent_s if is_silent else None,
        device_setting=next((p.device_setting for p in searched if p.device_setting), ""),
    )
    status, advice = format_job_status(facts)
    notes = describe_losses(attempt, attempt.lossy_ranks | attempt.incomplete_ranks)
    if not notes or attempt.is_finished:
        return status, advice
    return f"{status} {join_notes(notes)}", advice


def _find_first_absent(attempt: Attempt) -> list[int]:
    """The first ranks that have not reported: `MAX_ABSENT_RUNS` runs, and the start of one more."""
    absent: list[int] = []
    remaining_runs = MAX_ABSENT_RUNS
    for rank in range(min(attempt.world_size, MAX_RANKS_SHOWN)):
        if rank not in attempt.processes:
            remaining_runs -= not absent or absent[-1] != rank - 1
            absent.append(rank)
            if remaining_runs < 0:
                break
    return absent


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
    slow: dict[int, RankState] = {}
    stalled: dict[int, RankState] = {}
    frozen: dict[int, RankState] = {}
    for record in records:
        incident = record.incident
        culprit_state = KINDS[incident.kind].culprit_state
        if culprit_state is RankState.FROZEN:
            frozen |= dict.fromkeys(incident.culprits, culprit_state)
        if incident.severity is Severity.ALERT and is_hang(incident):
            stalled |= dict.fromkeys((*incident.culprits, *incident.waiting), RankState.STALLED)
        elif culprit_state is RankState.SLOW:
            slow |= dict.fromkeys(incident.culprits, culprit_state)
    states = slow | stalled | frozen
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
    unfinished = process.unfinished_streams
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
        for stream in process.unfinished_streams
        if stream.pending_at is not None
    )
    return all(call is not None and call.blocking is not True for call in oldest)
