"""One verdict for each root cause; everybody whom it only holds up is a victim and never blamed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangwatch.diagnosis.graph.awaited import made_for
from hangwatch.diagnosis.graph.cycles import core, held, knots
from hangwatch.diagnosis.graph.graph import Stop
from hangwatch.diagnosis.graph.waits import main_since, wait_graph, works_beside
from hangwatch.diagnosis.rules.concurrent import concurrent_use
from hangwatch.diagnosis.rules.ended import ended, stopped, time_of_death, untimely
from hangwatch.diagnosis.rules.mismatch import Parting, partings
from hangwatch.diagnosis.rules.missing import cannot_come, ends
from hangwatch.diagnosis.rules.numerics import nonfinite
from hangwatch.diagnosis.rules.pairwise import Misfit, misfits, other_end, sends_of
from hangwatch.diagnosis.rules.progress import no_progress
from hangwatch.diagnosis.rules.replicas import replica_divergence
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from . import messages
from .advice import advised
from .context import (
    STACKS_OF_CULPRITS,
    Case,
    Request,
    ask_stacks,
    call_of,
    heard,
    known_until,
    op_of,
    waits,
)
from .divergences import diverging

# A failure after a mismatched call that got through is put down to it within
_CALLS_AFTER = 2
_SOON = 5.0  # seconds from the last of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Verdicts (one per root cause; those with ``due`` False are only suspicions) and what to ask
    for.
    """

    verdicts: tuple[Verdict, ...] = ()
    requests: tuple[Request, ...] = ()


def diagnose(attempt: Attempt, now: float, limits: Limits) -> Diagnosis:
    """What is wrong with one attempt of a job at time ``now``.

    Definite causes come first, and whatever a definite cause explains is not judged again: a
    mismatch before the deaths that it leads to, a death before the waits for the dead.
    """
    places = attempt.streams_by_group
    case = Case(attempt, now, limits, places, wait_graph(attempt, now, limits.lost_after_s))
    for parting in partings(places, attempt.diverged_groups):
        _mismatch(case, parting)
    for misfit in misfits(attempt):
        _misfit(case, misfit)
    ended(case)
    _deadlocks(case)
    ends(case)
    no_progress(case)
    concurrent_use(case)
    replica_divergence(case)
    nonfinite(case)
    verdicts = tuple(advised(case, diverging(case, verdict)) for verdict in case.verdicts)
    return Diagnosis(verdicts=verdicts, requests=tuple(dict.fromkeys(case.requests)))


def _mismatch(case: Case, parting: Parting) -> None:
    case.requests += [
        Request(rank=rank, uid=uid, from_seq=seq) for rank, uid, seq in parting.missing
    ]
    setup = parting.kind is StreamKind.SETUP
    members = case.places[parting.group.key]
    fallen = {
        r
        for r, s in members.items()
        if (p := case.attempt.processes.get(r)) and _fell(p, s, parting.seq)
    }
    # Where all got past the parting it holds up nobody, and what comes later has a cause of its
    # own. Else everybody at or behind it is held up by it, as are those who wait for them.
    passed = (
        not fallen
        and all(s.first_unfinished > parting.seq for s in members.values())
        and not _differ_again(members)
    )
    # Where one left out a group, its next call is another's one after that: who waits in those, by
    # count, waits because of it.
    passed &= not (
        setup
        and any(
            stop.sequence is s for r, s in members.items() for stop in case.graph.stops.get(r, ())
        )
    )
    passed &= not (setup and _made_apart(case, parting, members))
    blocked = set() if passed else case.graph.waiting()
    held = {
        r
        for r in parting.group.ranks
        if r in blocked and (r not in members or members[r].entered >= parting.seq)
    }
    waiting = (
        set()
        if passed
        else (held | case.graph.reaching(held | set(parting.odd))) - set(parting.odd)
    )
    since = min(
        (members[r].entered_at for ranks in parting.classes for r in ranks), default=case.now
    )
    ready = len(parting.calls) == len(parting.classes) and not parting.missing
    known_by = max((heard(case, r) for ranks in parting.classes for r in ranks), default=case.now)
    ready &= not _votes_to_come(case, parting, members)
    summary = messages.mismatch(
        parting.odd, parting.calls, parting.fields, parting.group, parting.seq
    )
    advice = (
        "Process groups must be created in the same order, with the same members, on every rank."
        if setup
        else (
            "Every rank of a group must make the same calls in the same order: compare the two"
            " lines."
        )
    )
    case.verdicts.append(
        Verdict(
            kind=VerdictKind.GROUP_MISMATCH if setup else VerdictKind.MISMATCH,
            severity=Severity.ALERT,
            culprits=parting.odd,
            waiting=tuple(sorted(waiting)),
            group=parting.group,
            seq=parting.seq,
            differing_fields=parting.fields,
            calls=parting.calls,
            waits=waits(case, waiting),
            began_at=since,
            is_confirmed=ready or case.now - known_by > 3.0,
            summary=summary,
            advice=advice,
            site=next(
                (c.call.site for c in parting.calls if set(c.ranks) <= set(parting.odd)), None
            ),
        )
    )
    if not passed:
        case.explained |= set(parting.odd) | waiting | held | fallen
    if waiting:
        ask_stacks(case, parting.odd, waiting, since)


