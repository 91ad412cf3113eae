"""Ranks whose hosts have not made the call that others' devices are in, while those ranks' hosts run
ahead: they queue further calls, so that none of them seems to wait.
"""

from __future__ import annotations

from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S

from .absence_verdict import make_absence_verdict
from .end_kinds import is_in_phase, is_working


def diagnose_hosts_behind(context: DiagnosisContext) -> None:
    """One verdict for the ranks that devices wait for and whose hosts are alive in their own code.

    Ranks that left, are frozen or do not report are other rules' subjects.
    """
    view = context.get_still_device_view()
    if view is None:
        return
    hang = view.hang
    waiting = hang.find_waiters_of(hang.host_ends)
    involved = hang.host_ends | waiting
    if not hang.host_ends or not involved.isdisjoint(context.explained_ranks):
        return
    age_s = view.get_unchanged_s(waiting)
    if age_s < get_suspicion_delay_s(context.limits):
        return
    if any(_is_excused(context, rank) for rank in hang.host_ends):
        return
    began_at = view.get_unchanged_since(waiting)
    processes = context.attempt.processes
    if any(processes[rank].newest_call_at < began_at + MIN_WAIT_S for rank in waiting):
        return  # a host that makes no further calls may be busy, and wait for none
    request_stacks(context, sorted(hang.host_ends), waiting, began_at)
    if age_s < context.limits.stall_after_s:
        return  # the waits of hosts may show another cause until then
    within_slow_limit = age_s < context.limits.slow_limit_s
    kind = VerdictKind.MISSING_RANK
    if within_slow_limit and any(is_working(context, r, began_at) for r in hang.host_ends):
        kind = VerdictKind.SLOW_RANK
    culprits = tuple(sorted(hang.host_ends))
    edge = view.find_longest_wait(culprits)
    assert edge is not None  # devices wait for these hosts
    context.verdicts.append(
        make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=True)
    )
    context.explained_ranks |= involved


def _is_excused(context: DiagnosisContext, rank: int) -> bool:
    process = context.attempt.processes[rank]
    return (
        rank in context.attempt.unable_ranks
        or rank in context.graph.silent_ranks
        or is_in_phase(context, process)
    )
