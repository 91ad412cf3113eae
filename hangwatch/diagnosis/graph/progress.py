"""Whether a rank makes progress or waits: by samples of its stacks, by its use of the CPU, and by
that of the threads and child processes that it waits for itself.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import BUSY_WITHIN_S, MIN_SAMPLE_GAP_S
from hangwatch.model.ranks import RECORDER_THREAD_NAME, ThreadStack
from hangwatch.stacks.activities import (
    LOCK,
    SLEEP,
    RequiredProgress,
    classify_activity,
    waits_for_external,
)
from hangwatch.stacks.frames import runs_user_code, waits_for_communication
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import IDLE_AFTER_S, Process, StackSample

# The least shares of the time between two samples that a working thread uses a CPU, or is ready to run
# without getting one (see the node agent's `Activity`). A thread that only polls uses less.
MIN_CPU_SHARE = 0.05
MIN_READY_SHARE = 1 / 3


def list_samples_since(process: Process, since: float) -> list[StackSample]:
    """The samples since then that show any thread."""
    return [s for s in process.samples if s.taken_at >= since and s.threads]


def has_two_samples(process: Process, since: float) -> bool:
    samples = list_samples_since(process, since)
    return len(samples) >= 2 and samples[-1].taken_at - samples[0].taken_at >= MIN_SAMPLE_GAP_S


def is_progressing(process: Process, since: float) -> bool:
    """Whether a rank's calling thread uses the CPU, or its samples show different functions."""
    return is_busy(process) or has_stack_changed(process, since)


def is_busy(process: Process) -> bool:
    """Whether a rank's calling thread uses the CPU, or needs one. Node agents report it of the main
    thread and the one of the newest call together; samples, of each thread.
    """
    if process.reports.updated_at - process.activity.last_active_at >= BUSY_WITHIN_S:
        return _has_caller_used_cpu(process) is True
    return _has_caller_used_cpu(process) is not False


def _has_caller_used_cpu(process: Process) -> bool | None:
    """Whether a calling thread that is not the main thread used the CPU between the last samples;
    None if there are none to compare, or it is the main thread.
    """
    samples = [sample for sample in process.samples if sample.threads]
    before = _find_comparable_sample(samples)
    caller = samples[-1].calling_thread if before is not None else None
    if before is None or caller is None or caller.main or caller.cpu_s is None:
        return None
    caller_before = next((t for t in before.threads if t.tid == caller.tid), None)
    return _has_used_cpu(caller, caller_before, samples[-1].taken_at - before.taken_at)


def has_stack_changed(process: Process, since: float) -> bool:
    """Whether a rank's calling thread was in different Python functions. What a loop calls between two
    sleeps does not count: such a loop polls.
    """
    stacks: set[tuple[tuple[str, str], ...]] = set()
    polling: set[tuple[tuple[str, str], ...]] = set()  # stacks that end in a sleep
    for sample in list_samples_since(process, since):
        caller = sample.calling_thread
        if caller is None:
            continue
        functions = tuple(
            (frame.file, frame.function)
            for frame in reversed(caller.frames)
            if ".py" in frame.file or frame.file.startswith("<")
        )
        stacks.add(functions)
        if classify_activity(caller).waits is SLEEP:
            polling.add(functions)
    elsewhere = {
        functions
        for functions in stacks
        if not any(functions[: len(loop)] == loop for loop in polling)
    }
    return len(elsewhere) + len(polling) > 1


def list_other_threads(sample: StackSample) -> list[ThreadStack]:
    """The threads of a rank except its calling thread and the recorder's, and the child processes
    that the calling thread waits for.
    """
    caller = sample.calling_thread
    return [
        thread
        for thread in sample.threads
        if thread is not caller
        and (thread.pid is not None or thread.thread != RECORDER_THREAD_NAME)
    ]


