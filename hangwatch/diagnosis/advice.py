"""Advice from a stack: what a verdict's culprit is doing, by the stacks of its threads and of the
child processes that it waits for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hangwatch.model.kinds import KINDS, KindSpec, Severity, StackAdvice, VerdictKind
from hangwatch.model.ranks import Lifecycle, ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.report.terminal import describe_kernels
from hangwatch.stacks.activities import (
    DEVICE,
    INTERPRETER_EXIT,
    NOTHING_KNOWN,
    SLEEP,
    Activity,
    classify_activity,
)
from hangwatch.stacks.frames import find_user_site, runs_user_code
from hangwatch.tracking.process import Process, StackSample

from .context import DiagnosisContext, find_newest_sample
from .graph.progress import (
    awaits_remote_call,
    find_working_threads,
    is_transferring,
    list_other_threads,
    list_remote_executions_since,
    waits_for_device,
)
from .messages import PHASE_HINT, describe_blocking_thread, format_exception

_MAX_CALLERS = 16  # ranks that are checked for a wait for a remote call
_MAX_EXECUTIONS_SHOWN = 3
_SLOW_NOT_STUCK_ADVICE = f"That makes progress: slow rather than stuck. {PHASE_HINT}"


def add_stack_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Adds to the verdict's advice what its culprit is doing: the first culprit whose stack shows it."""
    spec = KINDS[verdict.kind]
    if spec.stack_advice is StackAdvice.NONE:
        return verdict
    for process in context.attempt.find_processes(verdict.culprits):
        working_threads = find_working_threads(process, verdict.began_at)
        sample = find_newest_sample(process, verdict.began_at)
        thread = context.find_blocking_thread(process, verdict.group, verdict.began_at)
        whole_process = "It" if len(verdict.culprits) == 1 else f"Rank {process.rank}"
        subject = describe_blocking_thread(whole_process, thread)
        predicate = "holds the GIL." if subject != whole_process else ""
        if sample is not None:
            activity = _describe_activity(
                spec, process, sample, thread, working_threads, verdict.began_at
            )
            predicate = activity or predicate
        if verdict.kind is VerdictKind.EXITED_RANK and process.lifecycle is Lifecycle.DESTROYED:
            predicate = "called destroy_process_group while others still communicated."
        if not predicate:
            continue
        advice = f" {verdict.advice}"
        if spec.stack_advice is StackAdvice.INSTEAD:
            advice = ""
        elif spec.severity is Severity.WARNING and working_threads:
            advice = f" {_SLOW_NOT_STUCK_ADVICE}"
        return replace(verdict, advice=f"{subject} {predicate}{advice}")
    return verdict


def add_kernel_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Adds the kernels that the culprits' devices execute or, without a culprit, those of the ranks that
    wait, as far as they were read since the hang began and the summary does not name them.
    """
    attempt = context.attempt
    if attempt.kernels_at < verdict.began_at or not attempt.kernels_at:
        return verdict
    known = {}
    for process in attempt.find_processes(verdict.culprits or verdict.waiting):
        kernels = process.get_kernels_since(verdict.began_at)
        if kernels is not None:
            known[process.rank] = kernels
    text = describe_kernels(known)
    if not known or text in verdict.summary:
        return verdict
    return replace(verdict, advice=f"{verdict.advice} {text[0].upper()}{text[1:]}.".strip())


def add_exception_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Adds the exception that the first culprit is handling, if no rank that waits handles the same."""
    usual = set()
    for process in context.attempt.find_processes(verdict.waiting):
        if process.handling is not None:
            usual.add((process.handling.type, process.handling.site))
    for process in context.attempt.find_processes(verdict.culprits):
        handling = process.handling
        if handling is None or (handling.type, handling.site) in usual:
            continue
        place = f", raised at {handling.site}" if handling.site is not None else ""
        text = (
            f"Rank {process.rank} is handling {format_exception(handling)}{place}: it is in an except,"
            " finally or with statement."
        )
        return replace(verdict, advice=f"{text} {verdict.advice}".strip())
    return verdict


