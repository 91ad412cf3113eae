"""Devices that lag behind those of the other members, although every member's host has made the
call: a kernel that never ends, or a stream that waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.diagnosis.device_view import DeviceView
from hangwatch.diagnosis.graph.devices import DeviceGroup, DeviceHang
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict, Wait

from .agreement import check_agreement
from .end_kinds import is_in_phase

_MAX_WAITS_SHOWN = 64
# Without recorded starts, a long kernel on all devices looks like a call that does not complete.
UNTIMED_GRACE_S = 3.65
# For requested hashes, which show whether the ranks made the same call; the request goes out long
# before the verdict is due.
_MAX_HASH_WAIT_S = 3.0


def diagnose_stuck_devices(context: DiagnosisContext) -> None:
    """One verdict for all devices that others wait for and that wait for none."""
    view = context.get_still_device_view()
    if view is None:
        return
    hang = view.hang
    culprits = view.find_stuck_ranks()
    if not culprits or hang.uncertain_ends:
        return
    waiting = (hang.find_waiters_of(hang.culprits) | hang.culprits) - culprits
    involved = culprits | waiting
    if not involved.isdisjoint(context.explained_ranks):
        return
    processes = context.attempt.processes
    if any(is_in_phase(context, processes[rank]) for rank in culprits):
        return
    # Further ranks may have had work until much later.
    age_s = view.get_unchanged_s(culprits | hang.find_direct_waiters_of(culprits))
    if age_s < get_suspicion_delay_s(context.limits):
        return
    first = min(culprits)
    group = view.fronts[first][0]
    stream = view.get_stream(group, first)
    members = context.streams_by_group.get(stream.group.key, {})
    # Devices come apart in calls that differ: then those that lag are no culprits.
    agreement = check_agreement(context, members, group.ranks, view.get_seq(group, first))
    due_after_s = context.limits.stall_after_s
    if agreement.may_become_known:
        due_after_s += _MAX_HASH_WAIT_S
    due = age_s >= due_after_s
    verdict = make_stuck_verdict(view, culprits, waiting, hang, due=due)
    context.verdicts.append(verdict)
    context.explained_ranks |= involved
    request_stacks(context, verdict.culprits, waiting, verdict.began_at)


def diagnose_stalled_devices(context: DiagnosisContext) -> None:
    """One verdict for all calls that every member's device is in, as far as is known, and that
    none completes.
    """
    view = context.get_still_device_view()
    if view is None:
        return
    hang = view.hang
    stalled = [group for group in hang.stalled_groups if _is_unexplained(context, group)]
    if not stalled:
        return
    ages_s = [view.get_waited_s(group.ranks) for group in stalled]
    age_s = max(ages_s)
    if age_s < get_suspicion_delay_s(context.limits):
        return
    first = stalled[ages_s.index(age_s)]
    members: set[int] = set()
    for group in stalled:
        members.update(group.ranks)
    waiting = (members | hang.find_waiters_of(members)) - context.explained_ranks
    limit_s = context.limits.stall_after_s
    if not first.records_starts:
        limit_s += UNTIMED_GRACE_S
    verdict = make_stalled_verdict(context, view, first, waiting, due=age_s >= limit_s)
    context.verdicts.append(verdict)
    context.explained_ranks |= waiting
    request_stacks(context, (), waiting, verdict.began_at)


def _is_unexplained(context: DiagnosisContext, group: DeviceGroup) -> bool:
    """Whether nothing explains that it stalls: no verdict, and no member's declared phase."""
    if not context.explained_ranks.isdisjoint(group.ranks):
        return False
    processes = context.attempt.processes
    return not any(is_in_phase(context, processes[rank]) for rank in group.ranks)


def make_stuck_verdict(
    view: DeviceView, stuck: set[int], waiting: set[int], hang: DeviceHang, *, due: bool
) -> Verdict:
    """The verdict on the ranks whose devices are ``stuck``, for which others wait."""
    culprits = tuple(sorted(stuck))
    first = culprits[0]
    group = view.fronts[first][0]
    progress = group.members[first]
    stream = view.get_stream(group, first)
    seq = view.get_seq(group, first)
    furthest = max(other.completed for other in group.members.values())
    summary = messages.describe_stuck_devices(
        culprits,
        view.get_op(group, first),
        stream.group,
        seq,
        len(waiting),
        is_begun=None if progress.started is None else progress.started > progress.completed,
        is_behind=progress.completed < furthest,
    )
    return Verdict(
        kind=VerdictKind.DEVICE_STUCK,
        severity=KINDS[VerdictKind.DEVICE_STUCK].severity,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=stream.group,
        seq=seq,
        calls=view.get_call(group, first),
        waits=_list_waits(view, hang, stuck),
        began_at=view.get_unchanged_since(stuck | hang.find_direct_waiters_of(stuck)),
        is_confirmed=due,
        summary=summary,
        advice=messages.format_stuck_device_advice(culprits, records_starts=group.records_starts),
    )


def _list_waits(view: DeviceView, hang: DeviceHang, stuck: set[int]) -> tuple[Wait, ...]:
    """The waits for the culprits, or some of these."""
    waits: list[Wait] = []
    for wait in hang.waits:
        for on_rank in sorted(wait.awaited & stuck):
            for rank in sorted(wait.waiters):
                if len(waits) == _MAX_WAITS_SHOWN:
                    return tuple(waits)
                seq = view.get_seq(wait.group, rank)
                name = view.get_stream(wait.group, rank).group.name
                waits.append(Wait(rank=rank, on_rank=on_rank, group=name, seq=seq))
    return tuple(waits)


def make_stalled_verdict(
    context: DiagnosisContext,
    view: DeviceView,
    group: DeviceGroup,
    waiting: Iterable[int],
    *,
    due: bool,
) -> Verdict:
    """The verdict on a call that all devices of ``group`` are in and none completes."""
    first = group.ranks[0]
    stream = view.get_stream(group, first)
    seq = view.get_seq(group, first)
    position = messages.describe_position(stream.group, seq)
    members = context.streams_by_group.get(stream.group.key, {})
    agreement = check_agreement(context, members, group.ranks, seq)
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=KINDS[VerdictKind.NO_PROGRESS].severity,
        culprits=(),
        waiting=tuple(sorted(waiting)),
        group=stream.group,
        seq=seq,
        calls=view.get_call(group, first),
        began_at=view.get_unchanged_since(group.ranks),
        is_confirmed=due,
        summary=agreement.describe("none finishes", view.get_op(group, first), first, position),
        advice=messages.format_stalled_device_advice(
            records_starts=group.records_starts, are_equal=agreement.is_known
        ),
    )
