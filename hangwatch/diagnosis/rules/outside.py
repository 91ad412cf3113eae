"""Waits for members of a foreign group that are no ranks of the attempt: processes of another job, or
ones that are not known.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    find_missing_call,
    get_op_name,
    request_stacks,
    select_waits,
)
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict

from .end_waits import LongestWaits, get_wait_age_s


def add_outside_verdict(
    context: DiagnosisContext,
    outside: Collection[int],
    victims: set[int],
    waits_by_end: dict[int, LongestWaits],
) -> None:
    """A warning, since nothing shows whether these processes work; an alert once that lasts. None if
    they are ranks of an attempt of their own: its diagnosis names them.
    """
    ranks = tuple(sorted(outside, reverse=True))
    if all(_is_diagnosed_elsewhere(context, rank) for rank in ranks):
        return
    own_victims = {rank for rank in victims if rank >= 0}
    first = min(ranks, key=lambda rank: waits_by_end[rank].began_at)
    waits = waits_by_end[first]
    age_s = max(get_wait_age_s(context, rank, waits_by_end[rank], 0.0) for rank in ranks)
    is_long = age_s >= context.limits.slow_limit_s
    kind = VerdictKind.MISSING_RANK if is_long else VerdictKind.SLOW_RANK
    edge = waits.make_first_edge(first)
    calls = find_missing_call(context, edge, own_victims)
    context.verdicts.append(
        Verdict(
            kind=kind,
            severity=KINDS[kind].severity,
            culprits=(),
            waiting=tuple(sorted(own_victims)),
            group=edge.stream.group,
            seq=edge.wait.seq,
            calls=calls,
            waits=select_waits(context, own_victims),
            began_at=waits.began_at,
            is_confirmed=age_s >= context.limits.stall_after_s,
            summary=messages.describe_not_entered(
                ranks,
                get_op_name(edge.stream, edge.wait.seq),
                edge.stream.group,
                edge.wait.seq,
                len(own_victims),
                edge.wait.rank if edge.stream.peer is not None else None,
                calls[0].ranks if calls else (),
            ),
            advice=messages.OUTSIDE_ADVICE,
        )
    )
    context.explained_ranks |= {*ranks, *victims}
    if age_s >= context.limits.stall_after_s:
        request_stacks(context, (), own_victims, waits.began_at)


def _is_diagnosed_elsewhere(context: DiagnosisContext, rank: int) -> bool:
    member = context.attempt.foreign_groups.find_outside(rank)
    return member is not None and member.process.is_alive and not member.attempt.is_finished


def drop_outside_members(verdict: Verdict) -> Verdict:
    """The verdict with ranks of the attempt alone. Its texts may name others."""
    calls = [replace(c, ranks=_select_known(c.ranks)) for c in verdict.calls]
    return replace(
        verdict,
        culprits=_select_known(verdict.culprits),
        waiting=_select_known(verdict.waiting),
        calls=tuple(c for c in calls if c.ranks),
        waits=tuple(w for w in verdict.waits if w.rank >= 0 and w.on_rank >= 0),
    )


def _select_known(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank >= 0)
