"""Whether a rank that others wait for still moves: from looks at its stack, its use of the CPU, and
that of what it waits for itself.
"""

from __future__ import annotations

from hangwatch.model.threads import ThreadStack
from hangwatch.stacks.activities import classify_activity
from hangwatch.stacks.activity_kinds import RequiredProgress
from hangwatch.stacks.frames import is_user_frame
from hangwatch.tracking.process import IDLE_AFTER_S, Process, StackSample

MIN_SAMPLE_GAP_S = 0.8  # seconds between two looks that count as two
# seconds since the main thread last used the CPU or waited for one; a look at its stack may stop it
# for one of them
BUSY_WITHIN_S = 2.0
MIN_CPU_SHARE = 0.05  # of a CPU, from one look to the next: whoever only polls takes less
MIN_READY_SHARE = (
    1 / 3
)  # of the time without a CPU while ready to run, likewise: see the node agent's `Activity`
_RECORDER_THREAD_NAME = "hangwatch"


def list_samples_since(process: Process, since: float) -> list[StackSample]:
    """The stacks taken since a wait began."""
    return [s for s in process.samples if s.taken_at >= since and s.threads]


def has_two_samples(process: Process, since: float) -> bool:
    taken = list_samples_since(process, since)
    return len(taken) >= 2 and taken[-1].taken_at - taken[0].taken_at >= MIN_SAMPLE_GAP_S


def is_progressing(process: Process, since: float) -> bool:
    """It works: its main thread uses the CPU, or is in other functions at one look than at the
    other.
    """
    return is_busy(process) or has_stack_changed(process, since)


def is_busy(process: Process) -> bool:
    return process.reports.updated_at - process.activity.last_active_at < BUSY_WITHIN_S


def has_stack_changed(process: Process, since: float) -> bool:
    shapes = {
        tuple(
            (f.file, f.function)
            for f in s.main_thread.frames
            if ".py" in f.file or f.file.startswith("<")
        )
        for s in list_samples_since(process, since)
        if s.main_thread is not None
    }
    return len(shapes) > 1


def list_other_threads(sample: StackSample) -> list[ThreadStack]:
    """The threads of a rank beside its main thread and the recorder's; and the children that the
    main thread waits for.
    """
    return [
        t
        for t in sample.threads
        if t is not sample.main_thread and (t.pid is not None or t.thread != _RECORDER_THREAD_NAME)
    ]


def find_working_threads(process: Process, since: float) -> list[ThreadStack]:
    """Threads and children that do what its main thread waits for, as of the newest look; none
    where they may do anything else.
    """
    taken = list_samples_since(process, since)
    before = next(
        (s for s in reversed(taken) if taken[-1].taken_at - s.taken_at >= MIN_SAMPLE_GAP_S), None
    )
    if before is None:
        return []
    waits, awaited = _find_awaited_threads(taken[-1])
    known = {(t.pid, t.tid): t for t in before.threads}
    children = {t.pid for t in before.threads if t.pid is not None}
    passed = taken[-1].taken_at - before.taken_at
    working = [t for t in awaited if _has_used_cpu(t, known.get((t.pid, t.tid)), passed)]
    if (
        children and not working
    ):  # another one than at the look before: whoever runs many short programs goes on
        working = [t for t in awaited if t.pid is not None and t.pid not in children]
    return working if waits is not RequiredProgress.ALL or len(working) == len(awaited) else []


def _has_used_cpu(now: ThreadStack, before: ThreadStack | None, elapsed_s: float) -> bool:
    """It used the CPU in the seconds that passed, or was ready to and got none."""
    cpu_s, ready_s = (
        (before.cpu_s or 0.0, before.ready_s or 0.0) if before is not None else (0.0, 0.0)
    )
    return (now.cpu_s or 0.0) - cpu_s >= MIN_CPU_SHARE * elapsed_s or (
        now.ready_s or 0.0
    ) - ready_s >= MIN_READY_SHARE * elapsed_s


def is_waiting_for_rank(process: Process, since: float) -> bool | None:
    """As of the newest look it waits for what another rank may well do: its own children do not.
    None where nobody looked.
    """
    taken = list_samples_since(process, since)
    if not taken:
        return None
    if is_busy(process) and process.activity.last_active_at > taken[-1].taken_at + IDLE_AFTER_S:
        return False  # it has gone on since
    waits = classify_activity(taken[-1].main_thread).waits
    return (
        waits is not None
        and waits.waits_for_rank
        and not any(map(waits.may_wait_for, list_other_threads(taken[-1])))
    )


def needs_another_sample(process: Process, since: float, beside_slow: bool) -> bool:
    """A look that is still to come will tell: whether those work whom it waits for on its host, or
    whether it waits for a slow rank.
    """
    taken = list_samples_since(process, since)
    return (
        (bool(_find_awaited_threads(taken[-1])[1]) and not has_two_samples(process, since))
        if taken
        else beside_slow
    )


def _find_awaited_threads(sample: StackSample) -> tuple[RequiredProgress, list[ThreadStack]]:
    """Those whose work can show that the main thread's wait is no hang, as far as their use of the
    CPU is known.
    """
    waits = classify_activity(sample.main_thread).waits
    if waits is None or waits.required_progress is RequiredProgress.NONE:
        return RequiredProgress.NONE, []
    able = [t for t in list_other_threads(sample) if t.cpu_s is not None and waits.may_wait_for(t)]
    if waits.required_progress is RequiredProgress.ALL:
        able = [t for t in able if any(map(is_user_frame, t.frames))]
    return waits.required_progress, (
        able[:1] if waits.required_progress is RequiredProgress.NEWEST else able
    )
