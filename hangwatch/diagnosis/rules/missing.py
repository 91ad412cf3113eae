"""The ends of the wait chains: ranks that others wait for and that wait for nobody. What each of
them is doing is its kind.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    STACKS_OF_CULPRITS,
    Case,
    Request,
    ask_stacks,
    kept_by,
    known_until,
    node_mates,
    op_of,
    suspicion,
    waiting_calls,
    waits,
)
from hangwatch.diagnosis.graph.graph import Edge, Stop
from hangwatch.diagnosis.graph.progress import at_work, moves, undecided, waits_for_rank
from hangwatch.diagnosis.graph.waits import not_up
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.process import FreezeReason, Process

PRECEDENCE = (
    VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK, VerdictKind.LOST_NODE, VerdictKind.STARTUP_STALL, VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK,
)  # fmt: skip
_SECOND_LOOK = (
    2.0  # seconds for which it is waited for, where a busy host was slow to give the first
)


@dataclass(slots=True, eq=False)
class _Waits:
    """The longest waits for one rank, or for many whom the same ranks wait for: these share one
    object.
    """

    stops: list[Stop]
    since: float
    last: float  # when the last of all who wait came
    declared: bool  # none of them is torch's
    setup: list[Stop]  # those in the creation of a group
    told: list[tuple[float, float]]  # of each: until when it is known, and since when it is
    longest: float  # for which any of them is known

    @classmethod
    def of(cls, case: Case, stops: list[Stop], last: float) -> _Waits:
        told = [(known_until(case, stop.rank), stop.since) for stop in stops]
        return cls(
            stops=stops,
            since=min(stop.since for stop in stops),
            last=last,
            declared=all(stop.sequence.group.is_declared for stop in stops),
            setup=[stop for stop in stops if stop.sequence.kind is StreamKind.SETUP],
            told=told,
            longest=max(known - since for known, since in told),
        )


def ends(case: Case) -> None:
    """The ends of the wait chains: those who are waited for and wait for nobody."""
    found = case.graph.ends() - set(case.graph.stuck)
    longest = max(
        (case.now - stop.since for stops in case.graph.stops.values() for stop in stops),
        default=0.0,
    )
    suspected_from = suspicion(case.limits)
    if len(found) > MAX_URGENT_SUSPECTS and longest < suspected_from:
        found = _who_cannot_come(case, found)
    into = _into(case, found)
    for component in case.graph.together(found):
        open_ends = sorted(
            [rank for rank in component if rank in into and rank not in case.explained]
        )
        victims = case.graph.reaching(component) - component - case.deadlocked
        if not open_ends or victims & case.explained:
            continue
        if len(open_ends) > MAX_URGENT_SUSPECTS and not any(
            _for_long(case, r, into[r], suspected_from) for r in open_ends
        ):
            case.explained |= victims.union(open_ends)
            if not (open_ends := sorted(_who_cannot_come(case, open_ends))):
                continue
        kinds = _kinds_of_ends(case, open_ends, into)
        waiters = _waiters(case, kinds, into)
        held = (
            waiters
            if waiters
            and any(_works(case, rank, into[rank].since) for rank in _absent(kinds) - waiters)
            else set()
        )
        by_kind: dict[VerdictKind, list[int]] = {}
        for rank, kind in kinds.items():
            if rank not in held:
                by_kind.setdefault(kind, []).append(rank)
        if len(by_kind) > 1 and all(
            case.graph.silent[r].proven for r in by_kind.get(VerdictKind.LOST_NODE, ())
        ):
            by_kind.pop(
                VerdictKind.LOST_NODE, None
            )  # they ran on unheard: those who are heard are the cause
        _end(case, by_kind, into, victims, waiters)
        if held:
            ask_stacks(case, sorted(held), (), min(into[r].since for r in held))
            _look_again(case, sorted(held)[:STACKS_OF_CULPRITS])


def _who_cannot_come(case: Case, ranks: Collection[int]) -> set[int]:
    """Of so many, for whom nobody waits for long, these alone count: most are only not heard yet."""
    return {
        rank
        for rank in case.attempt.unable_ranks.intersection(ranks)
        if cannot_come(case, rank) is not None
    }


def _into(case: Case, ends: set[int]) -> dict[int, _Waits]:
    """The waits for each of them. Of a crowd those alone that wait longest by any count: who began
    first, or was heard of last.
    """
    longest: list[tuple[list[Stop], float]] = []  # and when the last of the crowd came
    crowds: dict[int, list[int]] = {}  # that wait for each, by their places in `longest`
    for crowd in case.graph.crowds():
        if not (awaited := ends.intersection(crowd[0].awaited)):
            continue
        latest: dict[
            float, tuple[float, Stop]
        ] = {}  # by when they began: to sort 100,000 pairs holds up all threads
        for stop in crowd:
            if stop.rank in case.deadlocked:
                continue
            known = known_until(case, stop.rank)
            if stop.since not in latest or known > latest[stop.since][0]:
                latest[stop.since] = known, stop
        kept: list[Stop] = []
        heard_at = float("-inf")
        for since in sorted(latest):
            known, stop = latest[since]
            if known > heard_at:
                kept.append(stop)
                heard_at = known
        if not kept:
            continue
        for on in awaited:
            crowds.setdefault(on, []).append(len(longest))
        longest.append((kept, max(latest)))
    alike: dict[tuple[int, ...], _Waits] = {}
    for by in map(tuple, crowds.values()):
        if by not in alike:
            alike[by] = _Waits.of(
                case, [stop for n in by for stop in longest[n][0]], max(longest[n][1] for n in by)
            )
    return {rank: alike[tuple(by)] for rank, by in crowds.items()}


def _kinds_of_ends(case: Case, ranks: list[int], into: dict[int, _Waits]) -> dict[int, VerdictKind]:
    """What each is doing. Of those of whom any one would do, only such as are nearest to coming
    hold up anybody.
    """
    kinds = {rank: _kind_of_end(case, rank, into[rank]) for rank in ranks}
    eligible = [rank for rank in ranks if all(stop.any for stop in into[rank].stops)]
    nearest = max((PRECEDENCE.index(kinds[rank]) for rank in eligible), default=0)
    return {
        rank: kind
        for rank, kind in kinds.items()
        if rank not in eligible or PRECEDENCE.index(kind) == nearest
    }


def _kind_of_end(case: Case, rank: int, waits: _Waits) -> VerdictKind:
    process, since = case.attempt.processes.get(rank), waits.since
    if (kind := cannot_come(case, rank)) is not None:
        return kind
    if rank in case.graph.silent:
        return VerdictKind.LOST_NODE
    # It takes no init_process_group for declared ones, and who is up in another world may still do
    # there what it should.
    if process is None or (not_up(process) and not waits.declared):
        return VerdictKind.STARTUP_STALL
    if any(stop.awaited[rank] == 1 for stop in waits.setup) and all(
        s.kind is not StreamKind.SETUP for s in process.streams.values()
    ):
        return VerdictKind.STARTUP_STALL
    slow = case.now - since < case.limits.slow_limit_s and _works(case, rank, since)
    return VerdictKind.SLOW_RANK if slow or _in_phase(case, process) else VerdictKind.MISSING_RANK


def _works(case: Case, rank: int, since: float) -> bool:
    process = case.attempt.processes[rank]
    # Whoever still gets on elsewhere is not stuck before it has been in its own code for as long.
    getting_on = (
        rank in case.graph.released
        or known_until(case, rank) - process.last_advanced_at < case.limits.stall_after_s
    )
    return (
        getting_on
        or moves(process, since)
        or bool(at_work(process, since))
        or _in_phase(case, process)
    )


def _absent(kinds: dict[int, VerdictKind]) -> set[int]:
    return {
        rank
        for rank, kind in kinds.items()
        if kind in (VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK)
    }


def _waiters(case: Case, kinds: dict[int, VerdictKind], into: dict[int, _Waits]) -> set[int]:
    """The absent who, when looked at, wait for what another rank may do: while one of the absent
    works, these may be its victims.

    Only some of many are looked at. Where there are such among these, whoever was not seen, and
    does nothing, may be one as well.
    """
    absent = _absent(kinds)
    seen = {
        r: waits_for_rank(p, into[r].since)
        for r in absent
        if (p := case.attempt.processes[r]).samples and not _in_phase(case, p)
    }
    if True not in seen.values():
        return set()
    return {
        r
        for r in absent
        if (waits := seen.get(r)) or (waits is None and not _works(case, r, into[r].since))
    }


def _in_phase(case: Case, process: Process) -> bool:
    """In one that it declared, and for no longer than that may last."""
    return process.phase is not None and case.now - process.phase_began_at < (
        process.phase_limit_s or case.limits.slow_limit_s
    )


def cannot_come(case: Case, rank: int) -> VerdictKind | None:
    """Why it cannot: it has left, or is frozen."""
    if rank not in case.attempt.unable_ranks:
        return None
    process = case.attempt.processes[rank]
    if any(process.has_left(stop.sequence.group) for stop in case.graph.into(rank)):
        return VerdictKind.EXITED_RANK
    return VerdictKind.FROZEN_RANK if process.freeze_reason(case.now) is not None else None


def _end(
    case: Case,
    by_kind: dict[VerdictKind, list[int]],
    into: dict[int, _Waits],
    victims: set[int],
    waiters: set[int],
) -> None:
    kind = min(by_kind, key=PRECEDENCE.index)
    ranks = by_kind[kind]
    # Whoever came last may have held up those who waited for more than him.
    ages = {r: _age(case, r, into[r], into[r].last if r in waiters else 0.0) for r in ranks}
    age = max(ages.values())
    if kind not in (VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK):
        # Those who came late only a moment ago are not yet part of it.
        ranks = [r for r in ranks if ages[r] >= min(age, case.limits.stall_after_s) * 0.9] or ranks
    since = min(_began(case, r, into[r].since) for r in ranks)
    on = min(ranks, key=lambda rank: into[rank].since)
    edge = min(into[on].stops, key=lambda stop: stop.since).edge(on)
    if kind is VerdictKind.LOST_NODE:
        ranks = node_mates(case, ranks)
        victims = case.graph.reaching(ranks)
    culprits = tuple(sorted(ranks))
    waiting = victims - set(culprits)
    process = case.attempt.processes.get(culprits[0])
    stopped = process is not None and process.freeze_reason(case.now) is FreezeReason.STOPPED
    at_once = kind is VerdictKind.EXITED_RANK or (kind is VerdictKind.FROZEN_RANK and stopped)
    limit = max(case.limits.settle_s, MIN_WAIT_S) if at_once else case.limits.stall_after_s
    if not at_once and waiting and case.graph.doubtful.issuperset(waiting):
        limit *= 2  # that any of them waits is guessed: a look at a stack would tell
    if kind is VerdictKind.MISSING_RANK and any(
        undecided(case.attempt.processes[r], since, VerdictKind.SLOW_RANK in by_kind)
        for r in culprits
    ):
        limit += _SECOND_LOOK
    case.verdicts.append(accused(case, kind, culprits, waiting, edge, since, due=age >= limit))
    case.explained |= set(culprits) | waiting
    alive = [r for r in culprits if (p := case.attempt.processes.get(r)) and p.is_alive]
    if age >= suspicion(case.limits) or at_once:
        ask_stacks(case, alive, waiting, since)
    if kind is VerdictKind.SLOW_RANK:
        _look_again(case, [rank for rank in alive if at_work(case.attempt.processes[rank], since)])


def accused(
    case: Case,
    kind: VerdictKind,
    culprits: tuple[int, ...],
    waiting: set[int],
    edge: Edge,
    since: float,
    *,
    due: bool,
) -> Verdict:
    """The verdict on those whom others wait for; ``edge`` is one of these waits."""
    keeper = kept_by(case, culprits, since)
    verdict = Verdict(
        kind=kind,
        severity=Severity.WARNING if kind is VerdictKind.SLOW_RANK else Severity.ALERT,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=edge.sequence.group,
        seq=edge.wait.seq,
        calls=waiting_calls(case, edge, waiting),
        waits=waits(case, waiting),
        began_at=since,
        is_confirmed=due,
        site=find_user_site(keeper[1]) if keeper is not None else None,
    )
    return _say(case, verdict, edge, keeper)


def _look_again(case: Case, ranks: list[int]) -> None:
    """What ranks wait for worked when it was last seen; only another look tells whether it still
    does.
    """
    for process in map(case.attempt.processes.__getitem__, ranks):
        if process.samples and case.now - process.samples[-1].taken_at >= case.limits.stall_after_s:
            case.requests.append(Request(rank=process.rank, stacks=True))


def _began(case: Case, rank: int, since: float) -> float:
    """Since when others who wait since then may rightly complain of ``rank``."""
    if (silence := case.graph.silent.get(rank)) is not None:
        return max(since, silence.lived_at)
    return since if rank in case.attempt.processes else max(since, case.attempt.opened_at)


def _for_long(case: Case, rank: int, waits: _Waits, seconds: float) -> bool:
    """Others have waited for it for so long. Of nearly all of 100,000 that is soon told."""
    return waits.longest >= seconds and _age(case, rank, waits, 0.0) >= seconds


def _age(case: Case, rank: int, waits: _Waits, freed_at: float) -> float:
    """For how long others are known to have waited for it, but for the time in which it was, or may
    have been, held up itself.
    """
    process = case.attempt.processes.get(rank)
    if rank in case.graph.freed or (process is not None and _just_heard(case, process)):
        return 0.0  # in all that is known of it, it was
    until = case.now if rank in case.graph.silent else known_until(case, rank)
    if until <= waits.since:
        return 0.0
    began = _began(case, rank, freed_at)
    held_from, held_until = process.blocked_interval if process is not None else (0.0, 0.0)
    ages = [0.0]
    for known, since in waits.told:
        first, last = max(began, since), min(until, known)
        ages.append(last - first - max(0.0, min(held_until, last) - max(held_from, first)))
    return max(ages)


def _just_heard(case: Case, process: Process) -> bool:
    """It was told a moment ago that calls are over which it made long since, as after a while in
    which its host was not heard. That is not to say that it got on a moment ago and waits for
    nobody: whether it waits in its newest call can be told once that has passed.
    """
    made_long_since = case.now - process.newest_call_at >= case.limits.stall_after_s / 2
    return made_long_since and any(
        case.now - s.last_completion_at < MIN_WAIT_S for s in process.streams.values()
    )


def _say(
    case: Case, verdict: Verdict, edge: Edge, keeper: tuple[int, ThreadStack] | None
) -> Verdict:
    op = op_of(edge.sequence, edge.wait.seq)
    count = len(verdict.waiting)
    wait = messages.count_wait(count)
    many = len(verdict.culprits) > 1
    process = case.attempt.processes.get(verdict.culprits[0])
    waiter = edge.wait.rank if edge.sequence.peer is not None else None
    inside = verdict.calls[0].ranks if verdict.calls else ()
    summary = messages.not_entered(
        verdict.culprits, op, edge.sequence.group, edge.wait.seq, count, waiter, inside
    )
    advice = messages.stack_advice(many)
    if verdict.kind is VerdictKind.STARTUP_STALL:
        again = " again" if process is not None and process.lifecycle is Lifecycle.DESTROYED else ""
        summary = (
            f"{messages.those(verdict.culprits)} never reached init_process_group{again}, in which"
            f" {wait}"
        )
        if edge.sequence.group.is_declared:
            summary = f"{messages.those(verdict.culprits)} never started, for which {wait} in {op}"
        advice = messages.startup_advice(
            {rank: case.attempt.processes.get(rank) for rank in verdict.culprits}
        )
    elif verdict.kind is VerdictKind.EXITED_RANK:
        gone = process is None or not process.is_alive
        summary = messages.exited(
            verdict.culprits, gone, count, op, edge.sequence.group, edge.wait.seq
        )
        advice = messages.exited_advice(many)
    elif verdict.kind is VerdictKind.FROZEN_RANK and process is not None:
        state, advice = messages.frozen(process.freeze_reason(case.now), process.state, many)
        summary = f"{messages.those(verdict.culprits)} {state}; {wait} in {op}"
    elif verdict.kind is VerdictKind.LOST_NODE and process is not None:
        summary, advice = messages.lost(process.host, verdict.culprits, count, op)
    elif verdict.kind is VerdictKind.SLOW_RANK and process is not None:
        doing = f" in its phase {process.phase!r}" if process.phase else ""
        works, them = ("work", "them") if many else ("works", "it")
        summary = (
            f"{messages.those(verdict.culprits)} still {works}{doing} while {wait} for {them} in"
            f" {op}"
        )
        advice = messages.slow_advice(process, verdict.began_at, _in_phase(case, process))
    if keeper is not None and verdict.kind is not VerdictKind.EXITED_RANK:
        rank, thread = keeper
        summary += (
            f": {messages.keeper(f'rank {rank}' if many else 'it', thread)} is at {verdict.site}"
        )
    return replace(verdict, summary=summary, advice=advice)
