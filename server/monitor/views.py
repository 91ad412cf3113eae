"""Views of a job, its ranks and its groups for the API and the pages. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hangwatch.diagnosis.graph.progress import is_process_waiting
from hangwatch.diagnosis.messages import join_notes
from hangwatch.diagnosis.unexplained import describe_losses
from hangwatch.model.calls import Loss, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import KINDS
from hangwatch.model.ranks import Frame, Lifecycle, RankState
from hangwatch.report import terminal
from hangwatch.report.documents import build_optional_document
from hangwatch.report.job_status import JobFacts, UnexplainedWait, format_job_status
from hangwatch.stacks.frames import find_user_frame
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..core import job_views
from ..incidents.registry import IncidentRecord, is_hang

MAX_RANKS_SHOWN = 1 << 20  # the limit if a larger world size was reported
MAX_ABSENT_RUNS = 20  # runs of consecutive ranks
MAX_PROCESSES_SEARCHED = 64  # enough to find a setting that all processes of a job have in common
WAITING_AFTER_S = 1.0  # a rank waits if a call is unfinished for so long


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
) -> job_views.RankView:
    """A rank and its position in each of its groups, with the ranks of these only if ``members``."""
    process = attempt.processes.get(number)
    if process is None:
        return job_views.RankView(job=attempt.job, attempt=attempt.number, rank=number, state=state)
    groups = []
    for stream in process.streams.values():
        if stream.kind is not StreamKind.COLLECTIVE:
            continue
        device = None
        if stream.device is not None:
            device = job_views.RankDeviceView(**stream.device.list_counters(now))
        group = job_views.RankGroupView(
            name=stream.group.name,
            desc=stream.group.desc,
            ranks=stream.group.known_ranks if members else (),
            outside=stream.group.outside_labels if members else (),
            entered=stream.entered,
            completed=stream.completed,
            op=stream.op,
            device=device,
            incomplete=_describe_loss(stream.loss),
        )
        groups.append(group)
    waiting_s = compute_waiting_s(process, now)
    return job_views.RankView(
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
        groups=groups,
    )


def _describe_loss(loss: Loss | None) -> job_views.LossView | None:
    if loss is None:
        return None
    return job_views.LossView(since=loss.from_seq, because=loss.reason.description)


def describe_group(
    attempt: Attempt, group: Group, streams: Mapping[int, CallStream]
) -> job_views.GroupView:
    """A process group with the positions of its members."""
    return job_views.GroupView(
        job=attempt.job,
        attempt=attempt.number,
        name=group.name,
        desc=group.desc,
        backend=group.backend,
        generation=group.generation,
        ranks=group.known_ranks,
        outside=group.outside_labels,
        members=[
            job_views.GroupMemberView(
                rank=rank,
                entered=stream.entered,
                completed=stream.completed,
                op=stream.op,
                incomplete=_describe_loss(stream.loss),
            )
            for rank, stream in sorted(streams.items())
        ],
    )


def list_groups(
    attempt: Attempt, rank: int | None = None
) -> list[tuple[Group, dict[int, CallStream]]]:
    """All process groups, or those of one rank, each with its streams by member."""
    groups = []
    for streams in attempt.streams_by_group.values():
        first = next(iter(streams.values()))
        if first.kind is StreamKind.COLLECTIVE and (rank is None or rank in first.group.ranks):
            groups.append((first.group, streams))
    return groups


def describe_job(
    attempt: Attempt, counts: Counter[RankState], records: Sequence[IncidentRecord], now: float
) -> job_views.JobView:
    """A job with the number of its ranks in each state, ``counts``, and its open ``records``."""
    is_starting = counts[RankState.STARTING] > 0
    is_running = counts[RankState.RUNNING] > 0
    has_live_ranks = is_starting or is_running or counts[RankState.WAITING] > 0
    state: job_views.JobState
    if attempt.is_finished:
        state = "failed" if counts[RankState.DEAD] else "finished"
    elif any(is_hang(record.incident) and record.incident.is_alert for record in records):
        state = "stalled"
    elif counts[RankState.LOST] and not has_live_ranks:
        state = "lost"
    else:
        state = "starting" if is_starting and not is_running else "running"
    steps = [p.step for p in attempt.processes.values() if p.step is not None]
    return job_views.JobView(
        job=attempt.job,
        attempt=attempt.number,
        state=state,
        world_size=attempt.world_size,
        reported_ranks=len(attempt.processes),
        hosts=sorted({p.host for p in attempt.processes.values()}),
        states=dict(counts),
        open_incidents=len(records),
        step=min(steps, default=None),
        age_s=round(max(0.0, now - attempt.opened_at), 3),
        last_seen_s=round(max(0.0, now - attempt.last_seen_at), 3),
    )


def sort_by_severity(records: Iterable[IncidentRecord]) -> tuple[Incident, ...]:
    """Alerts first, then the oldest first."""
    incidents = (record.incident for record in records)
    return tuple(sorted(incidents, key=lambda i: (not i.is_alert, i.opened_at)))


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
    culprits = set(incident.culprits)
    for stack in incident.stacks:
        frame = find_user_frame(stack.frames)
        if frame is None or culprits.isdisjoint(stack.ranks):
            continue
        if site is None or (frame.file, frame.line) == (site.file, site.line):
            return frame
    if site is None:
        return None
    return Frame(function=site.function, file=site.file, line=site.line)


def describe_job_status(
    attempt: Attempt,
    job: job_views.JobView,
    stall_after_s: float,
    wait: UnexplainedWait | None,
    now: float,
    *,
    pause_note: str = "",
) -> tuple[str, str]:
    """The status of a job without an open incident and how it is known, and advice; the advice is
    empty for a healthy job. ``wait`` is one that no verdict explains, ``pause_note`` why a job in
    which no rank makes calls is not suspected.
    """
    expected = attempt.rank_count
    reported = len(attempt.processes)
    silent_s = attempt.last_seen_at - attempt.newest_call_at
    is_silent = attempt.newest_call_at > 0.0 and silent_s >= stall_after_s
    # The first ranks that have not reported: some runs, and the start of one more.
    absent: list[int] = []
    remaining_runs = MAX_ABSENT_RUNS
    world_size = min(attempt.world_size, MAX_RANKS_SHOWN) if reported < expected else 0
    for rank in range(world_size):
        if rank not in attempt.processes:
            remaining_runs -= not absent or absent[-1] != rank - 1
            absent.append(rank)
            if remaining_runs < 0:
                break
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
        absent=absent,
        last_seen_s=job.last_seen_s,
        step=job.step,
        steps_per_s=job.steps_per_s,
        stall_after_s=stall_after_s,
        wait=wait,
        waited_s=0.0 if wait is None else now - wait.began_at,
        silent_s=silent_s if is_silent else None,
        pause_note=pause_note,
        device_setting=next((p.device_setting for p in searched if p.device_setting), ""),
    )
    status, advice = format_job_status(facts)
    notes = describe_losses(attempt, attempt.lossy_ranks | attempt.incomplete_ranks)
    if not notes or attempt.is_finished:
        return status, advice
    return f"{status} {join_notes(notes)}", advice


def list_expected_ranks(attempt: Attempt) -> list[int]:
    """Every rank of the world, and others that have reported, ascending."""
    world = range(min(attempt.world_size, MAX_RANKS_SHOWN))
    return [*world, *sorted(rank for rank in attempt.processes if rank not in world)]


def compute_states(
    attempt: Attempt,
    records: Iterable[IncidentRecord],
    now: float,
    lost_after_s: float,
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
        if incident.is_alert and is_hang(incident):
            stalled |= dict.fromkeys(incident.involved_ranks, RankState.STALLED)
        elif culprit_state is RankState.SLOW:
            slow |= dict.fromkeys(incident.culprits, culprit_state)
    states = slow | stalled | frozen
    for rank in attempt.unable_ranks:
        process = attempt.processes[rank]
        if process.exit is not None:
            has_shut_down = process.lifecycle >= Lifecycle.DESTROYED
            is_clean = process.exit.exit_status == 0 or has_shut_down
            is_exited = is_clean and not process.exit.has_failed
            states[rank] = RankState.EXITED if is_exited else RankState.DEAD
        elif process.freeze_reason(now) is not None:
            states[rank] = RankState.FROZEN
    states.update(dict.fromkeys(attempt.list_unreported(now - lost_after_s), RankState.LOST))
    shown = dict.fromkeys(list_expected_ranks(attempt), RankState.MISSING)
    for rank, process in attempt.processes.items():
        if rank in states:
            shown[rank] = states[rank]
        elif process.lifecycle < Lifecycle.INITIALISED:
            shown[rank] = RankState.STARTING
        else:
            is_waiting = (compute_waiting_s(process, now) or 0.0) > WAITING_AFTER_S
            shown[rank] = RankState.WAITING if is_waiting else RankState.RUNNING
    return shown


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
    # All unfinished calls are known, and none is known to block the process: an ``isend`` stays
    # unfinished unless the program waits for it.
    may_continue = True
    for stream in unfinished:  # this loop runs for thousands of ranks, four times a second
        pending_at = stream.pending_at
        if pending_at is None:
            continue
        if oldest_at is None or pending_at < oldest_at:
            oldest_at = pending_at
        if may_continue:
            call = stream.calls.get(stream.first_unfinished)
            may_continue = call is not None and call.blocking is not True
    if oldest_at is None:
        return None
    if may_continue:
        if is_process_waiting(process) is False:
            return None
        oldest_at = max(oldest_at, process.newest_call_at)  # the process continued until then
    return max(0.0, now - oldest_at)
