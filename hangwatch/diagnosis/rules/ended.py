"""Ranks that ended: the first that failed is the cause, unless it failed for want of one that had
simply left.
"""

from __future__ import annotations

import signal
from bisect import bisect_right

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    TERMINATION_SIGNALS,
    DiagnosisContext,
    find_last_site,
    find_silent_node_mates,
    get_newest_call,
    get_op_name,
    select_waits,
)
from hangwatch.diagnosis.graph.awaited import WaitResolver
from hangwatch.diagnosis.peer_errors import PEER_ERROR_TYPES, has_peer_error, has_timed_out
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .timeouts import diagnose_timeout

_DETECTION_DELAY_S = (
    1.0  # seconds: a peer may notice a closed connection this long before its owner's end is seen
)
_MAX_SEARCHED_RANKS = 1000  # ranks that are looked at in search of those who left
# seconds that a failure for want of a peer stands behind one of another kind
_PEER_ERROR_DELAY_S = 2.0


def diagnose_exits(context: DiagnosisContext) -> None:
    """Launchers kill the rest within a second of a first failure, and peers fail on the lost
    connection: neither is a cause.
    """
    failed = _sort_by_cause(
        [
            p
            for p in map(
                context.attempt.processes.__getitem__, sorted(context.attempt.unable_ranks)
            )
            if has_failed_exit(p)
        ]
    )
    if not failed:
        return
    first = failed[0]
    if first.rank in context.explained_ranks:
        return  # died in a call that was wrong before it
    reaching = context.graph.find_waiters_of([first.rank])
    if was_terminated(first) and not reaching:
        return
    last = first.newest_stream
    left = _find_departed_before(context, first, last) if last is not None else []
    unheard = _find_not_reporting_since(context, first, last) if last is not None else []
    if left and last is not None:
        _add_exited_rank_verdict(context, left, first, last, failed)
    elif last is not None and any(
        _get_silence_s(context, r) >= context.limits.stall_after_s for r in unheard
    ):
        _add_lost_node_verdict(context, find_silent_node_mates(context, unheard), last, failed)
    else:
        due = _has_settled(context, first) and not unheard
        if not diagnose_timeout(
            context, first, {p.rank for p in failed}, get_failure_time(first), due=due
        ):
            _add_dead_rank_verdict(context, first, last, reaching, failed, due=due)


def _add_dead_rank_verdict(
    context: DiagnosisContext,
    first: Process,
    last: CallStream | None,
    waiters: set[int],
    failed: list[Process],
    *,
    due: bool,
) -> None:
    waiting = waiters | {r for r in context.graph.get_waiting_ranks() if r != first.rank}
    inside = (
        last
        if last is not None and last.is_pending and last.kind is StreamKind.COLLECTIVE
        else None
    )
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.DEAD_RANK,
            severity=Severity.ALERT,
            culprits=(first.rank,),
            waiting=tuple(sorted(waiting)),
            group=inside.group if inside else None,
            seq=inside.entered if inside else None,
            calls=get_newest_call(inside, first.rank),
            waits=select_waits(context, waiting),
            began_at=get_failure_time(first),
            is_confirmed=due,
            summary=messages.describe_death(first),
            advice=messages.format_dead_rank_advice(first, _find_independent_failures(failed[1:])),
            site=first.exception.site if first.exception is not None else find_last_site(first),
        )
    )
    context.explained_ranks |= {first.rank, *waiting, *(p.rank for p in failed)}


def _add_exited_rank_verdict(
    context: DiagnosisContext,
    departed: list[int],
    first: Process,
    last: CallStream,
    failed: list[Process],
) -> None:
    """Peers of a rank that left fail on its closed connections; what they needed is what it did not
    do.
    """
    waiting = ({p.rank for p in failed} | context.graph.get_waiting_ranks()) - set(departed)
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.EXITED_RANK,
            severity=Severity.ALERT,
            culprits=tuple(sorted(departed)),
            waiting=tuple(sorted(waiting)),
            group=last.group,
            seq=last.entered,
            calls=get_newest_call(last, first.rank),
            waits=select_waits(context, waiting),
            began_at=last.entered_at,
            is_confirmed=context.now - get_failure_time(first) >= context.limits.settle_s,
            summary=messages.describe_exited_ranks(
                tuple(sorted(departed)),
                _has_ended(context, departed[0]),
                len(waiting),
                get_op_name(last),
                last.group,
                last.entered,
            ),
            advice=messages.format_exited_rank_advice(len(departed) > 1),
            site=(
                find_last_site(process)
                if (process := context.attempt.processes.get(departed[0])) is not None
                else None
            ),
        )
    )
    context.explained_ranks |= {*departed, *waiting}


