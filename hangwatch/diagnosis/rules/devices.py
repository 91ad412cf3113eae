"""Hangs of devices whose hosts run ahead: devices that lag behind those of the other members, that wait
for each other, or that are all in one call; and hosts that have not made the call that others' devices
are in.

The counters of a group with sends and receives cannot be compared between ranks, which make
different ones, but they show that no device makes progress. And a backend counts nothing before a
group's communicator exists: then the hosts themselves are blocked in the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MAX_EVIDENCE_WAIT_S, MIN_WAIT_S, READING_DELAY_S, UNTIMED_GRACE_S
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.stacks.frames import waits_for_work
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..context import DiagnosisContext
from ..graph.devices import DeviceGraph, DeviceGroup, get_still_until
from ..graph.edges import get_op_name
from ..graph.progress import get_calling_thread_since, is_process_waiting
from ..messages import (
    describe_deadlock,
    describe_position,
    describe_ranks,
    describe_ranks_with,
    format_lower_layers_advice,
    format_waiter_count,
    pluralize,
)
from .absence import make_absence_verdict
from .progress import check_agreement, make_no_progress_verdict

_MAX_WAITS_SHOWN = 64

_TIMING_HINT = (
    "TORCH_NCCL_ENABLE_TIMING=1 (from torch 2.15 on, with TORCH_DIST_USE_NCCL2=0) would show which"
    " devices have begun the call."
)
_STILL_DEVICES_ADVICE = (
    "Each send has its receive, and each collective all its members, so check the network, the devices"
    " and their drivers (nvidia-smi, dmesg). A device may be stuck before one of these calls."
)
_COMMUNICATOR_ADVICE = (
    "The backend connects the ranks in the first call of a group. If it usually takes less time, check"
    " that all hosts reach each other on the same network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, firewalls);"
    " NCCL_DEBUG=INFO shows what it chose."
)


def _get_suspicious_age_s(context: DiagnosisContext, involved: set[int], still: set[int]) -> float:
    """How long none of the devices in ``still`` made progress; 0 until that is suspicious, and if a
    verdict explains any rank of ``involved``.
    """
    if not involved.isdisjoint(context.explained_ranks):
        return 0.0
    age_s = context.graph.still_devices.get_unchanged_s(still)
    return age_s if age_s >= context.limits.suspicion_delay_s else 0.0


def diagnose_device_cycle(context: DiagnosisContext) -> None:
    """One verdict for devices that wait for each other, as their hosts queued calls in different orders."""
    devices = context.graph.still_devices
    cycle = devices.cycle
    waiting = devices.find_waiters_of(cycle)
    involved = cycle | waiting
    age_s = _get_suspicious_age_s(context, involved, involved)
    if not cycle or not age_s:
        return
    culprits = tuple(sorted(cycle))
    cycle_waits = []  # one of each rank on the cycle, with the operation
    calls: list[CallClass] = []
    for rank in culprits:
        calls += devices.fronts[rank][0].get_call(rank)
        for wait in devices.waits:
            awaited = wait.awaited & cycle
            if rank in wait.waiters and awaited:
                op = wait.group.get_op(rank)
                cycle_waits.append((wait.group.make_wait(rank, min(awaited)), op))
                break
    first_wait = cycle_waits[0][0]
    summary, advice = describe_deadlock(culprits, cycle_waits)
    verdict = Verdict(
        kind=VerdictKind.DEADLOCK,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=devices.fronts[first_wait.rank][0].streams[first_wait.rank].group,
        seq=first_wait.seq,
        calls=tuple(calls),
        waits=tuple(wait for wait, _ in cycle_waits),
        began_at=devices.get_unchanged_since(involved),
        is_confirmed=age_s >= context.limits.stall_after_s,
        summary=summary,
        advice=advice,
    )
    context.accuse(verdict, samples=True)


def diagnose_stuck_devices(context: DiagnosisContext) -> None:
    """One verdict for all devices that others wait for and that wait for none: they lag although every
    member's host has made the call, because of a kernel that never ends or a stream that waits.
    """
    devices = context.graph.still_devices
    culprits = devices.find_stuck_ranks()
    if not culprits or devices.uncertain_ends:
        return
    waiting = (devices.find_waiters_of(devices.culprits) | devices.culprits) - culprits
    # Ranks that wait indirectly may have had work until much later.
    still = culprits | devices.find_direct_waiters_of(culprits)
    age_s = _get_suspicious_age_s(context, culprits | waiting, still)
    if not age_s or _is_any_in_phase(context, culprits):
        return
    first = min(culprits)
    group = devices.fronts[first][0]
    # Where the calls differ, devices that lag are not the cause.
    agreement = check_agreement(context, group.streams[first].group, group.get_seq(first))
    due_after_s = context.limits.stall_after_s
    if agreement.may_become_known:
        due_after_s += MAX_EVIDENCE_WAIT_S
    verdict = make_stuck_verdict(devices, culprits, waiting, due=age_s >= due_after_s)
    context.accuse(verdict, samples=True)


def _is_any_in_phase(context: DiagnosisContext, ranks: Iterable[int]) -> bool:
    processes = context.processes
    return any(context.is_in_phase(processes[rank]) for rank in ranks)


def diagnose_hosts_behind_devices(context: DiagnosisContext) -> None:
    """One verdict for the ranks that devices wait for and whose hosts are alive in their own code.

    The hosts of the waiting ranks run ahead: they queue further calls, so that none of them seems to
    wait. Ranks that left, are frozen or do not report are other rules' subjects.
    """
    devices = context.graph.still_devices
    ends = devices.host_ends
    waiting = devices.find_waiters_of(ends)
    age_s = _get_suspicious_age_s(context, ends | waiting, waiting)
    if not ends or not age_s or _is_any_in_phase(context, ends):
        return
    excused = context.attempt.unable_ranks | context.graph.silent_ranks.keys()
    if not excused.isdisjoint(ends):
        return
    began_at = devices.get_unchanged_since(waiting)
    processes = context.processes
    if any(processes[rank].newest_call_at < began_at + MIN_WAIT_S for rank in waiting):
        return  # a host that makes no further calls may be busy, and wait for none
    culprits = tuple(sorted(ends))
    context.request_stacks(culprits, waiting, began_at)
    context.request_device_evidence(culprits, began_at)
    if age_s < context.limits.stall_after_s:
        return  # the waits of hosts may show another cause until then
    kind = VerdictKind.MISSING_RANK
    within_slow_limit = age_s < context.limits.slow_limit_s
    if within_slow_limit and any(context.is_working(rank, began_at) for rank in culprits):
        kind = VerdictKind.SLOW_RANK
    edge = devices.find_longest_wait(culprits)
    assert edge is not None  # devices wait for these hosts
    context.accuse(make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=True))


def diagnose_stalled_devices(context: DiagnosisContext) -> None:
    """One verdict for all calls that every member's device is in, as far as is known, and that
    none completes. A verdict on a member, or its declared phase, explains the call.
    """
    devices = context.graph.still_devices
    stalled = [
        group
        for group in devices.stalled_groups
        if context.explained_ranks.isdisjoint(group.ranks)
        and not _is_any_in_phase(context, group.ranks)
    ]
    if not stalled:
        return
    ages_s = [devices.get_waited_s(group.ranks) for group in stalled]
    age_s = max(ages_s)
    if age_s < context.limits.suspicion_delay_s:
        return
    first = stalled[ages_s.index(age_s)]
    members = {rank for group in stalled for rank in group.ranks}
    waiting = (members | devices.find_waiters_of(members)) - context.explained_ranks
    limit_s = context.limits.stall_after_s
    if not first.records_starts:
        limit_s += UNTIMED_GRACE_S
    verdict = make_stalled_verdict(context, devices, first, waiting, due=age_s >= limit_s)
    context.accuse(verdict, samples=True)


def make_stuck_verdict(
    devices: DeviceGraph, stuck: set[int], waiting: set[int], *, due: bool
) -> Verdict:
    """The verdict on the ranks whose devices are ``stuck``, for which others wait."""
    culprits = tuple(sorted(stuck))
    first = culprits[0]
    group = devices.fronts[first][0]
    progress = group.members[first]
    stream = group.streams[first]
    seq = group.get_seq(first)
    summary = describe_stuck_devices(
        culprits,
        group.get_op(first),
        stream.group,
        seq,
        len(waiting),
        is_begun=None if progress.started is None else progress.started > progress.completed,
        is_behind=progress.completed < group.furthest,
    )
    return Verdict(
        kind=VerdictKind.DEVICE_STUCK,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=stream.group,
        seq=seq,
        calls=group.get_call(first),
        waits=tuple(islice(devices.list_waits(stuck), _MAX_WAITS_SHOWN)),
        began_at=devices.get_unchanged_since(stuck | devices.find_direct_waiters_of(stuck)),
        is_confirmed=due,
        summary=summary,
        advice=format_stuck_device_advice(culprits, records_starts=group.records_starts),
    )


def make_stalled_verdict(
    context: DiagnosisContext,
    devices: DeviceGraph,
    group: DeviceGroup,
    waiting: Iterable[int],
    *,
    due: bool,
) -> Verdict:
    """The verdict on a call that all devices of ``group`` are in and none completes."""
    first = group.ranks[0]
    stream = group.streams[first]
    seq = group.get_seq(first)
    agreement = check_agreement(context, stream.group, seq)
    if group.records_starts and agreement.is_known:
        advice = (
            "Every device has begun the call, so check the network between them and its drivers."
        )
    else:
        advice = format_lower_layers_advice(are_equal=agreement.is_known)
        if not group.records_starts:
            advice = f"{advice} A device may be stuck before the call: {_TIMING_HINT}"
    verdict = make_no_progress_verdict(
        stream,
        first,
        waiting,
        devices.get_unchanged_since(group.ranks),
        due=due,
        summary=agreement.describe("none finishes", group.get_op(first), first),
        advice=advice,
    )
    return replace(verdict, seq=seq, calls=group.get_call(first))


def diagnose_uncounted_devices(context: DiagnosisContext) -> None:
    """One verdict if no rank makes a call, no device makes progress, and hosts are seen to wait; not
    beside another verdict, since it may be a consequence of that one.
    """
    attempt = context.attempt
    if context.now - attempt.newest_call_at < context.limits.suspicion_delay_s:
        return
    if context.explained_ranks or context.graph.blocked_calls or context.graph.unsampled_waits:
        return
    waiting = [process for process in attempt.processes.values() if _may_wait(context, process)]
    if not waiting:
        return
    waiting.sort(key=lambda process: process.rank)
    began_at = max(map(_get_advanced_at, attempt.processes.values()))
    # The time until which no rank is known to have made a further call, and no device progress.
    known_until = [
        get_still_until(process) if _has_unfinished_count(process) else process.reports.last_seen_at
        for process in waiting
    ]
    age_s = min(known_until) - began_at
    if age_s < context.limits.suspicion_delay_s:
        return
    ranks = tuple(process.rank for process in waiting)
    context.request_stacks((), ranks, began_at)
    answers = [_is_seen_waiting(process, began_at) for process in waiting if process.samples]
    if False in answers or True not in answers:
        return
    queued = [stream for stream in map(_find_newest_queued, waiting) if stream is not None]
    position = describe_position(queued[0].group, queued[0].entered)
    # A backend connects the members of a group in its first call.
    is_connecting = all(stream.entered == 1 and stream.device is None for stream in queued)
    if is_connecting:
        summary = f"{describe_ranks(ranks)} connect to each other and do not finish: {position}"
    else:
        summary = (
            f"{describe_ranks_with(ranks, 'waits for its device')}, and no device finishes what is queued: rank"
            f" {ranks[0]}'s last call is {get_op_name(queued[0])} ({position})"
        )
        # The ranks whose devices hold up all others, as far as counters show it.
        ends = tuple(sorted(context.graph.devices.culprits))
        if 0 < len(ends) < len(ranks):
            summary += f"; the others wait for {describe_ranks(ends)}"
    limit_s = context.limits.stall_after_s
    if any(map(_has_unfinished_count, waiting)) or any(s.ends_with_replay for s in queued):
        limit_s += UNTIMED_GRACE_S
    verdict = make_no_progress_verdict(
        queued[0],
        ranks[0],
        ranks,
        began_at,
        due=age_s >= limit_s,
        summary=summary,
        advice=_COMMUNICATOR_ADVICE if is_connecting else _STILL_DEVICES_ADVICE,
    )
    # Connecting thousands of ranks, or many on a busy machine, may take long without a fault.
    if is_connecting:
        verdict = replace(verdict, severity=context.get_start_severity(began_at))
    context.accuse(verdict)


def _may_wait(context: DiagnosisContext, process: Process) -> bool:
    """Whether the newest call of a rank may be unfinished, and nothing else explains that it waits."""
    if not process.is_alive:
        return False
    newest = _find_newest_queued(process)
    if newest is None:
        return False
    if process.rank in context.graph.silent_ranks or context.is_in_phase(process):
        return False
    is_uncounted = newest.device is None or newest.ends_with_replay
    if any(stream.peer is not None and stream.entered for stream in process.streams.values()):
        return is_uncounted or _has_unfinished_count(process)
    state = newest.group_state
    return is_uncounted and state is not None and not state.has_member_behind(newest)


def _find_newest_queued(process: Process) -> CallStream | None:
    """The stream of a rank's newest call that only queued work for its device."""
    newest = None
    for stream in process.unfinished_streams:  # a loop: this runs for 100,000 processes
        is_queued = stream.completed is None and stream.entered > 0
        if is_queued and (newest is None or stream.entered_at > newest.entered_at):
            newest = stream
    return newest


