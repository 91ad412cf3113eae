"""Whether the threads that make a rank's calls wait, by their stacks."""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model.calls import StreamKind
from hangwatch.model.threads import ThreadStack
from hangwatch.stacks.activities import classify_activity, waits_for_external
from hangwatch.stacks.frames import runs_user_code, waits_for_communication
from hangwatch.stacks.wait_kinds import LOCK
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import IDLE_AFTER_S, Process, StackSample


def get_calling_thread_since(process: Process, since: float) -> ThreadStack | None:
    """The calling thread's stack in the newest sample, if that was taken since."""
    sample = _get_sample_since(process, since)
    return sample.calling_thread if sample is not None else None


def _get_sample_since(process: Process, since: float) -> StackSample | None:
    samples = [sample for sample in process.samples if sample.taken_at >= since and sample.threads]
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
    return all(_is_joining(thread) or waits_for_communication(thread) for thread in others)


def _is_joining(thread: ThreadStack) -> bool:
    """Whether it waits for the end or the result of another thread. Any thread may hold a lock."""
    return _is_waiting_for_thread(thread) and classify_activity(thread).waits is not LOCK


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
    samples = [sample for sample in process.samples if sample.taken_at >= since]
    return any(_is_working_in_user_code(thread) for s in samples for thread in s.threads)


def _is_working_in_user_code(thread: ThreadStack) -> bool:
    if thread.pid is not None or not runs_user_code(thread):
        return False
    return waits_for_communication(thread) is False and not _is_waiting_for_thread(thread)


def _is_waiting_for_thread(stack: ThreadStack) -> bool:
    waits = classify_activity(stack).waits
    return waits is not None and waits.waits_for_thread


def is_process_waiting(process: Process) -> bool | None:
    """Whether the threads that make calls wait for communication: by their stacks, otherwise by
    their idleness; None if that is only a guess.
    """
    sample = None
    # Of 100,000 processes few have any, and it takes long to find when a process advanced.
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
    """Whether it waits for communication; None if its stack does not show it."""
    is_communicating = waits_for_communication(thread)
    return is_communicating and not waits_for_external(thread)
