"""What the API and the pages show of a job, its ranks and its groups. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hangwatch.model.calls import StreamKind
from hangwatch.model.device import DeviceProgress
from hangwatch.model.groups import GroupKey
from hangwatch.model.incidents import Incident
from hangwatch.model.kind_spec import Severity
from hangwatch.model.losses import Loss
from hangwatch.model.ranks import RankState
from hangwatch.model.threads import Frame
from hangwatch.report import terminal
from hangwatch.report.documents import build_site_document
from hangwatch.stacks.frames import is_library
from hangwatch.tracking.attempt import Attempt

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
from ..incidents.matching import is_hang
from ..incidents.records import IncidentRecord
from .rank_states import compute_waiting_s


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
