"""Whether a rank makes progress or waits: by samples of its stacks, by its use of the CPU and the data
that it moves, and by those of the threads and child processes that it waits for itself.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import (
    BUSY_WITHIN_S,
    MIN_SAMPLE_GAP_S,
    MIN_TRANSFER_BYTES_PER_S,
    MIN_WAIT_S,
)
from hangwatch.model.ranks import RECORDER_THREAD_NAME, ThreadStack
from hangwatch.stacks.activities import (
    LOCK,
    SLEEP,
    RequiredProgress,
    classify_activity,
    list_remote_executions,
    waits_for_external,
)
from hangwatch.stacks.frames import (
    find_lines,
    is_installed_frame,
    is_user_frame,
    runs_user_code,
    waits_for_communication,
    waits_for_work,
)
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import IDLE_AFTER_S, Process, StackSample

# The least shares of the time between two samples that a working thread uses a CPU, or is ready to run
# without getting one (see the node agent's `Activity`). A thread that only polls uses less.
MIN_CPU_SHARE = 0.05
MIN_READY_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class _SampledInterval:
    """The time between two samples of a process that can be compared. What used the CPU or moved data in
    it makes progress.
    """

    before: StackSample
    newest: StackSample

    @property
    def duration_s(self) -> float:
        return self.newest.taken_at - self.before.taken_at

    def find_former(self, thread: ThreadStack) -> ThreadStack | None:
        """The same thread or child process as one of the newest sample, in the sample before."""
        for former in self.before.threads:
            if former.pid == thread.pid and former.tid == thread.tid:
                return former
        return None

    def is_working(self, thread: ThreadStack) -> bool:
        """Whether a thread or a child made progress, or a child did that it waits for."""
        if self.has_used_cpu(thread):
            return True
        if self.measure_transfer(thread) >= MIN_TRANSFER_BYTES_PER_S:
            return True
        return any(map(self.is_working, _list_awaited_children(thread, self.newest)))

    def measure_transfer(self, thread: ThreadStack) -> float:
        """The bytes per second that a thread or a child moved; 0.0 if that is unknown."""
        former = self.find_former(thread)
        if former is None or former.moved_bytes is None or thread.moved_bytes is None:
            return 0.0
        moved = max(0, thread.moved_bytes - former.moved_bytes)
        return moved / self.duration_s

    def has_used_cpu(self, thread: ThreadStack) -> bool:
        """Whether a thread of the newest sample used the CPU, or waited for one."""
        cpu_s, ready_s = thread.cpu_s or 0.0, thread.ready_s or 0.0
        former = self.find_former(thread)
        if former is not None:
            cpu_s -= former.cpu_s or 0.0
            ready_s -= former.ready_s or 0.0
        is_running = cpu_s >= MIN_CPU_SHARE * self.duration_s
        return is_running or ready_s >= MIN_READY_SHARE * self.duration_s


def list_samples_since(process: Process, since: float) -> list[StackSample]:
    """The samples since then that show any thread."""
    return [s for s in process.samples if s.taken_at >= since and s.threads]


def _find_interval(process: Process, since: float) -> _SampledInterval | None:
    """The interval up to the newest sample, if there is an older one since then to compare it with."""
    return _select_interval(list_samples_since(process, since))


def _select_interval(samples: list[StackSample]) -> _SampledInterval | None:
    for sample in reversed(samples):
        if samples[-1].taken_at - sample.taken_at >= MIN_SAMPLE_GAP_S:
            return _SampledInterval(sample, samples[-1])
    return None


def has_two_samples(process: Process, since: float) -> bool:
    return _find_interval(process, since) is not None


def is_busy(process: Process) -> bool:
    """Whether a rank's calling thread uses the CPU, or needs one. Node agents report it of the main
    thread and the one of the newest call together; samples, of each thread.
    """
    interval = _find_interval(process, -inf)
    if interval is not None:
        caller = interval.newest.calling_thread
        if caller is not None and not caller.main and caller.cpu_s is not None:
            return interval.has_used_cpu(caller)
    return process.inactive_s < BUSY_WITHIN_S


def is_spinning(process: Process, since: float) -> bool:
    """Whether a rank whose calls are queued for a device uses the CPU, and two samples show its calling
    thread at one line. Such a host may wait for its device.
    """
    interval = _find_interval(process, since)
    if interval is None or not is_busy(process) or not has_device_calls(process):
        return False
    lines = find_lines(interval.newest.calling_thread)
    return bool(lines) and lines == find_lines(interval.before.calling_thread)


def has_device_calls(process: Process) -> bool:
    """Whether some calls of a rank are queued for a device, as far as is known."""
    return any(
        stream.device is not None or (stream.completed is None and stream.entered)
        for stream in process.streams.values()
    )


def needs_device_sample(process: Process, since: float) -> bool:
    """Whether another sample will show more of whether a rank waits for its device: two are examined for
    that, until one shows that its device does not hold it.
    """
    examined = _list_examined_samples(process, since)
    if not examined:
        return True
    return bool(_get_device_hold(examined[-1])) and _select_interval(examined) is None


def waits_for_device(process: Process, since: float) -> bool:
    """Whether a rank waits for its device, although it uses the CPU: its device held its calling thread at
    the same lines, with the same variables, in two samples, and none shows it elsewhere since.
    """
    examined = _list_examined_samples(process, max(since, process.last_advanced_at))
    interval = _select_interval(examined)
    if interval is None:
        return False
    hold = _get_device_hold(interval.newest)
    if not hold or hold != _get_device_hold(interval.before):
        return False
    caller = get_calling_thread_since(process, since)
    return find_lines(caller) == find_lines(interval.newest.calling_thread)


def _list_examined_samples(process: Process, since: float) -> list[StackSample]:
    return [sample for sample in list_samples_since(process, since) if sample.is_examined]


def _get_device_hold(sample: StackSample) -> int:
    caller = sample.calling_thread
    return 0 if caller is None else caller.device_hold or 0


def has_stack_changed(process: Process, since: float) -> bool:
    """Whether a rank's calling thread was in different Python functions. What a loop calls between two
    sleeps does not count: such a loop polls.
    """
    stacks = set()
    polling = set()  # stacks that end in a sleep
    for sample in list_samples_since(process, since):
        caller = sample.calling_thread
        if caller is None:
            continue
        functions = _list_functions(caller)
        stacks.add(functions)
        if classify_activity(caller).waits is SLEEP:
            polling.add(functions)
    elsewhere = {
        functions
        for functions in stacks
        if not any(functions[: len(loop)] == loop for loop in polling)
    }
    return len(elsewhere) + len(polling) > 1


def has_settled(process: Process, since: float, min_s: float) -> bool:
    """Whether a rank that moved is stuck now: the newest samples show its calling thread in one place for
    at least ``min_s``, and no progress during that time.
    """
    samples = list_samples_since(process, since)
    caller = samples[-1].calling_thread if samples else None
    if caller is None:
        return False
    functions = _list_functions(caller)
    first = samples[-1]
    for sample in reversed(samples):
        if sample.calling_thread is None or _list_functions(sample.calling_thread) != functions:
            break
        first = sample
    interval = _SampledInterval(first, samples[-1])
    return interval.duration_s >= min_s and not interval.is_working(caller)


def _list_functions(thread: ThreadStack) -> tuple[tuple[str, str], ...]:
    """The file and the name of each Python function of a thread, the outermost first."""
    return tuple(
        (frame.file, frame.function)
        for frame in reversed(thread.frames)
        if ".py" in frame.file or frame.file.startswith("<")
    )


def is_polling(process: Process, since: float) -> bool:
    """Whether samples show a rank's calling thread in one place, where it waits for what another rank may
    do and uses little of the CPU. On an overloaded host such a thread is often ready to run.
    """
    interval = _find_interval(process, since)
    if interval is None or has_stack_changed(process, since):
        return False
    callers = [sample.calling_thread for sample in list_samples_since(process, since)[-2:]]
    if not any(classify_activity(caller).waits.waits_for_rank for caller in callers):
        return False
    caller = callers[-1]
    return caller is not None and not interval.has_used_cpu(replace(caller, ready_s=None))


def list_other_threads(sample: StackSample) -> list[ThreadStack]:
    """The threads but the calling one and the recorder's, and the children that it waits for."""
    caller = sample.calling_thread
    others = [thread for thread in sample.threads if thread is not caller]
    return [t for t in others if t.pid is not None or t.thread != RECORDER_THREAD_NAME]


