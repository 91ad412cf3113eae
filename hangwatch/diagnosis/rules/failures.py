"""Whether and when processes failed, in which order their failures caused each other, and without
which ranks a failed call could not complete.
"""

from __future__ import annotations

import signal
from bisect import bisect_right

from hangwatch.model.groups import Group
from hangwatch.model.limits import DETECTION_DELAY_S, PEER_ERROR_DELAY_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..context import (
    PEER_ERROR_TYPES,
    TERMINATION_SIGNALS,
    DiagnosisContext,
    has_peer_error,
    has_timed_out,
)

MAX_SEARCHED_RANKS = 1000  # ranks whose waits are followed back from a failure
_INTERRUPT = "KeyboardInterrupt"


def has_failed_exit(process: Process) -> bool:
    """Whether the process ended, or is about to end, with a failure."""
    end = process.exit
    if end is None:
        # Python may take long to exit, or never finish exiting, after an uncaught exception.
        has_raised = process.exception is not None and process.exception.type != _INTERRUPT
        return has_raised and process.lifecycle is Lifecycle.EXITING
    if _is_exit_unseen(process):
        return process.lifecycle < Lifecycle.EXITING or process.exception is not None
    return end.has_failed


def was_terminated(process: Process) -> bool:
    """Whether a user or a launcher ended the process with a termination signal. An exception that it raised
    before is a failure of its own.
    """
    if process.exit is None or process.exit.signal not in TERMINATION_SIGNALS:
        return False
    return process.exception is None or process.exception.type == _INTERRUPT


def get_failure_time(process: Process) -> float:
    """When the process failed. Its exception, or the start of its exit, precedes the end of the process,
    which may take long.

    If no one saw its end, the recorder's last pulse is accurate to a tenth of a second, unless the
    host was too busy.
    """
    times = [process.exited_at, process.exception_at]
    if process.lifecycle is Lifecycle.EXITING or _is_exit_unseen(process):
        times.append(process.activity.pulse_at)
    return min((at for at in times if at is not None), default=float("inf"))


def _is_exit_unseen(process: Process) -> bool:
    """Whether the process was gone before its node agent could read its exit status."""
    end = process.exit
    return end is not None and end.signal is None and end.exit_status is None


def find_independent_failures(others: list[Process]) -> tuple[Process, ...] | None:
    """The processes with an exception that no lost connection raises; None if it is not known
    whether there are any.
    """
    own_exceptions = [
        (process, process.exception.type)
        for process in others
        if process.exception is not None
        and not has_peer_error(process)
        and process.exception.type != _INTERRUPT
    ]
    independent = tuple(
        process for process, name in own_exceptions if not PEER_ERROR_TYPES.search(name)
    )
    return independent if independent or not own_exceptions else None


def sort_by_cause(failed: list[Process]) -> list[Process]:
    """Sorts failures by time, corrected where the time of a consequence may precede its cause.

    A process that reports a lost connection may have noticed the end of another one before that was
    seen. A process that vanished may have lived a little longer than its last pulse, until an
    exception elsewhere. A process that was terminated after such a report was terminated because of
    it.
    """
    peer_error_times = sorted(get_failure_time(p) for p in failed if has_peer_error(p))
    exception_times = sorted(
        p.exception_at for p in failed if p.exception_at is not None and not has_peer_error(p)
    )

    def failure_sort_key(process: Process) -> tuple[float, bool]:
        failed_at = get_failure_time(process)
        if has_peer_error(process):
            # A process that times out closes its connections, and its peers may report that first.
            lead_s = DETECTION_DELAY_S if has_timed_out(process) else 0.0
            return failed_at + PEER_ERROR_DELAY_S - lead_s, False
        if was_terminated(process) and peer_error_times and peer_error_times[0] <= failed_at:
            return max(failed_at, peer_error_times[0] + PEER_ERROR_DELAY_S), True
        if _is_exit_unseen(process) and process.exception is None:
            earlier_count = bisect_right(exception_times, failed_at + DETECTION_DELAY_S)
            if earlier_count:
                return max(failed_at, exception_times[earlier_count - 1]), True
        return failed_at, False

    return sorted(failed, key=failure_sort_key)


def find_departed_before(context: DiagnosisContext, first: Process, last: CallStream) -> list[int]:
    """The ranks that had finished without a failure, and that the first failed rank waited for in
    its ``last`` call, directly or through other ranks.
    """
    if _has_own_exception(first):
        return []
    departed: list[int] = []
    seen = {first.rank}
    to_search = [first]
    resolver = context.graph.resolver
    for process in to_search:  # grows in the loop
        if len(seen) > MAX_SEARCHED_RANKS:
            break
        for stream in process.streams.values():
            is_failed_call = stream is last
            if not (stream.is_pending or is_failed_call):
                continue
            awaited = resolver.find_awaited_ranks(process.rank, stream, is_failed_call)
            for rank in awaited.keys() - seen:
                seen.add(rank)
                other = context.attempt.processes.get(rank)
                if other is None:
                    continue
                if _had_left(other, first, stream.group):
                    departed.append(rank)
                else:
                    to_search.append(other)
    return departed


def _has_own_exception(process: Process) -> bool:
    """Whether the process raised an exception that no peer causes."""
    return process.exception is not None and not PEER_ERROR_TYPES.search(process.exception.type)


def _had_left(process: Process, first: Process, group: Group) -> bool:
    """Whether the process left ``group`` without a failure before the first failure."""
    if process.exception is not None:
        return False
    ended_in_time = get_failure_time(process) <= get_failure_time(first) + DETECTION_DELAY_S
    if process.exit is not None and ended_in_time and not has_failed_exit(process):
        return True
    if process.exit is not None and process.exit.signal not in TERMINATION_SIGNALS:
        return False
    if process.lifecycle is Lifecycle.EXITING:
        return True
    return process.lifecycle is Lifecycle.DESTROYED and process.has_left(group)


def find_not_reporting_since(
    context: DiagnosisContext, first: Process, last: CallStream
) -> list[int]:
    """The members of the group of the ``last`` call, on other nodes, that are not known to have run
    until the first failure.
    """
    if _has_own_exception(first):
        return []
    end = first.exit.signal if first.exit is not None else None
    if end is not None and end not in (signal.SIGABRT, *TERMINATION_SIGNALS):
        return []  # a signal ended it that neither a launcher sends nor an abort raises
    failed_at = get_failure_time(first)
    not_reporting = []
    for rank in last.group.ranks:
        process = context.attempt.processes.get(rank)
        if process is None or not process.is_alive or process.agent == first.agent:
            continue
        silence = context.graph.silent_ranks.get(rank)
        if silence is not None and silence.is_proven_alive:
            continue
        last_alive_at = process.reports.agent_seen_at if silence is None else silence.last_alive_at
        if last_alive_at <= failed_at + DETECTION_DELAY_S:
            not_reporting.append(rank)
    return not_reporting
