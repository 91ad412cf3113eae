"""What ranks that others wait for are doing instead of entering the call, and the verdict on them, with
the summary and the advice of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.ranks import Lifecycle, Ranks
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.process import FreezeReason

from ..context import DiagnosisContext, find_last_site, find_newest_sample
from ..graph.edges import WaitEdge, has_entered
from ..graph.progress import (
    find_working_threads,
    get_transfer_rate,
    has_stack_changed,
    has_two_samples,
    is_busy,
    is_transferring,
)
from ..messages import (
    PHASE_HINT,
    Messages,
    describe_blocking_thread,
    describe_not_entered,
    describe_position,
    describe_ranks,
    describe_ranks_with,
    format_exception,
    format_waiter_count,
    pluralize,
)
from .start import add_twin_advice


def make_absence_verdict(
    context: DiagnosisContext,
    kind: VerdictKind,
    culprits: Ranks,
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
    severity = KINDS[kind].severity
    if kind is VerdictKind.STARTUP_STALL:
        severity = context.get_start_severity(began_at)
    site, where = None, ""
    # The first one that an exception or a stack shows on a line of the user's code.
    for process in context.attempt.find_processes(culprits):
        whole_process = f"rank {process.rank}" if len(culprits) > 1 else "it"
        if process.exception is not None and process.has_raised:
            site = process.exception.site
            at = f" at {site}" if site is not None else ""
            where = f": {whole_process} raised {format_exception(process.exception)}{at}"
            break
        thread = context.find_blocking_thread(process, edge.group, began_at)
        site = find_user_site(thread)
        if site is not None:
            where = f": {describe_blocking_thread(whole_process, thread)} is at {site}"
            break
    verdict = Verdict(
        kind=kind,
        severity=severity,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=edge.group,
        seq=edge.seq,
        calls=context.find_missing_call(edge, waiting),
        waits=context.select_waits_for(culprits, waiting, edge),
        began_at=began_at,
        is_confirmed=due,
        site=site,
    )
    summary, advice = messages or MESSAGE_MAKERS[kind](context, verdict, edge)
    if kind is not VerdictKind.EXITED_RANK:
        summary += where
    return replace(verdict, summary=summary, advice=advice)


def _describe_startup(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    culprits = verdict.culprits
    ranks = describe_ranks(culprits)
    waiters = format_waiter_count(len(verdict.waiting))
    first = context.processes.get(culprits[0])
    again = ""
    if first is not None and first.lifecycle is Lifecycle.DESTROYED:
        again = " again"
    summary = f"{ranks} never reached init_process_group{again}, in which {waiters}"
    if edge.group.is_declared:
        summary = f"{ranks} never started, for which {waiters} in {edge.op}"
    return summary, add_twin_advice(context, _format_startup_advice(context, culprits))


def _format_startup_advice(context: DiagnosisContext, absent: Ranks) -> str:
    """Advice for all absent ranks; if their reasons differ, for the most basic reason."""
    not_reporting = tuple(rank for rank in absent if rank not in context.processes)
    if not_reporting:
        subject = pluralize("It", absent)
        if len(not_reporting) < len(absent):
            subject = describe_ranks(not_reporting).capitalize()
        return (
            f"{subject} never reported: check that as many processes were started as WORLD_SIZE says,"
            " that every node started, and that every node can reach HANGWATCH_URL. The launcher's log"
            " may say more."
        )
    lifecycles = {context.processes[rank].lifecycle for rank in absent}
    if Lifecycle.ALIVE in lifecycles:
        advice = (
            "Its process runs but has not imported torch: check what it does before that (downloads,"
            " imports from a slow disk)."
        )
    elif Lifecycle.DESTROYED in lifecycles:
        advice = (
            "It has destroyed its process groups and not called init_process_group again: its stack"
            " shows what it does instead."
        )
    else:
        advice = (
            "Its process runs but has not called init_process_group: its stack shows what it does"
            " instead."
        )
    return pluralize(advice, absent)


def _describe_exited(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    culprits = verdict.culprits
    process = context.processes[culprits[0]]
    did = "finished"
    if process.is_alive and process.lifecycle is Lifecycle.EXITING:
        did = "begun to exit"
    elif process.is_alive:
        did = "destroyed the process group"
    entered = tuple(rank for rank in culprits if has_entered(edge.stream, rank, edge.seq))
    summary = (
        f"{describe_ranks_with(culprits, 'has')} {did} while"
        f" {format_waiter_count(len(verdict.waiting))} in {edge.op}"
        f" ({describe_position(edge.group, edge.seq)})"
    )
    they = pluralize("it", culprits)
    advice = (
        f"The others made one more call than {they} did: look for uneven data or a loop that ends"
        " early."
    )
    if entered:
        subject = they if len(entered) == len(culprits) else describe_ranks(entered)
        advice = (
            f"{subject.capitalize()} had entered this call, too, and did not wait for its completion: wait"
            " for asynchronous calls before the script ends."
        )
    return summary, advice


def _describe_frozen(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    culprits = verdict.culprits
    process = context.processes[culprits[0]]
    reason = process.freeze_reason(context.now)
    them = "them" if len(culprits) > 1 else "it"
    if reason is FreezeReason.STOPPED and process.activity.state == "t":  # as in /proc
        condition = "stopped by a debugger"
        advice = f"Detach the debugger that traces {them}."
    elif reason is FreezeReason.STOPPED:
        condition = "stopped (SIGSTOP or job control)"
        advice = f"Resume {them} with kill -CONT."
    elif reason is FreezeReason.UNINTERRUPTIBLE:
        condition = "in uninterruptible sleep"
        subject = pluralize("It is", culprits)
        advice = f"{subject} blocked in the kernel: check disks, network file systems and drivers."
    else:
        condition = "running native code that holds the GIL"
        shows = pluralize("its stack shows", culprits)
        advice = f"No Python code can run there: {shows} which native call does not return."
    if reason is FreezeReason.GIL_HELD and not find_newest_sample(process, verdict.began_at):
        # The line of the newest recorded call replaces the stack.
        last_site = find_last_site(process)
        after = "" if last_site is None else f", which was at {last_site}"
        advice = (
            "No Python code can run there, and no stack is known: look for a native call after the"
            f" newest recorded call{after}."
        )
    summary = (
        f"{describe_ranks_with(culprits, 'is')} {condition};"
        f" {format_waiter_count(len(verdict.waiting))} in {edge.op}"
    )
    return summary, advice


def _describe_lost(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    host = context.processes[verdict.culprits[0]].host
    summary = (
        f"host {host} with {describe_ranks(verdict.culprits)} no longer reports;"
        f" {format_waiter_count(len(verdict.waiting))} in {edge.op}"
    )
    advice = "Check that the host is up and its network works. Its last known state is shown here."
    return summary, advice


def _describe_slow(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    """The advice has the reason why the rank counts as slow and not as stuck."""
    since = verdict.began_at
    process = context.processes[verdict.culprits[0]]
    them = "them" if len(verdict.culprits) > 1 else "it"
    in_phase = ""
    if process.phase is not None and process.phase.name:
        in_phase = f" in its phase {process.phase.name!r}"
    summary = (
        f"{describe_ranks_with(verdict.culprits, 'is')} still working{in_phase} while"
        f" {format_waiter_count(len(verdict.waiting))} for {them} in {edge.op}"
    )
    if context.is_in_phase(process):
        advice = "Its script declared this phase: it may take until the limit of the phase."
        return summary, advice
    if is_transferring(process, since):
        rate = get_transfer_rate(process, since) / 1e6
        reason = f"It moves data, {rate:.1f} MB/s: it reads, writes, sends or receives."
    elif has_stack_changed(process, since):
        reason = "Its stack changes: slow rather than stuck."
    elif is_busy(process):
        is_sampled_twice = has_two_samples(process, since)
        where = " in the same function in every sample" if is_sampled_twice else ""
        reason = f"It uses the CPU{where}: a long computation, or a loop that waits."
    elif find_working_threads(process, since):
        reason = "What it waits for, a thread or a child process of its own, is at work."
    elif callees := context.list_working_callees(process, since):
        reason = f"It waits for a remote call, and {describe_ranks_with(callees, 'works')} on one."
    else:
        reason = "It made progress elsewhere in the meantime: slow rather than stuck."
    return summary, f"{reason} {PHASE_HINT}"


def _describe_missing(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    ranks_inside = verdict.calls[0].ranks if verdict.calls else ()
    if edge.stream.peer is None:
        # Positions count here, since it may be unknown whether the calls are equal.
        members = context.get_members(edge.group)
        ranks_inside = tuple(
            rank
            for rank in verdict.waiting
            if rank in members and members[rank].entered >= edge.seq
        )
    summary = describe_not_entered(
        verdict.culprits,
        edge.op,
        edge.group,
        edge.seq,
        len(verdict.waiting),
        edge.rank_at_other_end,
        ranks_inside,
    )
    advice = "Its stack shows what it does instead of joining the others."
    return summary, pluralize(advice, verdict.culprits)


# The functions that make the summary and the advice. The order of the kinds is their precedence.
MESSAGE_MAKERS: dict[VerdictKind, Callable[[DiagnosisContext, Verdict, WaitEdge], Messages]] = {
    VerdictKind.EXITED_RANK: _describe_exited,
    VerdictKind.FROZEN_RANK: _describe_frozen,
    VerdictKind.LOST_NODE: _describe_lost,
    VerdictKind.STARTUP_STALL: _describe_startup,
    VerdictKind.MISSING_RANK: _describe_missing,
    VerdictKind.SLOW_RANK: _describe_slow,
}
# If one chain of waits has several ends, those of the first kind in this order are the cause.
KIND_PRECEDENCE = tuple(MESSAGE_MAKERS)
