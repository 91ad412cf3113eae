"""Ranks that ended: the first failure is the cause, unless the rank failed because another one had
left before it, or its launcher ended it after all ranks had finished their work.
"""

from __future__ import annotations

import signal

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import PEER_ERROR_DELAY_S, TEARDOWN_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..context import (
    TERMINATION_SIGNALS,
    DiagnosisContext,
    find_last_site,
    find_silent_node_mates,
    get_newest_call,
    has_peer_error,
    select_waits,
    was_ended_by_watchdog,
)
from ..graph.edges import get_op_name
from .absence import (
    describe_death,
    describe_exited_ranks,
    describe_lost_node,
    format_dead_rank_advice,
)
from .failures import (
    find_departed_before,
    find_independent_failures,
    find_not_reporting_since,
    get_failure_time,
    has_failed_exit,
    sort_by_cause,
    was_terminated,
)
from .timeouts import diagnose_timeout, diagnose_watchdog_end, has_waited

_LAUNCHER_SIGNALS = (signal.SIGKILL, *TERMINATION_SIGNALS)


def diagnose_exits(context: DiagnosisContext) -> None:
    """One verdict for the first failure. Later ones are consequences: launchers kill the other
    ranks within a second, and peers fail on the lost connection.
    """
    unable = [context.attempt.processes[rank] for rank in sorted(context.attempt.unable_ranks)]
    failed = sort_by_cause([process for process in unable if has_failed_exit(process)])
    if not failed:
        return
    first = failed[0]
    if first.rank in context.explained_ranks:
        return  # the rank failed because of a call that was wrong before
    waiters = context.graph.find_waiters_of([first.rank])
    if was_terminated(first) and not waiters:
        return
    is_in_teardown = _is_teardown(context, failed)
    if is_in_teardown:
        return
    last = first.newest_stream
    not_reporting: list[int] = []
    if last is not None:
        departed = find_departed_before(context, first, last)
        if departed:
            _accuse_departed(context, VerdictKind.EXITED_RANK, departed, failed, last)
            return
        not_reporting = find_not_reporting_since(context, first, last)
        silences = [context.graph.silent_ranks.get(rank) for rank in not_reporting]
        lost_by = context.now - context.limits.stall_after_s
        if any(silence is not None and silence.last_alive_at <= lost_by for silence in silences):
            lost_ranks = find_silent_node_mates(context, not_reporting)
            _accuse_departed(context, VerdictKind.LOST_NODE, lost_ranks, failed, last)
            return
    due = _has_settled(context, first) and not not_reporting and is_in_teardown is False
    failed_ranks = {process.rank for process in failed}
    failed_at = get_failure_time(first)
    aborted = [process for process in failed if was_ended_by_watchdog(process)]
    if was_ended_by_watchdog(first) and has_waited(aborted):
        diagnose_watchdog_end(context, first, failed_ranks, due=due)
    elif not diagnose_timeout(context, first, failed_ranks, failed_at, due=due):
        _accuse_dead_rank(context, last, waiters, failed, due=due)


def _has_settled(context: DiagnosisContext, first: Process) -> bool:
    """Whether the last reports of other ranks, and the exit of a rank that ``first`` may have lost,
    have had time to arrive.
    """
    if first.exited_at is not None:
        failed_at = first.exited_at
    else:
        failed_at = get_failure_time(first)
        if has_peer_error(first):
            failed_at += PEER_ERROR_DELAY_S
    return context.now - failed_at >= context.limits.settle_s


def _accuse_dead_rank(
    context: DiagnosisContext,
    last: CallStream | None,
    waiters: set[int],
    failed: list[Process],
    *,
    due: bool,
) -> None:
    first = failed[0]
    waiting = waiters | (context.graph.get_waiting_ranks() - {first.rank})
    waiting |= context.find_waiting_devices([first.rank])
    call_inside: CallStream | None = None
    if last is not None and last.is_pending and last.kind is StreamKind.COLLECTIVE:
        call_inside = last
    independent_failures = find_independent_failures(failed[1:])
    verdict = Verdict(
        kind=VerdictKind.DEAD_RANK,
        severity=KINDS[VerdictKind.DEAD_RANK].severity,
        culprits=(first.rank,),
        waiting=tuple(sorted(waiting)),
        group=call_inside.group if call_inside else None,
        seq=call_inside.entered if call_inside else None,
        calls=get_newest_call(call_inside, first.rank),
        waits=select_waits(context, waiting),
        began_at=get_failure_time(first),
        is_confirmed=due,
        summary=describe_death(first),
        advice=format_dead_rank_advice(first, independent_failures),
        site=first.exception.site if first.exception is not None else find_last_site(first),
    )
    context.accuse(verdict, {process.rank for process in failed})


