"""The evidence of an incident, taken from the state of its attempt: calls, processes and stacks. Pure.

Whatever differs between two reads of an unchanged job, such as the age of a call, is left out, so
that an incident only counts as changed when its document changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from hangwatch.model.calls import Call, Signature
from hangwatch.model.groups import Group
from hangwatch.model.incidents import MergedStack, ProcessSnapshot
from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.model.verdicts import AlignedPair, CallClass, Divergence, Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process, StackSample

MAX_THREADS_SHOWN = 16  # of one culprit
RECORDER_THREAD_NAME = "hangwatch"  # our own thread in the training process
MAX_DETAILED_CULPRITS = 8  # with more culprits than this, only calling threads are shown
MAX_PROCESSES_SHOWN = 64
# The age of a sample is measured on its host, so it may seem slightly older than the onset.
CLOCK_SLACK_S = 0.5

DateConverter = Callable[[float], datetime]


def strip_verdict(verdict: Verdict) -> Verdict:
    """The verdict without what changes from one diagnosis to the next although the job does not."""
    divergence = verdict.divergence
    return replace(
        verdict,
        began_at=0.0,
        calls=tuple(_strip_call_class(call_class) for call_class in verdict.calls),
        divergence=None if divergence is None else _strip_divergence(divergence),
    )


def _strip_call_class(call_class: CallClass) -> CallClass:
    call = replace(_strip_call(call_class.call), raised=False)
    return replace(call_class, call=call)


def _strip_divergence(divergence: Divergence) -> Divergence:
    return replace(
        divergence,
        rows=tuple(_strip_aligned_pair(row) for row in divergence.rows),
    )


def _strip_aligned_pair(row: AlignedPair) -> AlignedPair:
    first, second = row.calls
    return replace(row, calls=(_strip_aligned_call(first), _strip_aligned_call(second)))


def _strip_aligned_call(call: Call | None) -> Call | None:
    if call is None:
        return None
    stripped = _strip_call(call)
    signature = replace(stripped.signature, splits=None)
    return replace(stripped, signature=signature, peer=None)


def _strip_call(call: Call) -> Call:
    signature = call.signature
    return Call(
        seq=call.seq,
        signature=Signature(
            op=signature.op,
            shapes=signature.shapes,
            dtype=signature.dtype,
            reduce_op=signature.reduce_op,
            root=signature.root,
            splits=signature.splits,
            detail=signature.detail,
        ),
        site=call.site,
        peer=call.peer,
        raised=call.raised,
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


def find_newest_sample(process: Process | None, since: float) -> StackSample | None:
    """The newest sample taken since then: one with stacks, else the newest failure."""
    if process is None:
        return None
    recent = [s for s in process.samples if s.taken_at >= since - CLOCK_SLACK_S]
    with_threads = (s for s in reversed(recent) if s.threads)
    return next(with_threads, recent[-1] if recent else None)


def collect_stacks(
    attempt: Attempt,
    verdict: Verdict,
    since: float,
    convert_date: DateConverter,
) -> list[MergedStack]:
    """The culprits' stacks, then those of the waiting ranks, merged where equal."""
    culprits = verdict.culprits
    stacks = merge_calling_stacks(attempt, culprits, verdict.group, since, convert_date)
    if len(culprits) <= MAX_DETAILED_CULPRITS:
        for rank in culprits:
            process = attempt.processes.get(rank)
            sample = find_newest_sample(process, since)
            if process is not None and sample is not None:
                caller = process.find_caller(sample, verdict.group, since)
                stacks += _collect_other_threads(rank, sample, caller, convert_date)
    culprit_set = set(culprits)
    victims = [rank for rank in verdict.waiting if rank not in culprit_set]
    return stacks + merge_calling_stacks(attempt, victims, verdict.group, since, convert_date)


def _collect_other_threads(
    rank: int, sample: StackSample, caller: ThreadStack | None, convert_date: DateConverter
) -> list[MergedStack]:
    """The child processes that a rank waits for come before its own other threads; of the latter,
    the one that holds the GIL comes first.
    """
    others = [
        thread
        for thread in sample.threads
        if thread is not caller and thread.thread != RECORDER_THREAD_NAME
    ]
    others.sort(key=lambda thread: (thread.pid is None, not thread.holds_gil))
    return [
        make_stack([rank], sample, thread, convert_date) for thread in others[:MAX_THREADS_SHOWN]
    ]


def merge_calling_stacks(
    attempt: Attempt,
    ranks: Iterable[int],
    group: Group | None,
    since: float,
    convert_date: DateConverter,
) -> list[MergedStack]:
    """The threads that make the calls of ``group``, with one entry for all ranks whose stacks are
    equal; the most frequent first.
    """
    classes: dict[object, tuple[list[int], StackSample, ThreadStack | None]] = {}
    for rank in ranks:
        process = attempt.processes.get(rank)
        if process is None or not process.samples:
            continue
        sample = find_newest_sample(process, since)
        if sample is None:
            continue
        caller = process.find_caller(sample, group, since)
        merge_key = (sample.source, sample.error, caller and (caller.thread, caller.frames))
        classes.setdefault(merge_key, ([], sample, caller))[0].append(rank)
    ordered = sorted(classes.values(), key=lambda entry: -len(entry[0]))
    return [
        make_stack(members, sample, caller, convert_date) for members, sample, caller in ordered
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
