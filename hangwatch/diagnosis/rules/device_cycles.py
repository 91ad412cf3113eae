"""Devices that wait for each other: calls of several groups that hosts queued in different orders."""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.diagnosis.device_view import DeviceView
from hangwatch.diagnosis.graph.devices import DeviceHang
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import CallClass, Verdict, Wait


def diagnose_device_cycles(context: DiagnosisContext) -> None:
    """One verdict for devices that wait for each other, in calls that their hosts queued in a
    different order.
    """
    view = context.get_still_device_view()
    if view is None:
        return
    hang = view.hang
    waiting = hang.find_waiters_of(hang.cycle)
    involved = hang.cycle | waiting
    if not hang.cycle or not involved.isdisjoint(context.explained_ranks):
        return
    age_s = view.get_unchanged_s(involved)
    if age_s < get_suspicion_delay_s(context.limits):
        return
    culprits = tuple(sorted(hang.cycle))
    cycle_waits = _list_cycle_waits(view, hang)
    calls: list[CallClass] = []
    for rank in culprits:
        calls += view.get_call(view.fronts[rank][0], rank)
    first_wait = cycle_waits[0][0]
    group = view.fronts[first_wait.rank][0]
    verdict = Verdict(
        kind=VerdictKind.DEADLOCK,
        severity=KINDS[VerdictKind.DEADLOCK].severity,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=view.get_stream(group, first_wait.rank).group,
        seq=first_wait.seq,
        calls=tuple(calls),
        waits=tuple(wait for wait, _ in cycle_waits),
        began_at=view.get_unchanged_since(involved),
        is_confirmed=age_s >= context.limits.stall_after_s,
        summary=messages.describe_deadlock(culprits, cycle_waits),
        advice=messages.format_deadlock_advice((), culprits),
    )
    context.verdicts.append(verdict)
    context.explained_ranks |= involved
    request_stacks(context, culprits, waiting, verdict.began_at)


def _list_cycle_waits(view: DeviceView, hang: DeviceHang) -> list[tuple[Wait, str]]:
    """One wait of each rank on the cycle, with the operation."""
    cycle_waits: list[tuple[Wait, str]] = []
    for rank in sorted(hang.cycle):
        for wait in hang.waits:
            awaited = sorted(wait.awaited & hang.cycle)
            if rank in wait.waiters and awaited:
                name = view.get_stream(wait.group, rank).group.name
                seq = view.get_seq(wait.group, rank)
                op = view.get_op(wait.group, rank)
                cycle_waits.append((Wait(rank=rank, on_rank=awaited[0], group=name, seq=seq), op))
                break
    return cycle_waits
