"""Who waits, and for whom: the wait-for graph from counts of calls, and from what is known of each
rank's threads.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.stacks.activities import classify_activity, waits_for_external
from hangwatch.stacks.frames import is_user_frame, waits_for_communication, waits_for_work
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import IDLE_AFTER_S, Process

from .awaited import WaitResolver, may_be_released, receives_from_any
from .graph import BlockedCall, WaitGraph
from .silence import find_silent_ranks


def build_wait_graph(attempt: Attempt, now: float, lost_after_s: float) -> WaitGraph:
    """The graph at time ``now``, of all waits that stand for `STANDING` seconds."""
    graph = WaitGraph(silent_ranks=find_silent_ranks(attempt, now, lost_after_s))
    others = WaitResolver(attempt, now, graph.silent_ranks)
    before = now - MIN_WAIT_S
    for rank, process in attempt.processes.items():
        if (
            not process.open_calls.unfinished_streams
            or process.reports.last_progress_at > process.reports.last_seen_at
            or rank in others.unable_to_finish
            or rank in graph.silent_ranks
        ):
            continue
        certain, got_on_at = _find_blocked_streams(process, before), 0.0
        # Some call may be unfinished, and none was made for a while: whoever makes further calls is
        # not waiting.
        pending = certain or [
            s
            for s in process.open_calls.unfinished_streams
            if s.entered_at <= before and s.entered > 0
        ]
        if not pending or (not certain and (got_on_at := process.last_advanced_at) > before):
            continue
        stops: list[BlockedCall] = []
        stuck: list[CallStream] = []
        for sequence in pending:
            awaited = others.find_awaited_ranks(rank, sequence, bool(certain))
            if awaited:
                since = sequence.entered_at if certain else max(sequence.entered_at, got_on_at)
                stops.append(
                    BlockedCall(rank, sequence, since, awaited, receives_from_any(sequence))
                )
            elif sequence.completed is not None and (
                sequence.peer is None or _is_waiting_on_channel(process, sequence)
            ):
                stuck.append(sequence)
        if (
            not stops
            and not stuck
            and all(
                s.peer is None
                for s in process.open_calls.unfinished_streams
                if s.entered_at <= before and s.entered > 0
            )
        ):
            continue
        if not certain:
            waits = is_main_thread_waiting(process)
            if waits is False:
                continue
            if waits is None:
                graph.uncertain_ranks.add(rank)
        if stops:
            graph.blocked_calls[rank] = stops
        elif not stuck:
            graph.released_ranks.add(rank)
            if any(may_be_released(attempt, rank, sequence) for sequence in pending):
                graph.newly_released_ranks.add(rank)
        else:
            graph.stuck_streams[rank] = max(stuck, key=lambda s: s.entered_at)
    return graph


def _is_waiting_on_channel(process: Process, stream: CallStream) -> bool:
    """Of many sends it is never told that they are complete: only a stack shows that a rank waits
    for one that its peer received.

    What is received from any source may be what this call was to receive.
    """
    samples = [s for s in process.samples if s.taken_at >= stream.entered_at and s.threads]
    any_source = any(s.peer == -1 for s in process.streams.values())
    return bool(samples) and waits_for_work(samples[-1].main_thread) and not any_source


def _find_blocked_streams(process: Process, before: float) -> Collection[CallStream]:
    """The calls that the process as a whole is blocked in: not those of a thread beside which
    others go on.
    """
    if (
        len(process.open_calls.blocked_streams) == 1
        and process.newest_call_at <= process.open_calls.blocked_streams[0].entered_at <= before
        and not process.samples
    ):
        return (
            process.open_calls.blocked_streams
        )  # so it is with nearly all of 100,000 ranks that wait
    blocked = [s for s in process.open_calls.blocked_streams if s.entered_at <= before]
    if not blocked:
        return blocked
    since = max([s.entered_at for s in blocked])
    if process.newest_call_at > since + MIN_WAIT_S:
        return []
    if not process.samples:
        return blocked
    main = get_main_thread_since(process, since)
    works = (
        waits_for_communication(main) is False
        and process.reports.updated_at - process.activity.last_active_at < IDLE_AFTER_S
    )
    return [] if (works or waits_for_external(main)) and _has_several_callers(process) else blocked


def _has_several_callers(process: Process) -> bool:
    """Several threads of it make calls: in some jobs all is done by a thread to the end of which
    the main thread sleeps.
    """
    return (
        len(
            {
                call.thread
                for s in process.streams.values()
                for call in s.calls.values()
                if call.thread
            }
        )
        > 1
    )


def get_main_thread_since(process: Process, since: float) -> ThreadStack | None:
    """The main thread's newest stack, if it was taken since then."""
    samples = [s for s in process.samples if s.taken_at >= since and s.threads]
    return samples[-1].main_thread if samples else None


def has_working_thread(process: Process, since: float) -> bool:
    """A thread was seen in the user's code, where it waits for nobody: the missing call may be its
    own.
    """
    threads = [
        t
        for s in process.samples
        if s.taken_at >= since
        for t in s.threads
        if t.pid is None and any(map(is_user_frame, t.frames))
    ]
    return any(
        waits_for_communication(t) is False and not _is_waiting_for_thread(t) for t in threads
    )


def _is_waiting_for_thread(stack: ThreadStack) -> bool:
    waits = classify_activity(stack).waits
    return waits is not None and waits.waits_for_thread


def is_main_thread_waiting(process: Process) -> bool | None:
    """Whether the main thread waits for communication: by its stack, else by its idleness; None
    where only guessed.
    """
    main = get_main_thread_since(process, process.last_advanced_at)
    if (told := waits_for_communication(main)) is not None:
        return told and not waits_for_external(main)
    return (
        None
        if process.reports.updated_at - process.activity.last_active_at >= IDLE_AFTER_S
        else False
    )


def is_not_initialized(process: Process | None) -> bool:
    """The rank has not reached init_process_group, or not again since it destroyed its groups."""
    return process is None or (
        process.is_alive
        and (process.lifecycle <= Lifecycle.STARTING or process.lifecycle is Lifecycle.DESTROYED)
    )