def find_working_threads(process: Process, since: float) -> list[ThreadStack]:
    """The threads and child processes that do what its calling thread waits for, in the newest sample;
    none if the wait needs the progress of all of them and some make none.
    """
    samples = list_samples_since(process, since)
    before = _find_comparable_sample(samples)
    if before is None:
        return []
    newest = samples[-1]
    required, awaited = _find_awaited_threads(newest)
    threads_before = {(thread.pid, thread.tid): thread for thread in before.threads}
    elapsed_s = newest.taken_at - before.taken_at
    working = [
        thread
        for thread in awaited
        if _has_used_cpu(thread, threads_before.get((thread.pid, thread.tid)), elapsed_s)
    ]
    children_before = {thread.pid for thread in before.threads if thread.pid is not None}
    if children_before and not working:
        # A rank that runs many short programs, each a different child than before, makes progress.
        working = [
            thread
            for thread in awaited
            if thread.pid is not None and thread.pid not in children_before
        ]
    if required is RequiredProgress.ALL and len(working) < len(awaited):
        return []
    return working


def _find_comparable_sample(samples: list[StackSample]) -> StackSample | None:
    """The last sample that is old enough to compare the newest one with it."""
    for sample in reversed(samples):
        if samples[-1].taken_at - sample.taken_at >= MIN_SAMPLE_GAP_S:
            return sample
    return None


def _has_used_cpu(now: ThreadStack, before: ThreadStack | None, elapsed_s: float) -> bool:
    """Whether a thread used the CPU between the samples, or was ready to but did not get one."""
    cpu_s, ready_s = now.cpu_s or 0.0, now.ready_s or 0.0
    if before is not None:
        cpu_s -= before.cpu_s or 0.0
        ready_s -= before.ready_s or 0.0
    return cpu_s >= MIN_CPU_SHARE * elapsed_s or ready_s >= MIN_READY_SHARE * elapsed_s


def is_waiting_for_rank(process: Process, since: float) -> bool | None:
    """Whether, in the newest sample, it waits for something that another rank may do and its own
    threads and children do not. None without a sample.
    """
    samples = list_samples_since(process, since)
    if not samples:
        return None
    newest = samples[-1]
    if is_busy(process) and process.activity.last_active_at > newest.taken_at + IDLE_AFTER_S:
        return False  # the rank has continued since
    waits = classify_activity(newest.calling_thread).waits
    if waits is None or not waits.waits_for_rank:
        return False
    return not any(map(waits.may_wait_for, list_other_threads(newest)))


def needs_another_sample(process: Process, since: float, beside_slow: bool) -> bool:
    """Whether a further sample will show more: whether the threads that it waits for work, or its
    calling thread does; or, if there is none and some rank is slow, whether it waits for a rank.
    """
    samples = list_samples_since(process, since)
    if not samples:
        return beside_slow
    caller = samples[-1].calling_thread
    is_other_thread = caller is not None and not caller.main and is_busy(process)
    _, awaited = _find_awaited_threads(samples[-1])
    return (bool(awaited) or is_other_thread) and not has_two_samples(process, since)


def _find_awaited_threads(sample: StackSample) -> tuple[RequiredProgress, list[ThreadStack]]:
    """The threads whose work can show that the calling thread's wait is not a hang, if their use of
    the CPU is known.
    """
    waits = classify_activity(sample.calling_thread).waits
    if waits is None or waits.required_progress is RequiredProgress.NONE:
        return RequiredProgress.NONE, []
    required = waits.required_progress
    candidates = [
        thread
        for thread in list_other_threads(sample)
        if thread.cpu_s is not None and waits.may_wait_for(thread)
    ]
    if required is RequiredProgress.ALL:
        candidates = [thread for thread in candidates if runs_user_code(thread)]
    elif required is RequiredProgress.NEWEST:
        candidates = candidates[:1]
    return required, candidates


def get_calling_thread_since(process: Process, since: float) -> ThreadStack | None:
    """The calling thread's stack in the newest sample, if that was taken since."""
    sample = _get_sample_since(process, since)
    return sample.calling_thread if sample is not None else None


def _get_sample_since(process: Process, since: float) -> StackSample | None:
    samples = list_samples_since(process, since)
    return samples[-1] if samples else None