def _add_lost_node_verdict(
    context: DiagnosisContext, lost_ranks: list[int], last: CallStream, failed: list[Process]
) -> None:
    """A whole node went, its node agent with it: all that is seen of it is that peers fail on its
    closed connections.
    """
    waiting = ({p.rank for p in failed} | context.graph.get_waiting_ranks()) - set(lost_ranks)
    host = context.attempt.processes[lost_ranks[0]].host
    summary, advice = messages.describe_lost_node(
        host, tuple(sorted(lost_ranks)), len(waiting), get_op_name(last)
    )
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.LOST_NODE,
            severity=Severity.ALERT,
            culprits=tuple(sorted(lost_ranks)),
            waiting=tuple(sorted(waiting)),
            group=last.group,
            seq=last.entered,
            waits=select_waits(context, waiting),
            began_at=min(context.graph.silent_ranks[r].last_alive_at for r in lost_ranks),
            summary=summary,
            advice=advice,
        )
    )
    context.explained_ranks |= {*lost_ranks, *waiting}


def _find_not_reporting_since(
    context: DiagnosisContext, first: Process, last: CallStream
) -> list[int]:
    """Ranks of other nodes in the call that the first failure was in, of whom nobody knows whether
    they still ran by then.
    """
    by_itself = first.exit is not None and first.exit.signal not in (
        None,
        signal.SIGABRT,
        *TERMINATION_SIGNALS,
    )
    if by_itself or (
        first.exception is not None and not PEER_ERROR_TYPES.search(first.exception.type)
    ):
        return []
    found = []
    for rank in last.group.ranks:
        process = context.attempt.processes.get(rank)
        if process is None or not process.is_alive or process.agent == first.agent:
            continue
        silence = context.graph.silent_ranks.get(rank)
        lived_at = process.agent_seen_at if silence is None else silence.last_alive_at
        if lived_at <= get_failure_time(first) + _DETECTION_DELAY_S and not (
            silence is not None and silence.is_proven_alive
        ):
            found.append(rank)
    return found


def _get_silence_s(context: DiagnosisContext, rank: int) -> float:
    silence = context.graph.silent_ranks.get(rank)
    return context.now - silence.last_alive_at if silence is not None else 0.0


def _find_departed_before(context: DiagnosisContext, first: Process, last: CallStream) -> list[int]:
    """Those who had finished without a failure of their own, and whom the first failure waited for,
    or whom those waited for.
    """
    if first.exception is not None and not PEER_ERROR_TYPES.search(first.exception.type):
        return []
    found: list[int] = []
    seen, waiting = {first.rank}, [first]
    others = WaitResolver(context.attempt, context.now, context.graph.silent_ranks)
    for process in waiting:  # it grows meanwhile
        if len(seen) > _MAX_SEARCHED_RANKS:
            break
        for sequence in process.streams.values():
            if not (sequence.is_pending or sequence is last):
                continue
            certain = sequence is last
            for rank in others.find_awaited_ranks(process.rank, sequence, certain).keys() - seen:
                seen.add(rank)
                if (other := context.attempt.processes.get(rank)) is None:
                    continue
                if _had_left(other, first, sequence.group):
                    found.append(rank)
                else:
                    waiting.append(other)
    return found


def _had_left(process: Process, first: Process, group: Group) -> bool:
    """In good order, before the first failure, so that it could not come to ``group``."""
    if process.exception is not None:
        return False
    ended_in_time = (
        process.exit is not None
        and get_failure_time(process) <= get_failure_time(first) + _DETECTION_DELAY_S
    )
    stopped_later = process.exit is None or process.exit.signal in TERMINATION_SIGNALS
    left = process.lifecycle is Lifecycle.EXITING or (
        process.lifecycle is Lifecycle.DESTROYED and process.has_left(group)
    )
    return (ended_in_time and not has_failed_exit(process)) or (stopped_later and left)