def add_remote_call_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Adds where other ranks execute remote calls, if a culprit may wait for one or, without a culprit, a
    rank that waits outside of recorded calls; and requests the stacks that show it. Whose calls they
    are is not known.
    """
    since = verdict.began_at
    candidates = verdict.culprits
    if not candidates:
        in_calls = context.graph.get_waiting_ranks()
        candidates = tuple(rank for rank in verdict.waiting if rank not in in_calls)
    alive = context.iter_alive(candidates[:_MAX_CALLERS])
    callers = [process for process in alive if awaits_remote_call(process, since)]
    if not callers:
        return verdict
    for caller in callers:
        for rank in context.list_called_samples_due(caller, since):
            context.request_stack(rank)
    texts: list[str] = []
    hidden_count = 0
    for rank, process in sorted(context.processes.items()):
        if callers == [process]:
            continue
        for thread in list_remote_executions_since(process, since):
            if len(texts) == _MAX_EXECUTIONS_SHOWN:
                hidden_count += 1
                continue
            name = thread.thread.removeprefix("thread ")
            place = f"its thread {name} is at {find_user_site(thread)}"
            waits = classify_activity(thread).waits
            if waits:
                place = f"{place}, where it {waits.phrase}"
            texts.append(f"Rank {rank} executes a remote call, which may be this one: {place}.")
    if hidden_count:
        texts.append(f"So do {hidden_count} more threads.")
    return replace(verdict, advice=" ".join([verdict.advice, *texts]).strip())


def _describe_activity(
    spec: KindSpec,
    process: Process,
    sample: StackSample,
    thread: ThreadStack | None,
    working_threads: Collection[ThreadStack],
    since: float,
) -> str:
    """A predicate such as ``waits for a lock at interpreter exit: its thread ... . Look for ...`` on the
    thread that keeps the rank from its call; empty if the stack shows nothing.
    """
    is_slow = spec.severity is Severity.WARNING
    activity = classify_activity(thread)
    # A frozen rank does not sleep, whatever its line shows; a sleep is normal in a declared phase.
    may_sleep = spec.ignores_sleep or (is_slow and process.phase is not None)
    if may_sleep and activity.waits is SLEEP:
        activity = replace(activity, waits=NOTHING_KNOWN)
    if thread is sample.calling_thread and waits_for_device(process, since):
        activity = replace(activity, waits=DEVICE)
    if not activity.inside and process.lifecycle is Lifecycle.EXITING:
        activity = replace(activity, inside=INTERPRETER_EXIT)
    if not activity:
        return ""
    text = f"{activity}."
    if thread is sample.calling_thread:
        text = f"{activity}{_describe_blocking_child(activity, sample, working_threads)}."
    # Work that makes progress needs no advice. The general advice for slow ranks already mentions
    # `hangwatch.phase`.
    makes_progress = bool(working_threads) or is_transferring(process, since)
    if activity.advice and not (is_slow and makes_progress):
        text += f" {activity.advice}"
    if activity.may_take_long and not is_slow:
        text += f" {PHASE_HINT}"
    return text


def _describe_blocking_child(
    activity: Activity, sample: StackSample, working_threads: Collection[ThreadStack]
) -> str:
    """What it waits for: a child process or thread that works, else the first in user code."""
    waits = activity.waits
    candidates = [
        thread
        for thread in list_other_threads(sample)
        if waits.may_wait_for(thread) or (waits.waits_for_child and thread.pid is not None)
    ]
    candidates.sort(key=lambda t: (t not in working_threads, not waits.may_wait_for(t)))
    blocking = next(filter(runs_user_code, candidates), None)
    if blocking is None or (working_threads and blocking not in working_threads):
        children = [thread for thread in candidates if thread.pid is not None]
        return f": its {children[0].thread}" if children else ""
    text = f": its {blocking.thread}"
    if blocking.pid is None:
        text = f": its thread {blocking.thread}"
    site = find_user_site(blocking)
    if site is not None:
        text += f" is at {site}"
    its_waits = classify_activity(blocking).waits
    if its_waits:
        text += f", where it {its_waits.phrase}"
    return text
