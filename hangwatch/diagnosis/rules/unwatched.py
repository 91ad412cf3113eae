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
from hangwatch.diagnosis.graph.unwatched import is_unwatched
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict

from .absence_verdict import get_severity
from .end_waits import LongestWaits, get_wait_age_s


def find_unwatched_ends(
    context: DiagnosisContext, ends: Collection[int], waits_by_end: dict[int, LongestWaits]
) -> list[int]:
    """Those of the ends of wait chains whose calls are not recorded."""
    unwatched = []
    for rank in ends:
        group_states = [call.stream.group_state for call in waits_by_end[rank].blocked_calls]
        if any(is_unwatched(context.attempt, rank, state) for state in group_states):
            unwatched.append(rank)
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
