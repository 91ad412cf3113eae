"""The verdict on ranks that others wait for, with the summary and the advice of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    find_blocking_user_thread,
    find_last_site,
    find_missing_call,
    find_newest_sample,
    get_op_name,
    select_waits,
)
from hangwatch.diagnosis.graph.graph import WaitEdge
from hangwatch.model.kind_spec import Severity, Timing
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.frames import find_user_site

from .end_kinds import is_in_phase


def make_absence_verdict(
    context: DiagnosisContext,
    kind: VerdictKind,
    culprits: tuple[int, ...],
    waiting: set[int],
    edge: WaitEdge,
    began_at: float,
    *,
    due: bool,
) -> Verdict:
    """The verdict on ``culprits``, for which others wait; ``edge`` is one of these waits."""
    blocking_thread = find_blocking_user_thread(context, culprits, began_at, edge.stream.group)
    verdict = Verdict(
        kind=kind,
        severity=get_severity(context, kind, began_at),
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=edge.stream.group,
        seq=edge.wait.seq,
        calls=find_missing_call(context, edge, waiting),
        waits=select_waits(context, waiting),
        began_at=began_at,
        is_confirmed=due,
        site=find_user_site(blocking_thread[1]) if blocking_thread is not None else None,
    )
    summary, advice = _make_messages(context, verdict, edge)
    if blocking_thread is not None and kind is not VerdictKind.EXITED_RANK:
        rank, thread = blocking_thread
        subject = _name_blocking_thread(culprits, rank, thread)
        summary = f"{summary}: {subject} is at {verdict.site}"
    return replace(verdict, summary=summary, advice=advice)


def get_severity(context: DiagnosisContext, kind: VerdictKind, began_at: float) -> Severity:
    """Slow imports, image pulls and launchers make a start late without a fault."""
    spec = KINDS[kind]
    awaited_s = context.now - began_at
    if spec.timing is Timing.AFTER_STALL_THEN_ALERT and awaited_s < context.limits.startup_after_s:
        return Severity.WARNING
    return spec.severity


def _name_blocking_thread(culprits: tuple[int, ...], rank: int, thread: ThreadStack) -> str:
    subject = f"rank {rank}" if len(culprits) > 1 else "it"
    return messages.describe_blocking_thread(subject, thread)


def _make_messages(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> tuple[str, str]:
    """The summary and the advice."""
    return MESSAGE_MAKERS[verdict.kind](context, verdict, edge)


def _make_startup_messages(
    context: DiagnosisContext, verdict: Verdict, edge: WaitEdge
) -> tuple[str, str]:
    processes = {rank: context.attempt.processes.get(rank) for rank in verdict.culprits}
    waiter_count = len(verdict.waiting)
    if edge.stream.group.is_declared:
        op = get_op_name(edge.stream, edge.wait.seq)
        summary = messages.describe_not_started(verdict.culprits, waiter_count, op)
    else:
        process = processes[verdict.culprits[0]]
        was_destroyed = process is not None and process.lifecycle is Lifecycle.DESTROYED
        summary = messages.describe_not_initialized(verdict.culprits, was_destroyed, waiter_count)
    return summary, messages.format_startup_advice(processes)


def _make_exited_messages(
    context: DiagnosisContext, verdict: Verdict, edge: WaitEdge
) -> tuple[str, str]:
    process = context.attempt.processes.get(verdict.culprits[0])
    has_ended = process is None or not process.is_alive
    summary = messages.describe_exited_ranks(
        verdict.culprits,
        has_ended,
        len(verdict.waiting),
        get_op_name(edge.stream, edge.wait.seq),
        edge.stream.group,
        edge.wait.seq,
    )
    return summary, messages.format_exited_rank_advice(len(verdict.culprits) > 1)


def _make_frozen_messages(
    context: DiagnosisContext, verdict: Verdict, edge: WaitEdge
) -> tuple[str, str]:
    process = context.attempt.processes[verdict.culprits[0]]
    return messages.describe_frozen_ranks(
        verdict.culprits,
        process.freeze_reason(context.now),
        process.activity.state,
        len(verdict.waiting),
        get_op_name(edge.stream, edge.wait.seq),
        has_stack=find_newest_sample(process, verdict.began_at) is not None,
        last_site=find_last_site(process),
    )


def _make_lost_messages(
    context: DiagnosisContext, verdict: Verdict, edge: WaitEdge
) -> tuple[str, str]:
    process = context.attempt.processes[verdict.culprits[0]]
    op = get_op_name(edge.stream, edge.wait.seq)
    return messages.describe_lost_node(process.host, verdict.culprits, len(verdict.waiting), op)


def _make_slow_messages(
    context: DiagnosisContext, verdict: Verdict, edge: WaitEdge
) -> tuple[str, str]:
    process = context.attempt.processes[verdict.culprits[0]]
    phase = None if process.phase is None else process.phase.name
    op = get_op_name(edge.stream, edge.wait.seq)
    summary = messages.describe_slow_ranks(verdict.culprits, phase, len(verdict.waiting), op)
    is_declared = is_in_phase(context, process)
    return summary, messages.format_slow_rank_advice(process, verdict.began_at, is_declared)


def _make_missing_messages(
    context: DiagnosisContext, verdict: Verdict, edge: WaitEdge
) -> tuple[str, str]:
    waiter = edge.wait.rank if edge.stream.peer is not None else None
    if edge.stream.peer is None:
        # By position: whether their calls are equal may be unknown.
        members = context.streams_by_group.get(edge.stream.group.key, {})
        ranks_inside = tuple(
            rank
            for rank in verdict.waiting
            if rank in members and members[rank].entered >= edge.wait.seq
        )
    else:
        ranks_inside = verdict.calls[0].ranks if verdict.calls else ()
    summary = messages.describe_not_entered(
        verdict.culprits,
        get_op_name(edge.stream, edge.wait.seq),
        edge.stream.group,
        edge.wait.seq,
        len(verdict.waiting),
        waiter,
        ranks_inside,
    )
    return summary, messages.format_stack_advice(len(verdict.culprits) > 1)


# By kind, what makes the summary and the advice: one entry for each of `KIND_PRECEDENCE`.
MESSAGE_MAKERS: dict[
    VerdictKind, Callable[[DiagnosisContext, Verdict, WaitEdge], tuple[str, str]]
] = {
    VerdictKind.EXITED_RANK: _make_exited_messages,
    VerdictKind.FROZEN_RANK: _make_frozen_messages,
    VerdictKind.LOST_NODE: _make_lost_messages,
    VerdictKind.STARTUP_STALL: _make_startup_messages,
    VerdictKind.MISSING_RANK: _make_missing_messages,
    VerdictKind.SLOW_RANK: _make_slow_messages,
}
