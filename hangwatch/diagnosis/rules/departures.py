"""Ranks without which a failed call could not complete: those that had left before, and those whose
host did not report at that time.
"""

from __future__ import annotations

import signal

from hangwatch.diagnosis.context import TERMINATION_SIGNALS, DiagnosisContext
from hangwatch.diagnosis.graph.awaited import WaitResolver
from hangwatch.diagnosis.peer_errors import PEER_ERROR_TYPES
from hangwatch.model.groups import Group
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .failures import DETECTION_DELAY_S, get_failure_time, has_failed_exit

_MAX_SEARCHED_RANKS = 1000


def find_departed_before(context: DiagnosisContext, first: Process, last: CallStream) -> list[int]:
    """The ranks that had finished without a failure, and that the first failed rank waited for in
    its ``last`` call, directly or through other ranks.
    """
    if _has_own_exception(first):
        return []
    departed: list[int] = []
    seen = {first.rank}
    to_search = [first]
    resolver = WaitResolver(context.attempt, context.now, context.graph.silent_ranks)
    for process in to_search:  # grows in the loop
        if len(seen) > _MAX_SEARCHED_RANKS:
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
    """Whether it raised an exception that no peer causes."""
    return process.exception is not None and not PEER_ERROR_TYPES.search(process.exception.type)


def _had_left(process: Process, first: Process, group: Group) -> bool:
    """Whether it left ``group`` without a failure before the first failure."""
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
    if _has_own_exception(first) or _was_killed(first):
        return []
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


def _was_killed(process: Process) -> bool:
    """Whether a signal ended it that neither a launcher sends to end it nor an abort raises."""
    if process.exit is None or process.exit.signal is None:
        return False
    return process.exit.signal not in (signal.SIGABRT, *TERMINATION_SIGNALS)