def _made_apart(case: Case, parting: Parting, members: dict[int, CallStream]) -> bool:
    """Somebody waits in the first call of a group that was made since: others, who made theirs at
    another place, never come to this one.
    """
    made = {
        made_for(members[r], seq)
        for ranks in parting.classes
        for r in ranks[:1]
        for seq in members[r].calls
        if seq >= parting.seq
    }
    first = (crowd[0] for crowd in case.graph.crowds())
    return any(stop.sequence.group.ranks in made and 1 in stop.awaited.values() for stop in first)


def _fell(process: Process, place: CallStream, seq: int) -> bool:
    """It ended in call ``seq``, or failed right after it: what was wrong may show only where the
    result is used.
    """
    if (process.is_alive and not untimely(process)) or _went_on(process, place):
        return False
    if place.entered == seq or place.first_unfinished <= seq < place.entered:
        return True
    failed_soon = (
        untimely(process)
        and not stopped(process)
        and time_of_death(process) - max(place.entered_at, place.last_completion_at) <= _SOON
    )
    return failed_soon and seq < place.entered <= seq + _CALLS_AFTER


def _went_on(process: Process, after: CallStream) -> bool:
    """It made other calls since its newest one in a sequence: what ended it came later."""
    return any(s.entered_at > after.entered_at + MIN_WAIT_S for s in process.streams.values())


def _differ_again(members: dict[int, CallStream]) -> bool:
    """Some are blocked in a call in whose place others made another one: they are still apart."""
    for seq in {s.first_unfinished for s in members.values() if s.is_pending}:
        made = {
            call.signature.agree for s in members.values() if (call := s.calls.get(seq)) is not None
        }
        if len(made) > 1:
            return True
    return False


def _votes_to_come(case: Case, parting: Parting, members: dict[int, CallStream]) -> bool:
    """Who is the odd one depends on members that may just be about to make the call."""
    told = [r for ranks in parting.classes for r in ranks]
    if len(told) == len(parting.group.ranks) or 2 * max(map(len, parting.classes)) > len(
        parting.group.ranks
    ):
        return False
    return case.now - max(members[r].entered_at for r in told) < case.limits.settle_s


def _misfit(case: Case, misfit: Misfit) -> None:
    if case.explained.issuperset(misfit.odd):
        return
    waiting = (case.graph.reaching(misfit.odd) | set(misfit.ranks)) & case.graph.waiting() - set(
        misfit.odd
    )
    gone = {
        r
        for r in misfit.ranks
        if (p := case.attempt.processes.get(r)) is not None and not p.is_alive
    }
    summary = messages.mismatch(misfit.odd, misfit.calls, misfit.fields, misfit.group, misfit.seq)
    if misfit.pair is not None:
        summary = messages.unfit(
            misfit.odd, misfit.pair, misfit.calls[0].call.signature.op, misfit.group, misfit.seq
        )
    case.verdicts.append(
        Verdict(
            kind=VerdictKind.MISMATCH,
            severity=Severity.ALERT,
            culprits=misfit.odd,
            waiting=tuple(sorted(waiting)),
            group=misfit.group,
            seq=misfit.seq,
            differing_fields=misfit.fields,
            calls=misfit.calls,
            waits=waits(case, waiting),
            began_at=misfit.since,
            summary=summary,
            advice="What one rank sends is not what the other expects: compare the two lines.",
            site=next((c.call.site for c in misfit.calls if set(c.ranks) <= set(misfit.odd)), None),
        )
    )
    case.explained |= {*misfit.odd, *waiting, *gone}
    if waiting:
        ask_stacks(case, misfit.odd, waiting, misfit.since)


