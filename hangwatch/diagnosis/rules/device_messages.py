"""Devices that do not finish although each send has its receive and each collective all its members.

The counters of a group with sends and receives cannot be compared between ranks, which make
different ones, so no rank is named. They do show that no device goes on.
"""

from __future__ import annotations

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
    get_device_changed_at,
    get_still_until,
)
from hangwatch.diagnosis.graph.waits import is_main_thread_waiting
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.process import Process

from .devices import UNTIMED_GRACE_S
from .end_kinds import is_in_phase


def diagnose_unfinished_messages(context: DiagnosisContext) -> None:
    """One verdict if no rank makes a call, no device goes on, and hosts are seen to wait for theirs."""
    attempt, graph = context.attempt, context.graph
    if not attempt.has_messages or not attempt.device_groups:
        return
    if not graph.blocked_calls.keys() <= context.explained_ranks:
        return
    waiting = [process for process in attempt.processes.values() if _may_wait(context, process)]
    if not waiting:
        return
    began_at = max(map(_get_advanced_at, attempt.processes.values()))
    age_s = min(map(get_still_until, waiting)) - began_at
    if age_s < get_suspicion_delay_s(context.limits):
        return
    ranks = tuple(sorted(process.rank for process in waiting))
    request_stacks(context, (), ranks, began_at)
    answers = [is_main_thread_waiting(process) for process in waiting]
    if False in answers or True not in answers:
        return
    context.verdicts.append(
        _make_verdict(
            attempt.processes[ranks[0]],
            ranks,
            began_at,
            due=age_s >= context.limits.stall_after_s + UNTIMED_GRACE_S,
        )
    )
    context.explained_ranks.update(ranks)


def _may_wait(context: DiagnosisContext, process: Process) -> bool:
    """Whether its device has messages to finish, and nothing else explains that its host waits."""
    if not process.is_alive or process.rank in context.explained_ranks:
        return False
    if process.rank in context.graph.silent_ranks or is_in_phase(context, process):
        return False
    has_messages = any(
        stream.peer is not None and stream.entered and stream.completed is None
        for stream in process.streams.values()
    )
    devices = [stream.device for stream in process.streams.values()]
    return has_messages and any(
        device.completed != device.enqueued for device in devices if device is not None
    )


def _get_advanced_at(process: Process) -> float:
    """When its host last made a call, or its device was last seen to go on.

    The first reading after the last call shows when the device was seen, not when it changed.
    """
    called_at = max(process.newest_call_at, process.reports.last_progress_at)
    changed_at = get_device_changed_at(process)
    return changed_at if changed_at > called_at + READING_DELAY_S else called_at


def _make_verdict(first: Process, ranks: tuple[int, ...], began_at: float, *, due: bool) -> Verdict:
    stream = first.newest_stream
    assert stream is not None  # it has made calls
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
        summary=messages.describe_still_devices(ranks, first.rank, get_op_name(stream), position),
        advice=messages.STILL_DEVICES_ADVICE,
    )