def _accuse_departed(
    context: DiagnosisContext,
    kind: VerdictKind,
    departed: list[int],
    failed: list[Process],
    last: CallStream,
) -> None:
    """Accuses ranks that left before ``last``, in which the first failed rank needed them: it failed on
    their closed connections. Ranks that left by themselves are an `EXITED_RANK`, and those of a node
    that disappeared with its node agent a `LOST_NODE`, which only its peers show.
    """
    first, process = failed[0], context.attempt.processes[departed[0]]
    culprits = tuple(sorted(departed))
    waiting = {process.rank for process in failed} | context.graph.get_waiting_ranks()
    waiting -= set(departed)
    op = get_op_name(last)
    calls = get_newest_call(last, first.rank)
    site = find_last_site(process)
    is_due = context.now - get_failure_time(first) >= context.limits.settle_s
    if kind is VerdictKind.LOST_NODE:
        summary, advice = describe_lost_node(process.host, culprits, len(waiting), op)
        calls, site, is_due = (), None, True
        began_at = min(context.graph.silent_ranks[rank].last_alive_at for rank in departed)
    else:
        summary, advice = describe_exited_ranks(
            culprits, not process.is_alive, len(waiting), op, last.group, last.entered
        )
        began_at = last.entered_at
    verdict = Verdict(
        kind=kind,
        severity=KINDS[kind].severity,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=last.group,
        seq=last.entered,
        calls=calls,
        waits=select_waits(context, waiting),
        began_at=began_at,
        is_confirmed=is_due,
        summary=summary,
        advice=advice,
        site=site,
    )
    context.accuse(verdict)


def _is_teardown(context: DiagnosisContext, failed: list[Process]) -> bool | None:
    """Whether these processes were ended after they had finished their work, as Ray ends its workers,
    with an exit status that is not 0. None if the others may be about to end.

    A process that destroyed its groups has finished. Where a thread makes the calls, its end does
    not end the process, so nothing but the end of all processes in the same way shows that they
    finished: then all have completed the same calls, and none waits.
    """
    if not all(map(_has_ended_quietly, failed)):
        return False
    if context.graph.find_waiters_of([process.rank for process in failed]):
        return False
    if all(process.lifecycle is Lifecycle.DESTROYED for process in failed):
        return True
    if not all(map(_has_called_in_thread, failed)) or context.graph.get_waiting_ranks():
        return False
    processes = context.attempt.processes.values()
    streams = [stream for process in processes for stream in process.streams.values()]
    if len(processes) < 2 or not all(map(_is_complete, streams)):
        return False
    if len({process.exit for process in failed}) > 1:
        return False
    if len(failed) == len(processes):
        return True
    is_recent = context.now - get_failure_time(failed[0]) < TEARDOWN_S
    return None if is_recent else False


def _has_ended_quietly(process: Process) -> bool:
    """Whether the end of a process shows no failure of its own: no exception, no signal but a launcher's."""
    end = process.exit
    if end is None or process.exception is not None:
        return False
    return not end.signal or end.signal in _LAUNCHER_SIGNALS


def _has_called_in_thread(process: Process) -> bool:
    """Whether another thread than the main thread made the newest call of a rank."""
    newest = process.newest_stream
    call = newest.calls.get(newest.entered) if newest is not None else None
    return call is not None and call.thread not in (0, process.identity.pid)


def _is_complete(stream: CallStream) -> bool:
    """Whether all calls of a stream are complete, and all members of the group made as many."""
    if stream.completed is not None and stream.completed < stream.entered:
        return False
    if stream.device is not None and stream.device.is_behind_host:
        return False
    group_state = stream.group_state
    if stream.kind is not StreamKind.COLLECTIVE or group_state is None:
        return True
    return not group_state.has_member_behind(stream)