def was_terminated(process: Process) -> bool:
    """By whoever runs the job, with a signal that asks for it. What it raised before that is a
    failure of its own.
    """
    asked = process.exit is not None and process.exit.signal in TERMINATION_SIGNALS
    return asked and (process.exception is None or process.exception.type == "KeyboardInterrupt")


def _has_ended(context: DiagnosisContext, rank: int) -> bool:
    process = context.attempt.processes.get(rank)
    return process is None or not process.is_alive


def _has_settled(context: DiagnosisContext, first: Process) -> bool:
    """Others' last words have had time to come; and the end of whoever a complaint may be about,
    time to be seen.
    """
    since = (
        first.exited_at
        if first.exited_at is not None
        else get_failure_time(first) + (_PEER_ERROR_DELAY_S if has_peer_error(first) else 0.0)
    )
    return context.now - since >= context.limits.settle_s


def has_failed_exit(process: Process) -> bool:
    end = process.exit
    if (
        end is None
        # Python takes its time to end, and may not come to it; but after an exception that nobody
        # caught it is over
    ):
        raised = process.exception is not None and process.exception.type != "KeyboardInterrupt"
        return raised and process.lifecycle is Lifecycle.EXITING
    if end.exit_status is None and end.signal is None:
        return process.lifecycle < Lifecycle.EXITING or process.exception is not None
    return end.has_failed


def get_failure_time(process: Process) -> float:
    """When it failed: an exception, or the begin of its exit, comes before the end, which may take
    its time.

    Of one that nobody saw end, the recorder's last sign of life tells to a tenth of a second, if
    the machine was not too busy.
    """
    leaving = (
        process.pulse_at
        if process.lifecycle is Lifecycle.EXITING or _is_exit_unseen(process)
        else None
    )
    times = [t for t in (process.exited_at, process.exception_at, leaving) if t is not None]
    return min(times, default=float("inf"))


def _is_exit_unseen(process: Process) -> bool:
    """It was gone before its node agent came to see it."""
    return (
        process.exit is not None
        and process.exit.signal is None
        and process.exit.exit_status is None
    )


def _find_independent_failures(others: list[Process]) -> tuple[Process, ...] | None:
    """Those with an exception that no lost connection raises; None where one may or may not be a
    complaint of it.
    """
    raised = [
        (p, p.exception.type)
        for p in others
        if p.exception is not None
        and not has_peer_error(p)
        and p.exception.type != "KeyboardInterrupt"
    ]
    found = tuple(p for p, kind in raised if not PEER_ERROR_TYPES.search(kind))
    return found if found or not raised else None


def _sort_by_cause(failed: list[Process]) -> list[Process]:
    """By time, as far as that is known. Whoever complains of a lost connection may have noticed the
    end of another before that was seen; whoever merely vanished may have lived a little longer than
    its last sign of life, until an exception elsewhere; and whoever was told to stop after a
    complaint was stopped for its sake.
    """
    complaints = sorted(get_failure_time(p) for p in failed if has_peer_error(p))
    exceptions = sorted(
        p.exception_at for p in failed if p.exception_at is not None and not has_peer_error(p)
    )

    def failure_sort_key(process: Process) -> tuple[float, bool]:
        at = get_failure_time(process)
        if has_peer_error(process):
            # Whoever times out closes its connections, and its peers may be quicker to say so.
            return (
                at + _PEER_ERROR_DELAY_S - (_DETECTION_DELAY_S if has_timed_out(process) else 0.0),
                False,
            )
        if was_terminated(process) and complaints and complaints[0] <= at:
            return max(at, complaints[0] + _PEER_ERROR_DELAY_S), True
        if (
            _is_exit_unseen(process)
            and process.exception is None
            and (near := bisect_right(exceptions, at + _DETECTION_DELAY_S))
        ):
            return max(at, exceptions[near - 1]), True
        return at, False

    return sorted(failed, key=failure_sort_key)