def _deadlocks(case: Case) -> None:
    never = held(case.graph)
    for knot, behind in knots(case.graph, never):
        if knot & case.explained or _waits_for_the_gone(case, knot):
            continue
        found = core(case.graph, knot)
        culprits, stops = (
            tuple(sorted(found.ranks)),
            [stop for r in sorted(found.ranks) for stop in case.graph.stops[r]],
        )
        since = max(stop.since for stop in stops)
        doubtful = found.ranks & case.graph.doubtful | {
            r for r in culprits if works_beside(case.attempt.processes[r], since)
        }
        if doubtful:
            case.requests += [Request(rank=r, stacks=True) for r in sorted(doubtful)[:16]]
        waiting = (knot | behind) - found.ranks
        known = min(known_until(case, r) for r in culprits) if doubtful else case.now
        verdict = Verdict(
            kind=VerdictKind.DEADLOCK,
            severity=Severity.ALERT,
            culprits=culprits,
            waiting=tuple(sorted(waiting)),
            group=found.cycle[0].sequence.group,
            seq=found.cycle[0].wait.seq,
            calls=tuple(
                c for r in culprits[:16] for c in call_of(case.graph.stops[r][0].sequence, r)
            ),
            waits=waits(case, found.ranks | waiting, found.cycle),
            began_at=since,
            is_confirmed=known - since
            >= (
                case.limits.stall_after_s
                if doubtful
                else (3 if _looked_at(case, found.ranks, since) else 4) * MIN_WAIT_S
            ),
            summary=messages.deadlock(
                culprits, [(edge.wait, op_of(edge.sequence)) for edge in found.cycle]
            ),
            advice=messages.deadlock_advice(tuple(sorted(found.through)), culprits),
        )
        case.verdicts.append(_with_tags(case, verdict, stops))
        case.explained |= found.ranks | waiting
        case.deadlocked |= found.ranks | waiting
        ask_stacks(case, culprits, waiting, since)


def _waits_for_the_gone(case: Case, knot: set[int]) -> bool:
    """They also wait for such as have left, are frozen or lost: these are the cause, and the cycle
    may come of it.
    """
    crowds = {id(stop.awaited): stop.awaited for rank in knot for stop in case.graph.stops[rank]}
    others = {on for awaited in crowds.values() for on in awaited} - case.graph.stops.keys()
    return any(on in case.graph.silent or cannot_come(case, on) is not None for on in others)


def _looked_at(case: Case, ranks: set[int], since: float) -> bool:
    """A look at each stack, as far as these are asked for, has shown no thread that goes on beside
    the one that waits.
    """
    processes = [case.attempt.processes[rank] for rank in sorted(ranks)[:STACKS_OF_CULPRITS]]
    return all(main_since(process, since) is not None for process in processes if process.is_alive)


def _with_tags(case: Case, verdict: Verdict, stops: list[Stop]) -> Verdict:
    """A receive that waits for one tag while its peer's message with another lies unreceived: one
    of the tags is wrong.

    Unless one of them was in use between the two before: then the tags are right, and the two use
    them in another order.
    """
    blocking = {id(stop.sequence) for stop in stops}
    receives = (
        stop.edge(on)
        for stop in stops
        if stop.sequence.kind is StreamKind.RECV
        for on in stop.awaited
    )
    for edge in receives:
        receiving, (receiver, sender) = edge.sequence, (edge.wait.rank, edge.wait.on_rank)
        sends = [
            s
            for s in sends_of(case.attempt, sender)
            if s.peer == receiver and s.group.key == receiving.group.key
        ]
        for sent in sorted(sends, key=lambda s: (id(s) not in blocking, s.entered_at)):
            received = other_end(case.attempt, sender, sent)
            if sent.tag == receiving.tag or sent.entered <= (
                received.entered if received is not None else 0
            ):
                continue
            told = messages.tags(
                receiver, receiving.tag, sender, sent.tag, receiving.group, id(sent) in blocking
            )
            if (received is not None and received.entered) or any(
                s.tag == receiving.tag and s.entered for s in sends
            ):
                return replace(
                    verdict,
                    differing_fields=("tag",),
                    summary=f"{verdict.summary}; {told}",
                    advice=messages.TAGS_MIXED_UP,
                )
            odd = tuple(sorted((receiver, sender)))
            return replace(
                verdict,
                kind=VerdictKind.MISMATCH,
                culprits=odd,
                waiting=tuple(sorted({*verdict.culprits, *verdict.waiting} - set(odd))),
                group=receiving.group,
                seq=edge.wait.seq,
                differing_fields=("tag",),
                calls=(*call_of(sent, sender), *call_of(receiving, receiver)),
                summary=told,
                advice=messages.WRONG_TAG,
            )
    return verdict
