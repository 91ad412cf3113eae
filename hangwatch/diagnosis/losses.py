"""Says whose calls are not completely recorded: what was not concluded because of it, or what a
verdict does not rest on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_state_known_until,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt

_MAX_NOTES = 4


def describe_losses(
    attempt: Attempt, ranks: Iterable[int], group: Group | None = None
) -> list[str]:
    """Clauses that say which calls of the ranks, in all groups or in one, are not completely recorded.
    There is one for each rank, about the group with the earliest loss, for the first few ranks.
    """
    ranks = set(ranks)
    notes: list[str] = []
    for rank in sorted(attempt.lossy_ranks & ranks):
        process = attempt.processes[rank]
        lossy = [
            (stream.loss, stream.group)
            for stream in process.streams.values()
            if stream.loss is not None and (group is None or stream.group.key == group.key)
        ]
        if lossy and len(notes) < _MAX_NOTES:
            loss, lossy_group = min(lossy, key=lambda pair: pair[0].from_seq)
            faults = process.recorder.faults
            notes.append(messages.describe_loss(rank, lossy_group, loss, faults))
    missed = tuple(sorted(attempt.incomplete_ranks & ranks))
    if missed and len(notes) < _MAX_NOTES:
        faults = attempt.processes[missed[0]].recorder.faults
        notes.append(messages.describe_missed_streams(missed, faults))
    return notes


def add_loss_notes(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict with what is not completely recorded of its group's calls, in its advice."""
    attempt, group = context.attempt, verdict.group
    if group is None or not (attempt.lossy_ranks or attempt.incomplete_ranks):
        return verdict
    notes = describe_losses(attempt, (*group.ranks, *verdict.culprits), group)
    if not notes:
        return verdict
    return replace(verdict, advice=f"{verdict.advice} {messages.join_notes(notes)}".strip())


def request_uncounted_stacks(context: DiagnosisContext) -> None:
    """Requests the stacks that show whom a call waits for where counts do not, and
    those that show whether a rank waits in a call that is not recorded. Makes no verdict: what they show
    is part of the next wait-for graph.
    """
    delay_s = get_suspicion_delay_s(context.limits)
    for rank, calls in context.graph.uncounted_waits.items():
        for blocked in calls:
            if context.now - blocked.began_at >= delay_s:
                request_stacks(context, sorted(blocked.awaited), [rank], blocked.began_at)
    for rank in sorted(context.attempt.incomplete_ranks - context.explained_ranks):
        idle_since = context.attempt.processes[rank].idle_since
        if get_state_known_until(context, rank) - idle_since >= delay_s:
            request_stacks(context, (), [rank], idle_since)