def has_continuing_caller(
    process: Process, blocked_streams: Collection[CallStream], since: float
) -> bool:
    """Whether another thread that makes calls is at work, while some are blocked in these calls.

    In some jobs one thread makes all calls, while the main thread sleeps until it ends.
    """
    sample = _get_sample_since(process, since)
    if sample is None:
        return False
    blocked_threads = [sample.find_caller(stream) for stream in blocked_streams]
    is_active = process.reports.updated_at - process.activity.last_active_at < IDLE_AFTER_S
    for thread in _list_callers(process, sample):
        if any(thread is blocked for blocked in blocked_threads):
            continue
        if waits_for_external(thread):
            return True
        if is_active and waits_for_communication(thread) is False:
            return True
    return False


def is_wholly_blocked(process: Process, blocked_streams: Collection[CallStream]) -> bool:
    """Whether a sample since the newest call shows that the threads of these calls wait in them, and
    that each other thread that makes calls waits for a thread or a call as well.
    """
    sample = _get_sample_since(process, process.newest_call_at)
    if sample is None:
        return False
    blocked_threads: list[ThreadStack] = []
    for stream in blocked_streams:
        caller = sample.find_caller(stream)
        if caller is None or stream.uid not in caller.called_uids:
            return False
        if not waits_for_communication(caller):
            return False
        blocked_threads.append(caller)
    others = [
        thread
        for thread in _list_callers(process, sample)
        if not any(thread is blocked for blocked in blocked_threads)
    ]
    # A thread may wait for the end or the result of another one. But any thread may hold a lock.
    return all(
        waits_for_communication(thread)
        or (_is_waiting_for_thread(thread) and classify_activity(thread).waits is not LOCK)
        for thread in others
    )


def _list_callers(process: Process, sample: StackSample) -> list[ThreadStack]:
    """The threads in the user's code that made calls other than the creation of groups."""
    return [
        thread
        for thread in sample.threads
        if thread.call_recency is not None
        and not _creates_groups_only(process, thread)
        and runs_user_code(thread)
    ]


def _creates_groups_only(process: Process, thread: ThreadStack) -> bool:
    streams = [process.streams.get(uid) for uid in thread.called_uids]
    return bool(streams) and all(
        stream is not None and stream.kind is StreamKind.SETUP for stream in streams
    )


def has_working_thread(process: Process, since: float) -> bool:
    """Whether a thread was sampled in the user's code, where it waits for no rank: it may be about
    to make the missing call.
    """
    return any(
        thread.pid is None
        and runs_user_code(thread)
        and waits_for_communication(thread) is False
        and not _is_waiting_for_thread(thread)
        for sample in list_samples_since(process, since)
        for thread in sample.threads
    )


def _is_waiting_for_thread(stack: ThreadStack) -> bool:
    waits = classify_activity(stack).waits
    return waits is not None and waits.waits_for_thread


def is_process_waiting(process: Process) -> bool | None:
    """Whether the threads that make calls wait for communication: by their stacks, otherwise by
    their idleness; None if that is only a guess.
    """
    sample = None
    # Few of 100,000 processes have samples, and it takes long to find when a process advanced.
    if process.samples:
        sample = _get_sample_since(process, process.last_advanced_at)
    if sample is not None:
        callers = _list_callers(process, sample)
        if len(callers) > 1:
            callers = [thread for thread in callers if not _is_waiting_for_thread(thread)]
        if len(callers) > 1:
            waits = [_is_waiting_for_call(thread) for thread in callers]
        else:
            waits = [_is_waiting_for_call(sample.calling_thread)]
        known_waits = [wait for wait in waits if wait is not None]
        if known_waits:
            return all(known_waits)
    is_idle = process.reports.updated_at - process.activity.last_active_at >= IDLE_AFTER_S
    return None if is_idle else False


def _is_waiting_for_call(thread: ThreadStack | None) -> bool | None:
    """Whether a thread waits for communication; None if its stack does not show it."""
    is_communicating = waits_for_communication(thread)
    return is_communicating and not waits_for_external(thread)
