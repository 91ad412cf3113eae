"""Ranks that ended: the first that failed is the cause, unless it failed for want of one that had
simply left.
"""

from __future__ import annotations

import signal
from bisect import bisect_right

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import POLITE, Case, call_of, last_site, node_mates, op_of, waits
from hangwatch.diagnosis.graph.awaited import Others
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .complaints import FOR_WANT_OF_PEERS, complains, timed_out
from .timeouts import not_come

_AFTERWARDS = (
    1.0  # seconds: a peer may notice a closed connection this long before its owner's end is seen
)
_ASKED = 1000  # ranks that are looked at in search of those who left
_PEERS_FIRST = 2.0  # seconds that a failure for want of a peer stands behind one of another kind


def ended(case: Case) -> None:
    """Launchers kill the rest within a second of a first failure, and peers fail on the lost
    connection: neither is a cause.
    """
    failed = _in_order(
        [
            p
            for p in map(case.attempt.processes.__getitem__, sorted(case.attempt.unable_ranks))
            if untimely(p)
        ]
    )
    if not failed:
        return
    first = failed[0]
    if first.rank in case.explained:
        return  # died in a call that was wrong before it
    reaching = case.graph.reaching([first.rank])
    if stopped(first) and not reaching:
        return
    last = first.newest_stream
    left = _left_before(case, first, last) if last is not None else []
    unheard = _unheard_since(case, first, last) if last is not None else []
    if left and last is not None:
        _exited(case, left, first, last, failed)
    elif last is not None and any(
        _silent_for(case, r) >= case.limits.stall_after_s for r in unheard
    ):
        _lost(case, node_mates(case, unheard), last, failed)
    else:
        due = _settled(case, first) and not unheard
        if not not_come(case, first, {p.rank for p in failed}, time_of_death(first), due=due):
            _dead(case, first, last, reaching, failed, due=due)


def _dead(
    case: Case,
    first: Process,
    last: CallStream | None,
    reaching: set[int],
    failed: list[Process],
    *,
    due: bool,
) -> None:
    waiting = reaching | {r for r in case.graph.waiting() if r != first.rank}
    inside = (
        last
        if last is not None and last.is_pending and last.kind is StreamKind.COLLECTIVE
        else None
    )
    case.verdicts.append(
        Verdict(
            kind=VerdictKind.DEAD_RANK,
            severity=Severity.ALERT,
            culprits=(first.rank,),
            waiting=tuple(sorted(waiting)),
            group=inside.group if inside else None,
            seq=inside.entered if inside else None,
            calls=call_of(inside, first.rank),
            waits=waits(case, waiting),
            began_at=time_of_death(first),
            is_confirmed=due,
            summary=messages.died(first),
            advice=messages.dead_advice(first, _by_themselves(failed[1:])),
            site=first.exception.site if first.exception is not None else last_site(first),
        )
    )
    case.explained |= {first.rank, *waiting, *(p.rank for p in failed)}


def _exited(
    case: Case, left: list[int], first: Process, last: CallStream, failed: list[Process]
) -> None:
    """Peers of a rank that left fail on its closed connections; what they needed is what it did not
    do.
    """
    waiting = ({p.rank for p in failed} | case.graph.waiting()) - set(left)
    case.verdicts.append(
        Verdict(
            kind=VerdictKind.EXITED_RANK,
            severity=Severity.ALERT,
            culprits=tuple(sorted(left)),
            waiting=tuple(sorted(waiting)),
            group=last.group,
            seq=last.entered,
            calls=call_of(last, first.rank),
            waits=waits(case, waiting),
            began_at=last.entered_at,
            is_confirmed=case.now - time_of_death(first) >= case.limits.settle_s,
            summary=messages.exited(
                tuple(sorted(left)),
                _gone(case, left[0]),
                len(waiting),
                op_of(last),
                last.group,
                last.entered,
            ),
            advice=messages.exited_advice(len(left) > 1),
            site=last_site(process)
            if (process := case.attempt.processes.get(left[0])) is not None
            else None,
        )
    )
    case.explained |= {*left, *waiting}


def _lost(case: Case, lost: list[int], last: CallStream, failed: list[Process]) -> None:
    """A whole node went, its node agent with it: all that is seen of it is that peers fail on its
    closed connections.
    """
    waiting = ({p.rank for p in failed} | case.graph.waiting()) - set(lost)
    host = case.attempt.processes[lost[0]].host
    summary, advice = messages.lost(host, tuple(sorted(lost)), len(waiting), op_of(last))
    case.verdicts.append(
        Verdict(
            kind=VerdictKind.LOST_NODE,
            severity=Severity.ALERT,
            culprits=tuple(sorted(lost)),
            waiting=tuple(sorted(waiting)),
            group=last.group,
            seq=last.entered,
            waits=waits(case, waiting),
            began_at=min(case.graph.silent[r].lived_at for r in lost),
            summary=summary,
            advice=advice,
        )
    )
    case.explained |= {*lost, *waiting}


