"""The evidence of an incident, taken from the state of its attempt: calls, processes and stacks. Pure.

Whatever differs between two reads of an unchanged job, such as the age of a call, is left out, so
that an incident only counts as changed when its document changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.incidents import MergedStack, ProcessSnapshot
from hangwatch.model.threads import RECORDER_THREAD_NAME, Frame, ThreadStack
from hangwatch.model.verdicts import AlignedPair, Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process, StackSample

MAX_THREADS_SHOWN = 16  # of one culprit
MAX_DETAILED_CULPRITS = 8  # with more culprits than this, only calling threads are shown
MAX_PROCESSES_SHOWN = 64
# The age of a sample is measured on its host, so it may seem slightly older than the onset.
CLOCK_SLACK_S = 0.5

DateConverter = Callable[[float], datetime]


class _Caller(NamedTuple):
    rank: int
    sample: StackSample
    thread: ThreadStack | None  # that makes the calls; None if the sample has no thread


def strip_verdict(verdict: Verdict) -> Verdict:
    """The verdict without what changes from one diagnosis to the next although the job does not."""
    divergence = verdict.divergence
    if divergence is not None:
        divergence = replace(divergence, rows=tuple(_strip_row(row) for row in divergence.rows))
    return replace(
        verdict,
        began_at=0.0,
        calls=tuple(
            replace(call_class, call=replace(_strip_call(call_class.call), raised=False))
            for call_class in verdict.calls
        ),
        divergence=divergence,
    )


def _strip_row(row: AlignedPair) -> AlignedPair:
    first, second = row.calls
    return replace(row, calls=(first and _strip_call(first), second and _strip_call(second)))


def _strip_call(call: Call) -> Call:
    return replace(
        call,
        signature=replace(call.signature, numel=0, agree=0),
        chain=0,
        entered_s=0.0,
        duration_s=None,
        blocking=None,
        thread=0,
    )


def collect_processes(attempt: Attempt, culprits: Iterable[int]) -> tuple[ProcessSnapshot, ...]:
    """The culprits' processes, then those that failed."""
    culprit_ranks = dict.fromkeys(culprits)
    failed_ranks = sorted(
        rank
        for rank in attempt.ended_ranks - culprit_ranks.keys()
        if (ended := attempt.processes[rank].exit) is not None and ended.has_failed
    )
    shown_ranks = [*culprit_ranks, *failed_ranks][:MAX_PROCESSES_SHOWN]
    processes = (attempt.processes.get(rank) for rank in shown_ranks)
    return tuple(take_snapshot(process) for process in processes if process is not None)


def take_snapshot(process: Process) -> ProcessSnapshot:
    return ProcessSnapshot(
        rank=process.rank,
        host=process.host,
        pid=process.identity.pid,
        state=process.activity.state,
        exit_status=process.exit.exit_status if process.exit else None,
        signal=process.exit.signal if process.exit else None,
        exception=process.exception,
        flight_file=process.flight_file,
    )


def make_stack(
    ranks: Sequence[int],
    sample: StackSample,
    thread: ThreadStack | None,
    convert_date: DateConverter,
) -> MergedStack:
    """One thread of a sample, or the sample's error if there is no thread."""
    return MergedStack(
        ranks=tuple(ranks),
        thread=thread.thread if thread else None,
        source=sample.source,
        taken_at=convert_date(sample.taken_at),
        frames=tuple(_strip_frame(frame) for frame in thread.frames) if thread else (),
        native=sample.native,
        error=sample.error if thread is None else thread.error,
    )


def _strip_frame(frame: Frame) -> Frame:
    if frame.handler is None and frame.polls is None:
        return frame
    return replace(frame, handler=None, polls=None)


def collect_stacks(
    attempt: Attempt, verdict: Verdict, since: float, convert_date: DateConverter
) -> list[MergedStack]:
    """The culprits' stacks, then those of the waiting ranks, merged where equal."""
    culprits = list(_find_callers(attempt, verdict.culprits, verdict.group, since))
    victims = _find_callers(attempt, verdict.waiting, verdict.group, since)
    stacks = _merge_calling_stacks(culprits, convert_date)
    if len(verdict.culprits) <= MAX_DETAILED_CULPRITS:
        for found in culprits:
            stacks += _collect_other_threads(found, convert_date)
    return stacks + _merge_calling_stacks(victims, convert_date)


def _find_callers(
    attempt: Attempt, ranks: Iterable[int], group: Group | None, since: float
) -> Iterator[_Caller]:
    """The ranks that were sampled since then, with the thread that makes the calls of ``group``."""
    for rank in ranks:
        process = attempt.processes.get(rank)
        sample = None if process is None else _find_newest_sample(process, since)
        if process is not None and sample is not None:
            yield _Caller(rank, sample, process.find_caller(sample, group, since))


def _find_newest_sample(process: Process, since: float) -> StackSample | None:
    """The newest sample taken since then: one with stacks, else the newest failure."""
    recent = [s for s in process.samples if s.taken_at >= since - CLOCK_SLACK_S]
    with_threads = (s for s in reversed(recent) if s.threads)
    return next(with_threads, recent[-1] if recent else None)


def _collect_other_threads(found: _Caller, convert_date: DateConverter) -> list[MergedStack]:
    """The child processes that a rank waits for come before its own other threads; of the latter,
    the one that holds the GIL comes first.
    """
    others = [
        thread
        for thread in found.sample.threads
        if thread is not found.thread and thread.thread != RECORDER_THREAD_NAME
    ]
    others.sort(key=lambda thread: (thread.pid is None, not thread.holds_gil))
    return [
        make_stack([found.rank], found.sample, thread, convert_date)
        for thread in others[:MAX_THREADS_SHOWN]
    ]


def _merge_calling_stacks(
    callers: Iterable[_Caller], convert_date: DateConverter
) -> list[MergedStack]:
    """One entry for all ranks whose stacks are equal; the most frequent first."""
    classes: dict[object, list[_Caller]] = {}
    for found in callers:
        sample, thread = found.sample, found.thread
        merge_key = (sample.source, sample.error, thread and (thread.thread, thread.frames))
        classes.setdefault(merge_key, []).append(found)
    return [
        make_stack([f.rank for f in equal], equal[0].sample, equal[0].thread, convert_date)
        for equal in sorted(classes.values(), key=len, reverse=True)
    ]


def keep_known_stacks(
    before: Sequence[MergedStack], now: Sequence[MergedStack]
) -> tuple[MergedStack, ...]:
    """``now``, together with the earlier stacks of ranks that can no longer be sampled. A stack
    that differs from an earlier one only in its time keeps the earlier time.
    """
    covered = {rank for stack in now if stack.error is None for rank in stack.ranks}
    kept = [s for s in before if s.error is None and covered.isdisjoint(s.ranks)]
    kept_ranks = {rank for stack in kept for rank in stack.ranks}
    earlier = {_get_content(stack): stack for stack in before}
    current = [
        earlier.get(_get_content(stack), stack)
        for stack in now
        if stack.error is None or not kept_ranks.issuperset(stack.ranks)
    ]
    return (*kept, *current)


def _get_content(stack: MergedStack) -> tuple[object, ...]:
    """All of a stack but its time."""
    return (stack.ranks, stack.thread, stack.source, stack.frames, stack.native, stack.error)
