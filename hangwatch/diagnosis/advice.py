"""What a verdict's culprit is doing, as advice: from the stacks of its threads and of the processes that it waits for."""

from __future__ import annotations

from dataclasses import replace

from hangwatch.activity import EXIT, Activity, activity
from hangwatch.frames import innermost_user, is_user
from hangwatch.state import Process, Sample
from hangwatch.types import Kind, Lifecycle, Verdict

from .case import Case, seen

_TOLD = (Kind.MISSING_RANK, Kind.SLOW_RANK, Kind.FROZEN_RANK, Kind.EXITED_RANK, Kind.STARTUP_STALL)
_RECORDER_THREAD = "hangwatch"


def advised(case: Case, verdict: Verdict) -> Verdict:
    """The verdict with what its culprit's stack says in its advice; of several culprits, of the first whose stack says anything."""
    if verdict.kind not in _TOLD:
        return verdict
    for rank in verdict.culprits:
        process = case.attempt.ranks.get(rank)
        said = _doing(process, verdict.since) if process is not None else ""
        if process is not None and process.lifecycle is Lifecycle.DESTROYED:
            said = "called destroy_process_group while others still communicated."
        if said:
            subject = "It" if len(verdict.culprits) == 1 else f"Rank {rank}"
            generic = "" if verdict.kind is Kind.MISSING_RANK else f" {verdict.advice}"
            return replace(verdict, advice=f"{subject} {said}{generic}")
    return verdict


def _doing(process: Process, since: float) -> str:
    """``waits for a lock at interpreter exit: its thread ... . Look for ...``, to go on from its name."""
    taken = seen(process, since)
    if not taken:
        return ""
    found = activity(taken[-1].main)
    if found.inside is None and process.lifecycle is Lifecycle.EXITING:
        found = replace(found, inside=EXIT)
    if not found:
        return ""
    return f"{found}{_behind(found, taken[-1])}. {found.advice}".rstrip()


def _behind(found: Activity, sample: Sample) -> str:
    """The child process or the thread that keeps it waiting: the first that is somewhere in the user's code."""
    waits = found.waits
    if waits is None or not (waits.child or waits.thread):
        return ""
    others = [t for t in sample.threads if t is not sample.main and t.thread != _RECORDER_THREAD and (t.pid is not None) == waits.child]
    busy = next((t for t in others if any(map(is_user, t.frames))), None)
    if busy is None:
        return f": its {others[0].thread}" if waits.child and others else ""
    frame = innermost_user(busy.frames)
    named = f"its {busy.thread}" if waits.child else f"its thread {busy.thread}"
    at = f" is at {frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}" if frame is not None else ""
    does = activity(busy).waits
    return f": {named}{at}{f', where it {does.phrase}' if does is not None else ''}"