def _unheard_since(case: Case, first: Process, last: CallStream) -> list[int]:
    """Ranks of other nodes in the call that the first failure was in, of whom nobody knows whether
    they still ran by then.
    """
    by_itself = first.exit is not None and first.exit.signal not in (None, signal.SIGABRT, *POLITE)
    if by_itself or (
        first.exception is not None and not FOR_WANT_OF_PEERS.search(first.exception.type)
    ):
        return []
    found = []
    for rank in last.group.ranks:
        process = case.attempt.processes.get(rank)
        if process is None or not process.is_alive or process.agent == first.agent:
            continue
        silence = case.graph.silent.get(rank)
        lived_at = process.agent_seen_at if silence is None else silence.lived_at
        if lived_at <= time_of_death(first) + _AFTERWARDS and not (
            silence is not None and silence.proven
        ):
            found.append(rank)
    return found


def _silent_for(case: Case, rank: int) -> float:
    silence = case.graph.silent.get(rank)
    return case.now - silence.lived_at if silence is not None else 0.0


def _left_before(case: Case, first: Process, last: CallStream) -> list[int]:
    """Those who had finished without a failure of their own, and whom the first failure waited for,
    or whom those waited for.
    """
    if first.exception is not None and not FOR_WANT_OF_PEERS.search(first.exception.type):
        return []
    found: list[int] = []
    seen, waiting = {first.rank}, [first]
    others = Others(case.attempt, case.now, case.graph.silent)
    for process in waiting:  # it grows meanwhile
        if len(seen) > _ASKED:
            break
        for sequence in process.streams.values():
            if not (sequence.is_pending or sequence is last):
                continue
            certain = sequence is last
            for rank in others.awaited(process.rank, sequence, certain).keys() - seen:
                seen.add(rank)
                if (other := case.attempt.processes.get(rank)) is None:
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
        process.exit is not None and time_of_death(process) <= time_of_death(first) + _AFTERWARDS
    )
    stopped_later = process.exit is None or process.exit.signal in POLITE
    left = process.lifecycle is Lifecycle.EXITING or (
        process.lifecycle is Lifecycle.DESTROYED and process.has_left(group)
    )
    return (ended_in_time and not untimely(process)) or (stopped_later and left)


def stopped(process: Process) -> bool:
    """By whoever runs the job, with a signal that asks for it. What it raised before that is a
    failure of its own.
    """
    asked = process.exit is not None and process.exit.signal in POLITE
    return asked and (process.exception is None or process.exception.type == "KeyboardInterrupt")


def _gone(case: Case, rank: int) -> bool:
    process = case.attempt.processes.get(rank)
    return process is None or not process.is_alive


def _settled(case: Case, first: Process) -> bool:
    """Others' last words have had time to come; and the end of whoever a complaint may be about,
    time to be seen.
    """
    since = (
        first.exited_at
        if first.exited_at is not None
        else time_of_death(first) + (_PEERS_FIRST if complains(first) else 0.0)
    )
    return case.now - since >= case.limits.settle_s


def untimely(process: Process) -> bool:
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


def time_of_death(process: Process) -> float:
    """When it failed: an exception, or the begin of its exit, comes before the end, which may take
    its time.

    Of one that nobody saw end, the recorder's last sign of life tells to a tenth of a second, if
    the machine was not too busy.
    """
    leaving = (
        process.pulse_at if process.lifecycle is Lifecycle.EXITING or _unseen(process) else None
    )
    times = [t for t in (process.exited_at, process.exception_at, leaving) if t is not None]
    return min(times, default=float("inf"))


def _unseen(process: Process) -> bool:
    """It was gone before its node agent came to see it."""
    return (
        process.exit is not None
        and process.exit.signal is None
        and process.exit.exit_status is None
    )


def _by_themselves(others: list[Process]) -> tuple[Process, ...] | None:
    """Those with an exception that no lost connection raises; None where one may or may not be a
    complaint of it.
    """
    raised = [
        (p, p.exception.type)
        for p in others
        if p.exception is not None and not complains(p) and p.exception.type != "KeyboardInterrupt"
    ]
    found = tuple(p for p, kind in raised if not FOR_WANT_OF_PEERS.search(kind))
    return found if found or not raised else None


def _in_order(failed: list[Process]) -> list[Process]:
    """By time, as far as that is known. Whoever complains of a lost connection may have noticed the
    end of another before that was seen; whoever merely vanished may have lived a little longer than
    its last sign of life, until an exception elsewhere; and whoever was told to stop after a
    complaint was stopped for its sake.
    """
    complaints = sorted(time_of_death(p) for p in failed if complains(p))
    exceptions = sorted(
        p.exception_at for p in failed if p.exception_at is not None and not complains(p)
    )

    def order(process: Process) -> tuple[float, bool]:
        at = time_of_death(process)
        if complains(process):
            # Whoever times out closes its connections, and its peers may be quicker to say so.
            return at + _PEERS_FIRST - (_AFTERWARDS if timed_out(process) else 0.0), False
        if stopped(process) and complaints and complaints[0] <= at:
            return max(at, complaints[0] + _PEERS_FIRST), True
        if (
            _unseen(process)
            and process.exception is None
            and (near := bisect_right(exceptions, at + _AFTERWARDS))
        ):
            return max(at, exceptions[near - 1]), True
        return at, False

    return sorted(failed, key=order)
