"""The verdict on ranks that others wait for, with the summary and the advice of its kind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

from hangwatch.model.groups import Group
from hangwatch.model.kinds import KINDS, Severity, Timing, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.report.recovery import get_signal_name
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.process import FreezeReason, Process

from ..context import (
    DiagnosisContext,
    find_blocking_user_thread,
    find_last_site,
    find_missing_call,
    find_newest_sample,
    select_waits,
)
from ..graph.edges import WaitEdge
from ..graph.progress import has_stack_changed, has_two_samples, is_busy
from ..messages import (
    PHASE_HINT,
    Messages,
    describe_blocking_thread,
    describe_not_entered,
    describe_position,
    describe_ranks,
    format_exception,
    format_waiter_count,
)
from .chain_ends import is_in_phase

_CRASH_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
)


def make_absence_verdict(
    context: DiagnosisContext,
    kind: VerdictKind,
    culprits: tuple[int, ...],
    waiting: set[int],
    edge: WaitEdge,
    began_at: float,
    *,
    due: bool,
    messages: Messages | None = None,
) -> Verdict:
    """The verdict on ``culprits``, for which others wait; ``edge`` is one of these waits. ``messages`` are
    the summary and the advice, if those of the kind do not fit.
    """
    blocking_thread = find_blocking_user_thread(context, culprits, began_at, edge.group)
    verdict = Verdict(
        kind=kind,
        severity=get_severity(context, kind, began_at),
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=edge.group,
        seq=edge.seq,
        calls=find_missing_call(context, edge, waiting),
        waits=select_waits(context, waiting),
        began_at=began_at,
        is_confirmed=due,
        site=find_user_site(blocking_thread[1]) if blocking_thread is not None else None,
    )
    summary, advice = messages or MESSAGE_MAKERS[kind](context, verdict, edge)
    if blocking_thread is not None and kind is not VerdictKind.EXITED_RANK:
        rank, thread = blocking_thread
        subject = describe_blocking_thread(f"rank {rank}" if len(culprits) > 1 else "it", thread)
        summary = f"{summary}: {subject} is at {verdict.site}"
    return replace(verdict, summary=summary, advice=advice)


def get_severity(context: DiagnosisContext, kind: VerdictKind, began_at: float) -> Severity:
    """The severity of a verdict of this kind. A late start is a warning at first: slow imports, image
    pulls and launchers delay it without a fault.
    """
    spec = KINDS[kind]
    awaited_s = context.now - began_at
    if spec.timing is Timing.AFTER_STALL_THEN_ALERT and awaited_s < context.limits.startup_after_s:
        return Severity.WARNING
    return spec.severity


def _describe_startup(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    processes = {rank: context.attempt.processes.get(rank) for rank in verdict.culprits}
    ranks, waiters = describe_ranks(verdict.culprits), format_waiter_count(len(verdict.waiting))
    if edge.group.is_declared:
        op = edge.op
        summary = f"{ranks} never started, for which {waiters} in {op}"
    else:
        process = processes[verdict.culprits[0]]
        was_destroyed = process is not None and process.lifecycle is Lifecycle.DESTROYED
        again = " again" if was_destroyed else ""
        summary = f"{ranks} never reached init_process_group{again}, in which {waiters}"
    return summary, _format_startup_advice(processes)


def _format_startup_advice(absent_processes: Mapping[int, Process | None]) -> str:
    """Advice for all absent ranks; if their reasons differ, for the most basic reason."""
    not_reporting = tuple(rank for rank, p in absent_processes.items() if p is None)
    if not_reporting:
        if len(not_reporting) < len(absent_processes):
            subject = describe_ranks(not_reporting).capitalize()
        else:
            subject = "They" if len(absent_processes) > 1 else "It"
        return (
            f"{subject} never reported: check that as many processes were started as WORLD_SIZE says,"
            " that every node started, and that every node can reach HANGWATCH_URL. The launcher's log"
            " may say more."
        )
    lifecycles = {p.lifecycle for p in absent_processes.values() if p is not None}
    if len(absent_processes) > 1:
        subject, run, have, possessive = "Their processes", "run", "have", "their"
        they_have, they_do, stacks_show = "They have", "they do", "their stacks show"
    else:
        subject, run, have, possessive = "Its process", "runs", "has", "its"
        they_have, they_do, stacks_show = "It has", "it does", "its stack shows"
    if Lifecycle.ALIVE in lifecycles:
        return (
            f"{subject} {run} but {have} not imported torch: check what {they_do} before that"
            " (downloads, imports from a slow disk)."
        )
    if Lifecycle.DESTROYED in lifecycles:
        return (
            f"{they_have} destroyed {possessive} process groups and not called init_process_group"
            f" again: {stacks_show} what {they_do} instead."
        )
    return (
        f"{subject} {run} but {have} not called init_process_group: {stacks_show} what {they_do}"
        " instead."
    )


def _describe_exited(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    culprits = verdict.culprits
    process = context.attempt.processes.get(culprits[0])
    has_ended = process is None or not process.is_alive
    return describe_exited_ranks(
        culprits, has_ended, len(verdict.waiting), edge.op, edge.group, edge.seq
    )


def _describe_frozen(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    process = context.attempt.processes[verdict.culprits[0]]
    reason = process.freeze_reason(context.now)
    condition, advice = _describe_freeze(reason, process.activity.state, len(verdict.culprits) > 1)
    has_stack = find_newest_sample(process, verdict.began_at) is not None
    if reason is FreezeReason.GIL_HELD and not has_stack:
        # The line of the newest recorded call stands in for a stack.
        last_site = find_last_site(process)
        after = "" if last_site is None else f", which was at {last_site}"
        advice = (
            "No Python code can run there, and no stack is known: look for a native call after the"
            f" newest recorded call{after}."
        )
    summary = (
        f"{describe_ranks(verdict.culprits)} {condition};"
        f" {format_waiter_count(len(verdict.waiting))} in {edge.op}"
    )
    return summary, advice


def _describe_freeze(reason: FreezeReason | None, state: str, are_several: bool) -> Messages:
    """The condition and the advice. ``state`` is the process state in /proc."""
    be, pronoun = ("are", "them") if are_several else ("is", "it")
    if reason is FreezeReason.STOPPED and state == "t":
        return f"{be} stopped by a debugger", f"Detach the debugger that traces {pronoun}."
    if reason is FreezeReason.STOPPED:
        return f"{be} stopped (SIGSTOP or job control)", f"Resume {pronoun} with kill -CONT."
    if reason is FreezeReason.UNINTERRUPTIBLE:
        blocked = "They are blocked" if are_several else "It is blocked"
        advice = f"{blocked} in the kernel: check disks, network file systems and drivers."
        return f"{be} in uninterruptible sleep", advice
    stacks_show = "their stacks show" if are_several else "its stack shows"
    return (
        f"{be} running native code that holds the GIL",
        f"No Python code can run there: {stacks_show} which native call does not return.",
    )


def _describe_lost(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    process = context.attempt.processes[verdict.culprits[0]]
    op = edge.op
    return describe_lost_node(process.host, verdict.culprits, len(verdict.waiting), op)


def _describe_slow(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    process = context.attempt.processes[verdict.culprits[0]]
    are, them = ("are", "them") if len(verdict.culprits) > 1 else ("is", "it")
    phase = None if process.phase is None else process.phase.name
    in_phase = f" in its phase {phase!r}" if phase else ""
    summary = (
        f"{describe_ranks(verdict.culprits)} {are} still working{in_phase} while"
        f" {format_waiter_count(len(verdict.waiting))} for {them} in"
        f" {edge.op}"
    )
    is_declared = is_in_phase(context, process)
    return summary, _format_slow_rank_advice(process, verdict.began_at, is_declared)


def _format_slow_rank_advice(process: Process, since: float, is_in_phase: bool) -> str:
    """The reason why the rank counts as slow and not as stuck."""
    if is_in_phase:
        return "Its script declared this phase: it may take until the limit of the phase."
    if has_stack_changed(process, since):
        return f"Its stack changes: slow rather than stuck. {PHASE_HINT}"
    if is_busy(process):
        where = " in the same function in every sample" if has_two_samples(process, since) else ""
        return f"It uses the CPU{where}: a long computation, or a loop that waits. {PHASE_HINT}"
    return f"It made progress elsewhere in the meantime: slow rather than stuck. {PHASE_HINT}"


def _describe_missing(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    waiter = edge.rank_at_other_end
    if edge.stream.peer is None:
        # Positions count here, since it may be unknown whether the calls are equal.
        members = context.streams_by_group.get(edge.group.key, {})
        ranks_inside = tuple(
            rank
            for rank in verdict.waiting
            if rank in members and members[rank].entered >= edge.seq
        )
    else:
        ranks_inside = verdict.calls[0].ranks if verdict.calls else ()
    summary = describe_not_entered(
        verdict.culprits,
        edge.op,
        edge.group,
        edge.seq,
        len(verdict.waiting),
        waiter,
        ranks_inside,
    )
    are_several = len(verdict.culprits) > 1
    stacks_show = (
        "Their stacks show what they do" if are_several else "Its stack shows what it does"
    )
    return summary, f"{stacks_show} instead of joining the others."


# The functions that make the summary and the advice, by kind: one for each of `KIND_PRECEDENCE`.
MESSAGE_MAKERS: dict[VerdictKind, Callable[[DiagnosisContext, Verdict, WaitEdge], Messages]] = {
    VerdictKind.EXITED_RANK: _describe_exited,
    VerdictKind.FROZEN_RANK: _describe_frozen,
    VerdictKind.LOST_NODE: _describe_lost,
    VerdictKind.STARTUP_STALL: _describe_startup,
    VerdictKind.MISSING_RANK: _describe_missing,
    VerdictKind.SLOW_RANK: _describe_slow,
}


def describe_death(process: Process) -> str:
    """The summary for a rank that failed: the exception that it raised, which comes before whatever ends
    the process and may not have ended it yet, or how it ended.
    """
    exception, end = process.exception, process.exit
    if exception is not None:
        raised = f"rank {process.rank} raised {format_exception(exception)}"
        return raised if exception.site is None else f"{raised} at {exception.site}"
    if end is not None and end.signal:
        return f"rank {process.rank} was killed by {get_signal_name(end.signal)}"
    if end is None or end.exit_status is None:
        return f"rank {process.rank} vanished"
    return f"rank {process.rank} exited with status {end.exit_status}"


def format_dead_rank_advice(
    process: Process, independent_failures: tuple[Process, ...] | None
) -> str:
    """``independent_failures`` are other ranks with an exception that may be unrelated; None if it
    is not known whether there are any.
    """
    if process.exception is not None:
        if independent_failures is None:
            return "Its exception came first."
        if not independent_failures:
            return "Its exception came first; the errors of other ranks are consequences of it."
        types = {p.exception.type for p in independent_failures if p.exception is not None}
        raised = types.pop() if len(types) == 1 else "exceptions"
        ranks = describe_ranks(tuple(p.rank for p in independent_failures))
        return f"Its exception came first; {ranks} also raised {raised}, which may be unrelated."
    end = process.exit
    if end is not None and end.signal == signal.SIGKILL:
        return (
            "SIGKILL usually comes from the kernel's out-of-memory killer or from scancel: check"
            " dmesg and the host's memory."
        )
    if end is not None and end.signal in _CRASH_SIGNALS:
        return (
            "It crashed in native code: check its last lines on stderr, and enable core files"
            " (ulimit -c unlimited)."
        )
    if end is not None and end.signal is None and end.exit_status is None:
        return "Its node agent could not read its exit status: check its launcher's log."
    return "Check its last lines on stderr: it ended before the other ranks."


def describe_exited_ranks(
    ranks: tuple[int, ...], has_ended: bool, waiter_count: int, op: str, group: Group, seq: int
) -> Messages:
    """The summary and the advice."""
    have, they = ("have", "they") if len(ranks) > 1 else ("has", "it")
    did = "finished" if has_ended else "destroyed the process group"
    summary = (
        f"{describe_ranks(ranks)} {have} {did} while {format_waiter_count(waiter_count)} in {op}"
        f" ({describe_position(group, seq)})"
    )
    advice = (
        f"The others made one more call than {they} did: look for uneven data or a loop that ends"
        " early."
    )
    return summary, advice


def describe_lost_node(host: str, ranks: tuple[int, ...], waiter_count: int, op: str) -> Messages:
    """The summary and the advice."""
    summary = (
        f"host {host} with {describe_ranks(ranks)} no longer reports;"
        f" {format_waiter_count(waiter_count)} in {op}"
    )
    advice = "Check that the host is up and its network works. Its last known state is shown here."
    return summary, advice
