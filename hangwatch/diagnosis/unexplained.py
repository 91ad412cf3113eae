"""Waits that no verdict explains, and calls that are not completely recorded, on which no verdict is
based. Neither is a diagnosis, but a job that has some has a problem.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from operator import attrgetter

from hangwatch.model.calls import LossReason
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.verdicts import Verdict
from hangwatch.report.job_status import UnexplainedWait
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .context import DiagnosisContext, find_newest_sample
from .graph.edges import BlockedCall, get_op_name
from .messages import describe_position, describe_ranks, describe_ranks_with, join_notes

_MAX_AWAITED_SHOWN = 3
_MAX_NOTES = 4


@dataclass(slots=True, eq=False)
class _Wait:
    rank: int
    began_at: float
    stream: CallStream | None = None
    awaited: Collection[int] = ()
    is_recorded: bool = True
    may_await: Collection[int] = ()  # counts do not show which of these it waits for


def find_unexplained_wait(context: DiagnosisContext) -> UnexplainedWait | None:
    """The longest wait that has reached ``stall_after_s`` without a verdict; None if there is none."""
    explained: set[int] = set()
    for verdict in context.verdicts:
        if verdict.is_confirmed:
            explained.update(verdict.involved_ranks)
    latest = context.now - context.limits.stall_after_s
    waits: list[BlockedCall | _Wait] = []
    for group in context.graph.waiter_groups:  # as many as 100,000 waits
        waits += [
            b for b in group if b.began_at <= latest and b.rank >= 0 and b.rank not in explained
        ]
    waits += [wait for wait in _iter_other_waits(context, explained) if wait.began_at <= latest]
    if not waits:
        return None
    longest = min(waits, key=attrgetter("began_at", "rank"))
    if isinstance(longest, BlockedCall):
        longest = _Wait(longest.rank, longest.began_at, longest.stream, longest.awaited)
    awaited = sorted(longest.awaited)
    ranks_to_dump = tuple(r for r in awaited or longest.may_await if r >= 0)
    return UnexplainedWait(
        began_at=longest.began_at,
        rank_count=len({wait.rank for wait in waits}),
        description=_describe_wait(context, longest, tuple(awaited)),
        reason=_find_reason(context, longest),
        ranks_to_dump=ranks_to_dump[:_MAX_AWAITED_SHOWN] or (longest.rank,),
    )


def _iter_other_waits(
    context: DiagnosisContext, explained: Set[int]
) -> Iterator[BlockedCall | _Wait]:
    """The waits of all ranks but the ``explained`` ones that the graph does not have as blocked calls,
    and those of devices. There may be 100,000.
    """
    graph = context.graph
    for rank in graph.stuck_streams.keys() - explained:
        stream = graph.stuck_streams[rank]
        yield _Wait(rank, stream.entered_at, stream)
    for rank in graph.thread_waits.keys() - explained:
        yield from graph.thread_waits[rank]
    for rank in graph.uncounted_waits.keys() - explained:
        for blocked in graph.uncounted_waits[rank]:
            yield _Wait(rank, blocked.began_at, blocked.stream, may_await=tuple(blocked.awaited))
    for rank in graph.unrecorded_waits.keys() - explained:
        yield _Wait(rank, graph.unrecorded_waits[rank], is_recorded=False)
    for rank in graph.unsampled_waits.keys() - explained:
        yield _Wait(rank, min([blocked.began_at for blocked in graph.unsampled_waits[rank]]))
    for rank in graph.released_ranks - explained:
        process = context.processes[rank]
        yield _Wait(rank, process.last_advanced_at, process.newest_stream)
    devices = graph.still_devices
    for wait in devices.waits:
        for rank in wait.waiters - explained:
            began_at = devices.get_unchanged_since((rank,))
            yield _Wait(rank, began_at, wait.group.streams[rank], wait.awaited)
    for device_group in devices.stalled_groups:
        for rank in device_group.members.keys() - explained:
            began_at = devices.get_unchanged_since((rank,))
            yield _Wait(rank, began_at, device_group.streams[rank])


def _describe_wait(context: DiagnosisContext, wait: _Wait, awaited: tuple[int, ...]) -> str:
    subject = describe_ranks((wait.rank,))
    if wait.stream is not None:
        stream = wait.stream
        position = describe_position(stream.group, stream.entered)
        subject = f"{subject} in {get_op_name(stream)} ({position})"
    if not wait.is_recorded:
        place = _describe_place(context, wait.rank).removeprefix(f"rank {wait.rank} is ")
        return f"{subject} in a call that is not recorded {place}".rstrip()
    if not awaited:
        return subject
    description = f"{subject} for {describe_ranks(awaited)}"
    places = [_describe_place(context, rank) for rank in awaited[:_MAX_AWAITED_SHOWN]]
    known_places = [place for place in places if place]
    return "; ".join([description, *known_places])


def _describe_place(context: DiagnosisContext, rank: int) -> str:
    if isinstance(rank, OutsideMember):
        return ""
    process = context.processes.get(rank)
    if process is None:
        return f"rank {rank} has not reported"
    sample = find_newest_sample(process, process.last_advanced_at)
    site = find_user_site(sample.calling_thread) if sample is not None else None
    return f"rank {rank} is at {site}" if site is not None else ""


def _find_reason(context: DiagnosisContext, wait: _Wait) -> str:
    ranks = {wait.rank, *wait.awaited, *wait.may_await}
    outside = tuple(rank for rank in wait.awaited if isinstance(rank, OutsideMember))
    if outside and len(outside) == len(wait.awaited):
        return "it is no rank of this job" if len(outside) == 1 else "they are no ranks of this job"
    silent = tuple(sorted(context.graph.silent_ranks.keys() & ranks))
    if silent:
        return f"{describe_ranks_with(silent, 'does')} not report"
    if not wait.is_recorded:
        return describe_losses(context.attempt, ranks)[-1]
    if wait.may_await and wait.stream is not None:
        notes = describe_losses(context.attempt, ranks, wait.stream.group)
        return notes[0] if notes else "calls are not completely recorded"
    for verdict in context.verdicts:
        if not verdict.is_confirmed and not ranks.isdisjoint(verdict.culprits):
            return f"it may be {verdict.kind.value}, which is not certain yet"
    if wait.rank in context.graph.uncertain_ranks or wait.rank in context.graph.unsampled_waits:
        return "no stack shows yet whether that rank waits or works"
    return "what is known does not tell the cause"


def describe_losses(
    attempt: Attempt, ranks: Iterable[int], group: Group | None = None
) -> list[str]:
    """Clauses on which calls of the ranks, in all groups or in one, are not completely recorded.
    There is one for each rank, about the group with the earliest loss, for the first few ranks.
    """
    ranks = set(ranks)
    notes: list[str] = []
    for rank in sorted(attempt.lossy_ranks & ranks):
        process = attempt.processes[rank]
        losses = [
            (stream.loss, stream.group)
            for stream in process.streams.values()
            if stream.loss is not None and (group is None or stream.group.key == group.key)
        ]
        if not losses:
            continue
        if len(notes) == _MAX_NOTES:
            return notes
        loss, lossy_group = min(losses, key=lambda pair: pair[0].from_seq)
        fault = _format_fault(process) if loss.reason is LossReason.FAULT else ""
        notes.append(
            f"rank {rank}'s calls of {lossy_group.title} are not completely recorded since call"
            f" {loss.from_seq}, because {loss.reason.description}{fault}"
        )
    missed = tuple(sorted(attempt.incomplete_ranks & ranks))
    if missed and len(notes) < _MAX_NOTES:
        fault = _format_fault(attempt.processes[missed[0]])
        notes.append(
            f"not all groups and channels of {describe_ranks(missed)} are recorded{fault}, and a wait"
            " in one of the others cannot be seen"
        )
    return notes


def _format_fault(process: Process) -> str:
    """The first message of the rank's recorder, if it has any, in parentheses."""
    faults = process.recorder_faults
    return f" ({faults[0]})" if faults else ""


def add_loss_notes(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict with what is not completely recorded of its group's calls, in its advice."""
    attempt, group = context.attempt, verdict.group
    if group is None or not (attempt.lossy_ranks or attempt.incomplete_ranks):
        return verdict
    notes = describe_losses(attempt, (*group.ranks, *verdict.culprits), group)
    if not notes:
        return verdict
    return replace(verdict, advice=f"{verdict.advice} {join_notes(notes)}".strip())


def request_uncounted_stacks(context: DiagnosisContext) -> None:
    """Requests the stacks that show whom a call waits for where counts do not, and those that show
    whether a rank waits in a call that is not recorded. What they show is part of the next wait-for
    graph, and no verdict.
    """
    delay_s = context.limits.suspicion_delay_s
    for rank, calls in context.graph.uncounted_waits.items():
        for blocked in calls:
            if context.now - blocked.began_at >= delay_s:
                context.request_stacks(sorted(blocked.awaited), [rank], blocked.began_at)
    for rank in sorted(context.attempt.incomplete_ranks - context.explained_ranks):
        idle_since = context.processes[rank].idle_since
        if context.get_state_known_until(rank) - idle_since >= delay_s:
            context.request_stacks((), [rank], idle_since)