def find_working_threads(process: Process, since: float) -> list[ThreadStack]:
    """The threads and child processes that do what its calling thread waits for, in the newest sample;
    none if the wait needs the progress of all of them and some make none.
    """
    interval = _find_interval(process, since)
    if interval is None:
        return []
    required, awaited = _find_awaited_threads(interval.newest)
    working = list(filter(interval.is_working, awaited))
    pids_before = {thread.pid for thread in interval.before.threads}
    if not working and any(pids_before):
        # A rank that runs many short programs, each a different child than before, makes progress.
        known_pids = {None, *pids_before}
        working = [thread for thread in awaited if thread.pid not in known_pids]
    if required is RequiredProgress.ALL and len(working) < len(awaited):
        return []
    return working


def awaits_remote_call(process: Process, since: float) -> bool:
    """Whether a rank's calling thread may wait for the result of a function that another rank executes."""
    caller = get_calling_thread_since(process, since)
    return classify_activity(caller).waits.awaits_remote_call


def list_remote_executions_since(process: Process, since: float) -> list[ThreadStack]:
    """The threads that execute a function for another rank, in the newest sample since then."""
    samples = list_samples_since(process, since)
    return list_remote_executions(samples[-1].threads) if samples else []


def works_on_remote_call(process: Process, since: float) -> bool:
    """Whether a thread that executes a function for another rank makes progress, in the newest sample."""
    interval = _find_interval(process, since)
    if interval is None:
        return False
    return any(map(interval.is_working, list_remote_executions(interval.newest.threads)))


