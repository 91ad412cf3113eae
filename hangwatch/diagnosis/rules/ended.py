"""Ranks that ended: the first failure is the cause, unless the rank failed because another one had
left before it.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    find_last_site,
    find_silent_node_mates,
    get_newest_call,
    get_op_name,
    select_waits,
)
from hangwatch.diagnosis.peer_errors import has_peer_error, was_ended_by_watchdog
from hangwatch.model.calls import Site, StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .departures import find_departed_before, find_not_reporting_since
from .failures import (
    PEER_ERROR_DELAY_S,
    find_independent_failures,
    get_failure_time,
    has_failed_exit,
    sort_by_cause,
    was_terminated,
)
from .teardown import is_teardown
from .timeouts import diagnose_timeout
from .watchdogs import diagnose_watchdog_end, has_waited


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
        return  # it failed because of a call that was wrong before
    waiters = context.graph.find_waiters_of([first.rank])
    if was_terminated(first) and not waiters:
        return
    is_in_teardown = is_teardown(context, failed)
    if is_in_teardown:
        return
    last = first.newest_stream
    not_reporting: list[int] = []
    if last is not None:
        departed = find_departed_before(context, first, last)
        if departed:
            _add_exited_rank_verdict(context, departed, failed, last)
            return
        not_reporting = find_not_reporting_since(context, first, last)
        if any(_is_lost(context, rank) for rank in not_reporting):
            lost_ranks = find_silent_node_mates(context, not_reporting)
            _add_lost_node_verdict(context, lost_ranks, last, failed)
            return
    due = _has_settled(context, first) and not not_reporting and is_in_teardown is False
    failed_ranks = {process.rank for process in failed}
    failed_at = get_failure_time(first)
    aborted = [process for process in failed if was_ended_by_watchdog(process)]
    if was_ended_by_watchdog(first) and has_waited(aborted):
        diagnose_watchdog_end(context, first, failed_ranks, due=due)
    elif not diagnose_timeout(context, first, failed_ranks, failed_at, due=due):
        _add_dead_rank_verdict(context, last, waiters, failed, due=due)


def _is_lost(context: DiagnosisContext, rank: int) -> bool:
    silence = context.graph.silent_ranks.get(rank)
    silence_s = context.now - silence.last_alive_at if silence is not None else 0.0
    return silence_s >= context.limits.stall_after_s


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


def _add_dead_rank_verdict(
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
    context.verdicts.append(
        Verdict(
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
            summary=messages.describe_death(first),
            advice=messages.format_dead_rank_advice(first, independent_failures),
            site=first.exception.site if first.exception is not None else find_last_site(first),
        )
    )
    context.explained_ranks |= {first.rank, *waiting, *(process.rank for process in failed)}


def _add_exited_rank_verdict(
    context: DiagnosisContext, departed: list[int], failed: list[Process], last: CallStream
) -> None:
    """The verdict on ranks that left before ``last``, in which the first failed rank needed them:
    it failed on their closed connections.
    """
    first = failed[0]
    waiting = _find_failed_or_waiting(context, failed, departed)
    culprits = tuple(sorted(departed))
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.EXITED_RANK,
            severity=KINDS[VerdictKind.EXITED_RANK].severity,
            culprits=culprits,
            waiting=tuple(sorted(waiting)),
            group=last.group,
            seq=last.entered,
            calls=get_newest_call(last, first.rank),
            waits=select_waits(context, waiting),
            began_at=last.entered_at,
            is_confirmed=context.now - get_failure_time(first) >= context.limits.settle_s,
            summary=messages.describe_exited_ranks(
                culprits,
                _has_ended(context, departed[0]),
                len(waiting),
                get_op_name(last),
                last.group,
                last.entered,
            ),
            advice=messages.format_exited_rank_advice(len(departed) > 1),
            site=_find_last_site_of(context, departed[0]),
        )
    )
    context.explained_ranks |= {*departed, *waiting}


def _find_failed_or_waiting(
    context: DiagnosisContext, failed: list[Process], culprits: list[int]
) -> set[int]:
    failed_ranks = {process.rank for process in failed}
    return (failed_ranks | context.graph.get_waiting_ranks()) - set(culprits)


def _has_ended(context: DiagnosisContext, rank: int) -> bool:
    process = context.attempt.processes.get(rank)
    return process is None or not process.is_alive


def _find_last_site_of(context: DiagnosisContext, rank: int) -> Site | None:
    process = context.attempt.processes.get(rank)
    return find_last_site(process) if process is not None else None


def _add_lost_node_verdict(
    context: DiagnosisContext, lost_ranks: list[int], last: CallStream, failed: list[Process]
) -> None:
    """The verdict on a node that disappeared with its node agent: only its peers show it, which
    fail on its closed connections.
    """
    waiting = _find_failed_or_waiting(context, failed, lost_ranks)
    culprits = tuple(sorted(lost_ranks))
    host = context.attempt.processes[lost_ranks[0]].host
    summary, advice = messages.describe_lost_node(host, culprits, len(waiting), get_op_name(last))
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.LOST_NODE,
            severity=KINDS[VerdictKind.LOST_NODE].severity,
            culprits=culprits,
            waiting=tuple(sorted(waiting)),
            group=last.group,
            seq=last.entered,
            waits=select_waits(context, waiting),
            began_at=min(context.graph.silent_ranks[rank].last_alive_at for rank in lost_ranks),
            summary=summary,
            advice=advice,
        )
    )
    context.explained_ranks |= {*lost_ranks, *waiting}
