"""What ranks that others wait for are doing instead of entering the call, and the verdict on them, with
the summary and the advice of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.process import FreezeReason, Process

from ..context import (
    DiagnosisContext,
    find_last_site,
    find_newest_sample,
)
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
    format_waiter_count,
)
from .start import add_twin_advice


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
    severity = KINDS[kind].severity
    if kind is VerdictKind.STARTUP_STALL:
        severity = context.get_start_severity(began_at)
    site, where = None, ""
    for rank in culprits:  # the first one that a stack shows on a line of the user's code
        process = context.processes.get(rank)
        if process is None:
            continue
        thread = context.find_blocking_thread(process, edge.group, began_at)
        site = find_user_site(thread)
        if site is not None:
            subject = describe_blocking_thread(
                f"rank {rank}" if len(culprits) > 1 else "it", thread
            )
            where = f": {subject} is at {site}"
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
    if site is not None and kind is not VerdictKind.EXITED_RANK:
        summary += where
    return replace(verdict, summary=summary, advice=advice)


def _describe_startup(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    processes = {rank: context.processes.get(rank) for rank in verdict.culprits}
    ranks = describe_ranks(verdict.culprits)
    waiters = format_waiter_count(len(verdict.waiting))
    first = processes[verdict.culprits[0]]
    was_destroyed = first is not None and first.lifecycle is Lifecycle.DESTROYED
    again = " again" if was_destroyed else ""
    summary = f"{ranks} never reached init_process_group{again}, in which {waiters}"
    if edge.group.is_declared:
        summary = f"{ranks} never started, for which {waiters} in {edge.op}"
    advice = _format_startup_advice(processes)
    return summary, add_twin_advice(context, advice)


def _format_startup_advice(absent_processes: Mapping[int, Process | None]) -> str:
    """Advice for all absent ranks; if their reasons differ, for the most basic reason."""
    are_several = len(absent_processes) > 1
    not_reporting = tuple(rank for rank, p in absent_processes.items() if p is None)
    if not_reporting:
        subject = "They" if are_several else "It"
        if len(not_reporting) < len(absent_processes):
            subject = describe_ranks(not_reporting).capitalize()
        return (
            f"{subject} never reported: check that as many processes were started as WORLD_SIZE says,"
            " that every node started, and that every node can reach HANGWATCH_URL. The launcher's log"
            " may say more."
        )
    if are_several:
        they_run, they_have, their = "Their processes run but have", "They have", "their"
        they_do, stacks_show = "they do", "their stacks show"
    else:
        they_run, they_have, their = "Its process runs but has", "It has", "its"
        they_do, stacks_show = "it does", "its stack shows"
    lifecycles = {p.lifecycle for p in absent_processes.values() if p is not None}
    if Lifecycle.ALIVE in lifecycles:
        return (
            f"{they_run} not imported torch: check what {they_do} before that (downloads, imports"
            " from a slow disk)."
        )
    if Lifecycle.DESTROYED in lifecycles:
        return (
            f"{they_have} destroyed {their} process groups and not called init_process_group again:"
            f" {stacks_show} what {they_do} instead."
        )
    return f"{they_run} not called init_process_group: {stacks_show} what {they_do} instead."


def _describe_exited(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    process = context.processes.get(verdict.culprits[0])
    has_ended = process is None or not process.is_alive
    did = "finished" if has_ended else "destroyed the process group"
    have, they = ("have", "they") if len(verdict.culprits) > 1 else ("has", "it")
    entered = tuple(rank for rank in verdict.culprits if has_entered(edge.stream, rank, edge.seq))
    summary = (
        f"{describe_ranks(verdict.culprits)} {have} {did} while"
        f" {format_waiter_count(len(verdict.waiting))} in {edge.op}"
        f" ({describe_position(edge.group, edge.seq)})"
    )
    advice = (
        f"The others made one more call than {they} did: look for uneven data or a loop that ends"
        " early."
    )
    if entered:
        subject = they if len(entered) == len(verdict.culprits) else describe_ranks(entered)
        advice = (
            f"{subject.capitalize()} had entered this call, too, and did not wait for its completion: wait"
            " for asynchronous calls before the script ends."
        )
    return summary, advice


def _describe_frozen(context: DiagnosisContext, verdict: Verdict, edge: WaitEdge) -> Messages:
    process = context.processes[verdict.culprits[0]]
    reason = process.freeze_reason(context.now)
    if len(verdict.culprits) > 1:
        are, they_are, them, stacks_show = "are", "They are", "them", "their stacks show"
    else:
        are, they_are, them, stacks_show = "is", "It is", "it", "its stack shows"
    if reason is FreezeReason.STOPPED and process.activity.state == "t":  # as in /proc
        condition = "stopped by a debugger"
        advice = f"Detach the debugger that traces {them}."
    elif reason is FreezeReason.STOPPED:
        condition = "stopped (SIGSTOP or job control)"
        advice = f"Resume {them} with kill -CONT."
    elif reason is FreezeReason.UNINTERRUPTIBLE:
        condition = "in uninterruptible sleep"
        advice = f"{they_are} blocked in the kernel: check disks, network file systems and drivers."
    else:
        condition = "running native code that holds the GIL"
        advice = f"No Python code can run there: {stacks_show} which native call does not return."
    if reason is FreezeReason.GIL_HELD and not find_newest_sample(process, verdict.began_at):
        # The line of the newest recorded call replaces the stack.
        last_site = find_last_site(process)
        after = "" if last_site is None else f", which was at {last_site}"
        advice = (
            "No Python code can run there, and no stack is known: look for a native call after the"
            f" newest recorded call{after}."
        )
    summary = (
        f"{describe_ranks(verdict.culprits)} {are} {condition};"
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
    process = context.processes[verdict.culprits[0]]
    are, them = ("are", "them") if len(verdict.culprits) > 1 else ("is", "it")
    phase = None if process.phase is None else process.phase.name
    in_phase = f" in its phase {phase!r}" if phase else ""
    summary = (
        f"{describe_ranks(verdict.culprits)} {are} still working{in_phase} while"
        f" {format_waiter_count(len(verdict.waiting))} for {them} in {edge.op}"
    )
    if context.is_in_phase(process):
        advice = "Its script declared this phase: it may take until the limit of the phase."
        return summary, advice
    if is_transferring(process, verdict.began_at):
        rate = get_transfer_rate(process, verdict.began_at) / 1e6
        reason = f"It moves data, {rate:.1f} MB/s: it reads, writes, sends or receives."
    elif has_stack_changed(process, verdict.began_at):
        reason = "Its stack changes: slow rather than stuck."
    elif is_busy(process):
        is_sampled_twice = has_two_samples(process, verdict.began_at)
        where = " in the same function in every sample" if is_sampled_twice else ""
        reason = f"It uses the CPU{where}: a long computation, or a loop that waits."
    elif find_working_threads(process, verdict.began_at):
        reason = "What it waits for, a thread or a child process of its own, is at work."
    elif callees := context.list_working_callees(process.rank, verdict.began_at):
        verb = "work" if len(callees) > 1 else "works"
        reason = f"It waits for a remote call, and {describe_ranks(callees)} {verb} on one."
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
    stacks_show = "Its stack shows what it does"
    if len(verdict.culprits) > 1:
        stacks_show = "Their stacks show what they do"
    return summary, f"{stacks_show} instead of joining the others."


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