def get_transfer_rate(process: Process, since: float) -> float:
    """The bytes per second that a rank's calling thread moved between two samples since then; 0.0 if that
    is not known.
    """
    interval = _find_interval(process, since)
    caller = None if interval is None else interval.newest.calling_thread
    if interval is None or caller is None:
        return 0.0
    return interval.measure_transfer(caller)


def is_transferring(process: Process, since: float) -> bool:
    """Whether a rank's calling thread moves data, as in a download."""
    return get_transfer_rate(process, since) >= MIN_TRANSFER_BYTES_PER_S


def _list_awaited_children(thread: ThreadStack, sample: StackSample) -> list[ThreadStack]:
    """The child processes for which a thread of the rank waits in a system call."""
    if thread.pid is not None or thread.tid is None:
        return []
    return [child for child in sample.threads if thread.tid in child.awaited_by]


class RankWait(enum.IntEnum):
    """How much shows that a rank that is in no recorded call waits for what another rank does."""

    EXCLUDED = 1  # the rank works, or waits for something that no rank does
    UNKNOWN = 2  # the stack does not show what the rank does
    POSSIBLE = 3  # a sleep, an answer over the network, a lock file
    CERTAIN = 4  # a key of a store, a rendezvous, a barrier, the reply to a remote call


def classify_rank_wait(process: Process, since: float) -> RankWait | None:
    """Whether, in the newest sample since then, a rank waits for another one, and not for its own
    threads and children. None without a sample.
    """
    if process.has_raised:
        return RankWait.EXCLUDED
    samples = list_samples_since(process, since)
    if not samples:
        return None
    newest = samples[-1]
    if is_transferring(process, since):
        return RankWait.EXCLUDED
    if waits_for_device(process, since):
        return RankWait.EXCLUDED
    is_active_since = process.activity.last_active_at > newest.taken_at + IDLE_AFTER_S
    if is_active_since and is_busy(process) and not is_polling(process, since):
        return RankWait.EXCLUDED  # the rank has continued since
    waits = classify_activity(newest.calling_thread).waits
    others = list(filter(waits.may_wait_for, list_other_threads(newest)))
    if waits.waits_for_rank:
        if others:
            return RankWait.EXCLUDED
        return RankWait.CERTAIN if waits.needs_rank else RankWait.POSSIBLE
    # The thread that it waits for may itself wait for another rank.
    theirs = [thread for thread in others if thread.pid is None and runs_user_code(thread)]
    their_waits = [classify_activity(thread).waits for thread in theirs]
    need_rank = [
        wait.needs_rank or waits_for_work(thread)
        for thread, wait in zip(theirs, their_waits, strict=True)
    ]
    if any(need_rank):
        return RankWait.CERTAIN if all(need_rank) else RankWait.POSSIBLE
    if not waits or not all(their_waits) or any(wait.waits_for_rank for wait in their_waits):
        return RankWait.UNKNOWN
    return RankWait.EXCLUDED


def needs_another_sample(process: Process, since: float, beside_slow: bool) -> bool:
    """Whether a further sample will show more: whether the threads that it waits for work, or its
    calling thread does; or, if there is none and some rank is slow, whether it waits for a rank.
    """
    if process.has_raised:
        return False
    samples = list_samples_since(process, since)
    if not samples:
        return beside_slow
    caller = samples[-1].calling_thread
    may_move = caller is not None and caller.moved_bytes is not None
    is_other_thread = caller is not None and not caller.main and is_busy(process)
    _, awaited = _find_awaited_threads(samples[-1])
    if not (awaited or is_other_thread or may_move):
        return False
    return not has_two_samples(process, since)


def _find_awaited_threads(sample: StackSample) -> tuple[RequiredProgress, list[ThreadStack]]:
    """The threads and children whose progress can show that the calling thread's wait is not a hang: by
    its system call or, where that does not show it, by its stack.
    """
    caller = sample.calling_thread
    children = [] if caller is None else _list_awaited_children(caller, sample)
    if children:
        return RequiredProgress.ANY, children
    waits = classify_activity(caller).waits
    required = waits.required_progress
    if required is RequiredProgress.NONE:
        return required, []
    measured = [thread for thread in list_other_threads(sample) if thread.cpu_s is not None]
    candidates = list(filter(waits.may_wait_for, measured))
    if required is RequiredProgress.ALL:
        candidates = list(filter(runs_user_code, candidates))
        if not candidates and waits is not LOCK and _waits_in_library(caller):
            # As in a pool of processes: a thread of the library waits for them.
            return RequiredProgress.ANY, [t for t in sample.threads if t.awaited_by]
    elif required is RequiredProgress.NEWEST:
        candidates = candidates[:1]
    return required, candidates


