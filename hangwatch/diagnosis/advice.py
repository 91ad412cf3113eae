"""What a verdict's culprit is doing, as advice: from the stacks of its threads and of the processes
that it waits for.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.diagnosis.graph.progress import find_working_threads, list_other_threads
from hangwatch.model.kinds import VerdictKind, select_kinds
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.activities import INTERPRETER_EXIT, Activity, classify_activity
from hangwatch.stacks.frames import find_innermost_user_frame, is_user_frame
from hangwatch.tracking.process import Process, StackSample

from . import messages
from .context import DiagnosisContext, find_blocking_thread, find_newest_sample

_SLEEP_PHRASE = "sleeps"
_ADVISED_KINDS = select_kinds(lambda spec: spec.advises_from_stack)


def add_stack_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict with what its culprit's stack says in its advice; of several culprits, of the
    first whose stack says anything.
    """
    if verdict.kind not in _ADVISED_KINDS:
        return verdict
    alone = len(verdict.culprits) == 1
    for rank in verdict.culprits:
        if (process := context.attempt.processes.get(rank)) is None:
            continue
        sample = find_newest_sample(process, verdict.began_at)
        thread = find_blocking_thread(context, process, sample) if sample is not None else None
        working = find_working_threads(process, verdict.began_at)
        slow = verdict.kind is VerdictKind.SLOW_RANK
        # No sleep keeps a frozen one, whatever its line says, and in a phase that it declared it
        # may sleep.
        may_sleep = verdict.kind is VerdictKind.FROZEN_RANK or (slow and process.phase is not None)
        said = (
            _describe_activity(process, sample, thread, working, slow=slow, may_sleep=may_sleep)
            if sample is not None
            else ""
        )
        if verdict.kind is VerdictKind.EXITED_RANK and process.lifecycle is Lifecycle.DESTROYED:
            said = "called destroy_process_group while others still communicated."
        subject = messages.describe_blocking_thread(
            whole := "It" if alone else f"Rank {rank}", thread
        )
        if not said and subject != whole:
            said = "keeps the GIL."
        if said:
            generic = (
                ""
                if verdict.kind is VerdictKind.MISSING_RANK
                else f" {messages.SLOW_NOT_STUCK_ADVICE if slow and working else verdict.advice}"
            )
            return replace(verdict, advice=f"{subject} {said}{generic}")
    return verdict


def _describe_activity(
    process: Process,
    sample: StackSample,
    thread: ThreadStack | None,
    working: list[ThreadStack],
    *,
    slow: bool,
    may_sleep: bool,
) -> str:
    """``waits for a lock at interpreter exit: its thread ... . Look for ...``, to go on from its
    name.

    Where it is ``slow``, the verdict's own advice tells of `hangwatch.phase`, and what works is
    nothing to look at. Where it ``may_sleep``, that says nothing.
    """
    found = classify_activity(thread)
    if may_sleep and found.waits is not None and found.waits.phrase == _SLEEP_PHRASE:
        found = replace(found, waits=None)
    if found.inside is None and process.lifecycle is Lifecycle.EXITING:
        found = replace(found, inside=INTERPRETER_EXIT)
    if not found:
        return ""
    behind = (
        _describe_blocking_child(found, sample, working) if thread is sample.main_thread else ""
    )
    advice = "" if slow and working else f" {found.advice}" if found.advice else ""
    declares = f" {messages.PHASE_HINT}" if found.may_take_long and not slow else ""
    return f"{found}{behind}.{advice}{declares}"


def _describe_blocking_child(
    activity: Activity, sample: StackSample, working: list[ThreadStack]
) -> str:
    """The child process or the thread that keeps it waiting: one that works, else the first that is
    somewhere in the user's code.
    """
    waits = activity.waits
    if waits is None:
        return ""
    able = [
        t
        for t in list_other_threads(sample)
        if waits.may_wait_for(t) or (waits.waits_for_child and t.pid is not None)
    ]
    able.sort(key=lambda t: (t not in working, not waits.may_wait_for(t)))
    busy = next((t for t in able if any(map(is_user_frame, t.frames))), None)
    if busy is None or (working and busy not in working):
        children = [t for t in able if t.pid is not None]
        return f": its {children[0].thread}" if children else ""
    frame = find_innermost_user_frame(busy.frames)
    named = f"its {busy.thread}" if busy.pid is not None else f"its thread {busy.thread}"
    at = (
        f" is at {frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}"
        if frame is not None
        else ""
    )
    does = classify_activity(busy).waits
    return f": {named}{at}{f', where it {does.phrase}' if does is not None else ''}"
