"""What the API and the pages show of a job, its ranks and its groups. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hangwatch.diagnosis.graph.thread_waits import is_process_waiting
from hangwatch.model.calls import StreamKind
from hangwatch.model.device import DeviceProgress
from hangwatch.model.groups import GroupKey
from hangwatch.model.incidents import Incident
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import KINDS
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Lifecycle, RankState
from hangwatch.model.threads import Frame
from hangwatch.report import terminal
from hangwatch.report.documents import build_site_document
from hangwatch.stacks.frames import is_library
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.job_views import (
    GroupMemberView,
    GroupView,
    JobState,
    JobView,
    RankDeviceView,
    RankGroupView,
    RankView,
)
from ..incidents.matching import is_hang
from ..incidents.records import IncidentRecord

WAITING_AFTER_S = 1.0  # in an unfinished call
LOST_AFTER_S = Limits().lost_after_s
MAX_RANKS_SHOWN = 1 << 20  # whatever world size was reported


def list_expected_ranks(attempt: Attempt) -> list[int]:
    """Every rank of the world, and others that have reported, ascending."""
    world = range(min(attempt.world_size, MAX_RANKS_SHOWN))
    return [*world, *sorted(rank for rank in attempt.processes if rank not in world)]


def compute_states(
    attempt: Attempt,
    cases: Iterable[IncidentRecord],
    now: float,
    lost_after_s: float = LOST_AFTER_S,
) -> dict[int, RankState]:
    """The state of each expected rank. ``cases`` are the attempt's open incidents; a rank is lost
    after ``lost_after_s`` without a heartbeat.
    """
    states = dict.fromkeys(list_expected_ranks(attempt), RankState.MISSING)
    return states | _compute_reported_states(attempt, cases, now, lost_after_s)


def count_states(
    attempt: Attempt,
    cases: Iterable[IncidentRecord],
    now: float,
    lost_after_s: float = LOST_AFTER_S,
) -> Counter[RankState]:
    """How many of the expected ranks are in each state. Takes time only for reported ranks."""
    counts = Counter(_compute_reported_states(attempt, cases, now, lost_after_s).values())
    reported = sum(rank < attempt.world_size for rank in attempt.processes)
    missing = min(attempt.world_size, MAX_RANKS_SHOWN) - reported
    if missing:
        counts[RankState.MISSING] = missing
    return counts


def _compute_reported_states(
    attempt: Attempt, cases: Iterable[IncidentRecord], now: float, lost_after_s: float
) -> dict[int, RankState]:
    stalled: set[int] = set()
    slow: set[int] = set()
    frozen: set[int] = set()
    for case in cases:
        incident = case.incident
        culprit_state = KINDS[incident.kind].culprit_state
        if culprit_state is RankState.FROZEN:
            frozen.update(incident.culprits)
        if incident.severity is Severity.ALERT and is_hang(incident):
            stalled.update(incident.culprits, incident.waiting)
        elif culprit_state is RankState.SLOW:
            slow.update(incident.culprits)
    states_by_incident = {
        **dict.fromkeys(slow, RankState.SLOW),
        **dict.fromkeys(stalled, RankState.STALLED),
        **dict.fromkeys(frozen, RankState.FROZEN),
    }
    return {
        rank: _compute_state(process, states_by_incident.get(rank), now, lost_after_s)
        for rank, process in attempt.processes.items()
    }


def _compute_state(
    process: Process, state_by_incident: RankState | None, now: float, lost_after_s: float
) -> RankState:
    if process.exit is not None:
        exited_cleanly = process.exit.exit_status == 0 or process.lifecycle >= Lifecycle.DESTROYED
        return (
            RankState.EXITED if exited_cleanly and not process.exit.has_failed else RankState.DEAD
        )
    if now - process.reports.agent_seen_at > lost_after_s:
        return RankState.LOST
    if process.freeze_reason(now) is not None:
        return RankState.FROZEN
    if state_by_incident is not None:
        return state_by_incident
    if process.lifecycle < Lifecycle.INITIALISED:
        return RankState.STARTING
    waiting_s = compute_waiting_s(process, now) or 0.0
    return RankState.WAITING if waiting_s > WAITING_AFTER_S else RankState.RUNNING


def compute_waiting_s(process: Process, now: float) -> float | None:
    """Seconds since the process entered its oldest unfinished call; None if all are finished, or if
    it is busy with other work and no call blocks it.
    """
    if process.exit is not None or process.reports.last_progress_at > process.reports.last_seen_at:
        return None
    oldest_at: float | None = None
    for stream in process.streams.values():  # of thousands of ranks, four times a second
        pending_at = stream.pending_at
        if pending_at is not None and (oldest_at is None or pending_at < oldest_at):
            oldest_at = pending_at
    if oldest_at is None:
        return None
    if _may_work_on(process) and is_process_waiting(process) is False:
        return None
    return max(0.0, now - oldest_at)


def _may_work_on(process: Process) -> bool:
    """Whether its unfinished calls are known, and none is known to block it. An ``isend`` stays
    unfinished unless the program waits for it.
    """
    pending = [stream for stream in process.streams.values() if stream.pending_at is not None]
    oldest = [stream.calls.get(stream.first_unfinished) for stream in pending]
    return all(call is not None and call.blocking is not True for call in oldest)


def count_members(attempt: Attempt, number: int) -> int:
    """How many members the groups of a rank have together."""
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
    """``members``: include the ranks of each of its groups."""
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
        groups=[
            RankGroupView(
                name=s.group.name,
                desc=s.group.desc,
                ranks=s.group.ranks if members else (),
                entered=s.entered,
                completed=s.completed,
                op=s.op,
                device=_describe_device(s.device, now),
            )
            for s in process.streams.values()
            if s.kind is StreamKind.COLLECTIVE
        ],
    )


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
        ranks=first.group.ranks,
        members=[
            GroupMemberView(rank=r, entered=s.entered, completed=s.completed, op=s.op)
            for r, s in sorted(members.items())
        ],
    )


def list_groups(attempt: Attempt, rank: int | None = None) -> list[GroupKey]:
    """All process groups, or those of one rank."""
    kinds = (
        (key, next(iter(members.values())).kind)
        for key, members in attempt.streams_by_group.items()
    )
    return [
        key
        for key, kind in kinds
        if kind is StreamKind.COLLECTIVE and (rank is None or rank in key[2])
    ]


def describe_job(
    attempt: Attempt, counts: Counter[RankState], cases: Iterable[IncidentRecord], now: float
) -> JobView:
    """``counts`` are the numbers of its ranks by state."""
    open_cases = list(cases)
    return JobView(
        job=attempt.job,
        attempt=attempt.number,
        state=_compute_job_state(attempt, counts, open_cases),
        world_size=attempt.world_size,
        heard_of=len(attempt.processes),
        hosts=sorted({p.host for p in attempt.processes.values()}),
        states=dict(counts),
        open_incidents=len(open_cases),
        step=min((p.step for p in attempt.processes.values() if p.step is not None), default=None),
        age_s=round(max(0.0, now - attempt.opened_at), 3),
        last_seen_s=round(max(0.0, now - attempt.last_seen_at), 3),
    )


def _compute_job_state(
    attempt: Attempt, counts: Counter[RankState], cases: Iterable[IncidentRecord]
) -> JobState:
    if attempt.is_finished:
        return "failed" if counts[RankState.DEAD] else "finished"
    if any(is_hang(c.incident) and c.incident.severity is Severity.ALERT for c in cases):
        return "stalled"
    has_live_ranks = any(
        counts[state] for state in (RankState.RUNNING, RankState.WAITING, RankState.STARTING)
    )
    if counts[RankState.LOST] and not has_live_ranks:
        return "lost"
    return "starting" if counts[RankState.STARTING] and not counts[RankState.RUNNING] else "running"


def sort_by_severity(cases: Iterable[IncidentRecord]) -> tuple[Incident, ...]:
    """Alerts first, then the oldest first."""
    incidents = (case.incident for case in cases)
    return tuple(sorted(incidents, key=lambda i: (i.severity is Severity.WARNING, i.opened_at)))


def format_verdict(incident: Incident) -> str:
    """The verdict with the culprit's source line."""
    return terminal.format_summary(
        {
            "kind": incident.kind.value,
            "summary": incident.summary,
            "culprits": incident.culprits,
            "site": build_site_document(incident.site),
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