def _has_unfinished_count(process: Process) -> bool:
    """Whether a rank's counters show calls that are not complete. The counters of a group with messages
    count these and the collectives by different numbers.
    """
    devices = [stream.device for stream in process.streams.values()]
    return any(device.completed != device.enqueued for device in devices if device is not None)


def _is_seen_waiting(process: Process, since: float) -> bool | None:
    """Whether a stack shows that a rank's host waits; None if there is no evidence. Without counters, only
    a host that is still inside torch.distributed is known to wait for its call, unless that is a replay
    of a CUDA graph: what it waits for then includes collectives.
    """
    newest = _find_newest_queued(process)
    if _has_unfinished_count(process) or (newest is not None and newest.ends_with_replay):
        if get_calling_thread_since(process, process.last_advanced_at) is None:
            return None  # a host that uses the CPU may be polling its device
        return is_process_waiting(process)
    return True if waits_for_work(get_calling_thread_since(process, since)) else None


def _get_advanced_at(process: Process) -> float:
    """When a rank's host last made a call, or its device was last seen to make progress.

    The first reading after the last call shows when the device was seen, not when it changed.
    """
    called_at = max(process.newest_call_at, process.reports.last_progress_at)
    changed_at = process.device_changed_at
    return changed_at if changed_at > called_at + READING_DELAY_S else called_at


def describe_stuck_devices(
    ranks: tuple[int, ...],
    op: str,
    group: Group,
    seq: int,
    waiter_count: int,
    *,
    is_begun: bool | None,
    is_behind: bool,
) -> str:
    """The summary. ``is_begun`` is None where starts are not recorded; ``is_behind``: other members'
    devices have completed the call.
    """
    verb = "begun" if is_begun is False else "completed"
    summary = (
        f"{describe_ranks_with(ranks, 'has')} queued {op} ({describe_position(group, seq)}), but"
        f" {pluralize('its device has', ranks)} not {verb} it"
    )
    if is_behind:
        summary += ", as other devices have"
    return f"{summary}; {format_waiter_count(waiter_count)}"


def format_stuck_device_advice(ranks: tuple[int, ...], *, records_starts: bool) -> str:
    advice = (
        f"Check what {pluralize('its device has', ranks)} to do before that call: a kernel that does not"
        " end, or a stream that waits for an event; and the GPU itself (nvidia-smi, dmesg)."
    )
    if records_starts or len(ranks) == 1:
        return advice
    return f"{advice} Any of them may be the one that is stuck: {_TIMING_HINT}"