def _waits_in_library(stack: ThreadStack | None) -> bool:
    """Whether the user's code called an installed library, which waits for a thread of its own."""
    for frame in stack.frames if stack is not None else ():
        if is_user_frame(frame):
            return False
        if is_installed_frame(frame):
            return True
    return False


def get_calling_thread_since(process: Process, since: float) -> ThreadStack | None:
    """The calling thread's stack in the newest sample, if that was taken since."""
    samples = list_samples_since(process, since)
    return samples[-1].calling_thread if samples else None


def find_blocked_streams(process: Process, before: float) -> list[CallStream]:
    """The calls in which the whole process is blocked, and not one thread while others that make calls
    continue. In some jobs one thread makes all calls, while the main thread sleeps until it ends.
    """
    blocked = [s for s in process.blocked_streams if s.entered_at <= before]
    if not blocked:
        return []
    since = max([stream.entered_at for stream in blocked])
    has_called_since = process.newest_call_at > since + MIN_WAIT_S
    if has_called_since:  # another thread, which may wait for this one now
        since = process.newest_call_at
    samples = list_samples_since(process, since)
    if not samples:
        return [] if has_called_since else blocked
    sample = samples[-1]
    others = _list_callers(process, sample, blocked)
    if has_called_since:
        if not all(find_waiting_caller(sample, stream) for stream in blocked):
            return []
        # A thread may wait for the end or the result of another one. But any thread may hold a lock.
        is_blocked = all(
            waits_for_communication(thread)
            or (_is_waiting_for_thread(thread) and classify_activity(thread).waits is not LOCK)
            for thread in others
        )
    else:
        is_active = process.inactive_s < IDLE_AFTER_S
        is_blocked = not any(
            waits_for_external(thread) or (is_active and waits_for_communication(thread) is False)
            for thread in others
        )
    return blocked if is_blocked else []


def find_waiting_caller(sample: StackSample, stream: CallStream) -> ThreadStack | None:
    """The thread that made the newest call of a stream, if a sample shows that it waits."""
    caller = sample.find_caller(stream)
    if caller is None or stream.uid not in caller.called_uids:
        return None
    return caller if waits_for_communication(caller) else None


def _list_callers(
    process: Process, sample: StackSample, excluded: Collection[CallStream] = ()
) -> list[ThreadStack]:
    """The threads in the user's code that made calls other than the creation of groups, without those
    that make the calls of the ``excluded`` streams.
    """
    excluded_threads = {id(sample.find_caller(stream)) for stream in excluded}
    callers = []
    for thread in sample.threads:
        if thread.call_recency is None or id(thread) in excluded_threads:
            continue
        streams = [process.streams.get(uid) for uid in thread.called_uids]
        kinds = {None if stream is None else stream.kind for stream in streams}
        if kinds != {StreamKind.SETUP} and runs_user_code(thread):
            callers.append(thread)
    return callers


def has_working_thread(process: Process, since: float) -> bool:
    """Whether a thread was sampled in the user's code, where it waits for no rank: it may be about
    to make the missing call.
    """
    for sample in list_samples_since(process, since):
        for thread in sample.threads:
            if thread.pid is None and runs_user_code(thread):
                is_waiting = _is_waiting_for_thread(thread)
                if not is_waiting and waits_for_communication(thread) is False:
                    return True
    return False


def _is_waiting_for_thread(stack: ThreadStack | None) -> bool:
    return classify_activity(stack).waits.waits_for_thread


def is_process_waiting(process: Process) -> bool | None:
    """Whether the calling threads wait, by stacks or else by idleness; None if it is a guess."""
    # Few of 100,000 processes have samples, and it takes long to find when a process advanced.
    samples = process.samples and list_samples_since(process, process.last_advanced_at)
    if samples:
        sample = samples[-1]
        callers: list[ThreadStack | None] = [*_list_callers(process, sample)]
        if len(callers) > 1:
            callers = [thread for thread in callers if not _is_waiting_for_thread(thread)]
        if len(callers) <= 1:
            callers = [sample.calling_thread]
        waits = [
            waits_for_communication(thread) and not waits_for_external(thread) for thread in callers
        ]
        known_waits = [wait for wait in waits if wait is not None]
        if known_waits:
            return all(known_waits)
    return None if process.inactive_s >= IDLE_AFTER_S else False
