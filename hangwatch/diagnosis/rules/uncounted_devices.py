"""Calls that do not finish where no counters of devices can be compared.

The counters of a group with sends and receives cannot be compared between ranks, which make
different ones, but they show that no device goes on. And a backend counts nothing before a group's
communicator exists: then the hosts themselves are blocked in the call.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_newest_call,
    get_op_name,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.diagnosis.device_view import (
    READING_DELAY_S,
    get_still_until,
)
from hangwatch.diagnosis.graph.thread_waits import get_calling_thread_since, is_process_waiting
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.frames import waits_for_work
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .devices import UNTIMED_GRACE_S
from .end_kinds import is_in_phase


def diagnose_uncounted_devices(context: DiagnosisContext) -> None:
    """One verdict if no rank makes a call, no device goes on, and hosts are seen to wait; not beside
    another verdict, of which that may be a consequence.
    """
    attempt = context.attempt
    if context.now - attempt.newest_call_at < get_suspicion_delay_s(context.limits):
        return
    if context.explained_ranks or context.graph.blocked_calls or context.graph.unsampled_ranks:
        return
    waiting = [process for process in attempt.processes.values() if _may_wait(context, process)]
    if not waiting:
        return
    began_at = max(map(_get_advanced_at, attempt.processes.values()))
    age_s = min(map(_get_known_until, waiting)) - began_at
    if age_s < get_suspicion_delay_s(context.limits):
        return
    ranks = tuple(sorted(process.rank for process in waiting))
    request_stacks(context, (), ranks, began_at)
    answers = [_is_seen_waiting(process, began_at) for process in waiting if process.samples]
    if False in answers or True not in answers:
        return
    has_counters = any(_has_unfinished_count(process) for process in waiting)
    limit_s = context.limits.stall_after_s + (UNTIMED_GRACE_S if has_counters else 0.0)
    first = attempt.processes[ranks[0]]
    verdict = _make_verdict(
        first, ranks, _find_first_devices(context), began_at, due=age_s >= limit_s
    )
    if all(map(_may_create_communicator, waiting)):
        verdict = _describe_communicator(context, verdict)
    context.verdicts.append(verdict)
    context.explained_ranks.update(ranks)


def _may_wait(context: DiagnosisContext, process: Process) -> bool:
    """Whether its newest call may be unfinished, and nothing else explains that it waits."""
    if not process.is_alive:
        return False
    newest = _find_newest_queued(process)
    if newest is None:
        return False
    if process.rank in context.graph.silent_ranks or is_in_phase(context, process):
        return False
    if _has_messages(process):
        return newest.device is None or _has_unfinished_count(process)
    state = newest.group_state
    return newest.device is None and state is not None and not state.has_member_behind(newest)


def _find_newest_queued(process: Process) -> CallStream | None:
    """The stream of its newest call that only queued work for its device."""
    newest = None
    for stream in process.open_calls.unfinished_streams:  # a loop: this runs for 100,000 processes
        is_queued = stream.completed is None and stream.entered > 0
        if is_queued and (newest is None or stream.entered_at > newest.entered_at):
            newest = stream
    return newest


def _has_messages(process: Process) -> bool:
    return any(stream.peer is not None and stream.entered for stream in process.streams.values())


def _has_unfinished_count(process: Process) -> bool:
    """Whether its counters show calls that are not complete. Those of a group with messages count
    these and the collectives by different numbers.
    """
    devices = [stream.device for stream in process.streams.values()]
    return any(device.completed != device.enqueued for device in devices if device is not None)


def _get_known_until(process: Process) -> float:
    """Until when it is known that its host made no further call and its device did not go on."""
    if _has_unfinished_count(process):
        return get_still_until(process)
    return process.reports.last_seen_at


def _is_seen_waiting(process: Process, since: float) -> bool | None:
    """Whether a stack shows that its host waits; None if there is no evidence. Without counters, only
    a host that is still inside torch.distributed is known to wait for its call.
    """
    if _has_unfinished_count(process):
        if get_calling_thread_since(process, process.last_advanced_at) is None:
            return None  # a host that uses the CPU may be polling its device
        return is_process_waiting(process)
    return True if waits_for_work(get_calling_thread_since(process, since)) else None


def _get_advanced_at(process: Process) -> float:
    """When its host last made a call, or its device was last seen to go on.

    The first reading after the last call shows when the device was seen, not when it changed.
    """
    called_at = max(process.newest_call_at, process.reports.last_progress_at)
    changed_at = process.device_changed_at
    return changed_at if changed_at > called_at + READING_DELAY_S else called_at


def _may_create_communicator(process: Process) -> bool:
    """Whether its newest call is the first one of its group, in which a backend connects the members."""
    newest = _find_newest_queued(process)
    return newest is not None and newest.entered == 1 and newest.device is None


def _describe_communicator(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Connecting thousands of ranks, or many on a busy machine, may take long without a fault."""
    assert verdict.group is not None and verdict.seq is not None  # see `_make_verdict`
    is_late = context.now - verdict.began_at >= context.limits.startup_after_s
    return replace(
        verdict,
        severity=verdict.severity if is_late else Severity.WARNING,
        summary=messages.describe_communicator(
            verdict.waiting, messages.describe_position(verdict.group, verdict.seq)
        ),
        advice=messages.COMMUNICATOR_ADVICE,
    )


def _find_first_devices(context: DiagnosisContext) -> tuple[int, ...]:
    """The ranks whose devices hold up all others, as far as counters show it."""
    view = context.get_device_view()
    return () if view is None else tuple(sorted(view.hang.culprits))


def _make_verdict(
    first: Process, ranks: tuple[int, ...], ends: tuple[int, ...], began_at: float, *, due: bool
) -> Verdict:
    stream = _find_newest_queued(first)
    assert stream is not None  # see `_may_wait`
    position = messages.describe_position(stream.group, stream.entered)
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=KINDS[VerdictKind.NO_PROGRESS].severity,
        culprits=(),
        waiting=ranks,
        group=stream.group,
        seq=stream.entered,
        calls=get_newest_call(stream, first.rank),
        began_at=began_at,
        is_confirmed=due,
        summary=messages.describe_still_devices(
            ranks, ends, first.rank, get_op_name(stream), position
        ),
        advice=messages.STILL_DEVICES_ADVICE,
    )
