"""Waits for ranks that take part in the job and are not recorded: whether they made the call is not
known, so none of them is a culprit.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    find_missing_call,
    get_op_name,
    request_stacks,
    select_waits,
)
from hangwatch.diagnosis.graph.unwatched import shows_all_members
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict

from .absence_verdict import get_severity
from .end_waits import LongestWaits, get_wait_age_s


def find_unwatched_ends(
    context: DiagnosisContext, ends: Collection[int], waits_by_end: dict[int, LongestWaits]
) -> list[int]:
    """Those of the ends of wait chains whose calls are not recorded."""
    attempt, unwatched = context.attempt, []
    # By the id of its state, whether a group shows that an end exists that does not report. Before all
    # of 100,000 ranks have started, there are as many ends, and the groups have as many members.
    is_shown: dict[int, bool] = {}
    for rank in ends:
        process = attempt.processes.get(rank)
        if process is not None:
            if process.identity.unrecorded:
                unwatched.append(rank)
            continue
        for blocked in waits_by_end[rank].blocked_calls:
            state = blocked.stream.group_state
            if state is None:
                continue
            if id(state) not in is_shown:
                is_shown[id(state)] = shows_all_members(attempt, state)
            if is_shown[id(state)]:
                unwatched.append(rank)
                break
    return unwatched


def add_unwatched_verdict(
    context: DiagnosisContext,
    unwatched: Collection[int],
    victims: set[int],
    waits_by_end: dict[int, LongestWaits],
) -> None:
    """A warning at first, as for a start that takes long: the unwatched ranks may be at work."""
    age_s = max(get_wait_age_s(context, rank, waits_by_end[rank], 0.0) for rank in unwatched)
    first = min(unwatched, key=lambda rank: waits_by_end[rank].began_at)
    waits = waits_by_end[first]
    began_at = waits.began_at
    edge = waits.make_first_edge(first)
    kind = VerdictKind.STARTUP_STALL
    ranks = tuple(sorted(unwatched))
    processes = (context.attempt.processes.get(rank) for rank in ranks)
    reasons = [p.identity.unrecorded for p in processes if p is not None and p.identity.unrecorded]
    context.verdicts.append(
        Verdict(
            kind=kind,
            severity=get_severity(context, kind, began_at),
            culprits=(),
            waiting=tuple(sorted(victims)),
            group=edge.stream.group,
            seq=edge.wait.seq,
            calls=find_missing_call(context, edge, victims),
            waits=select_waits(context, victims),
            began_at=began_at,
            is_confirmed=age_s >= context.limits.stall_after_s,
            summary=messages.describe_unwatched_ranks(
                ranks, get_op_name(edge.stream, edge.wait.seq), len(victims)
            ),
            advice=messages.format_unwatched_advice(reasons[0] if reasons else ""),
        )
    )
    context.explained_ranks |= {*unwatched, *victims}
    if age_s >= context.limits.stall_after_s:
        request_stacks(context, (), victims, began_at)
