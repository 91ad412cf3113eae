"""One verdict for each root cause; everybody whom it only holds up is a victim and never blamed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangwatch.diagnosis.graph.awaited import get_new_group_ranks
from hangwatch.diagnosis.graph.cycles import (
    find_blocked_ranks,
    find_cycle_components,
    find_deadlock_core,
)
from hangwatch.diagnosis.graph.graph import BlockedCall
from hangwatch.diagnosis.graph.waits import (
    build_wait_graph,
    get_main_thread_since,
    has_working_thread,
)
from hangwatch.diagnosis.rules.concurrent import diagnose_concurrent_use
from hangwatch.diagnosis.rules.ended import (
    diagnose_exits,
    get_failure_time,
    has_failed_exit,
    was_terminated,
)
from hangwatch.diagnosis.rules.mismatch import CallMismatch, find_call_mismatches
from hangwatch.diagnosis.rules.missing import diagnose_chain_ends, get_unable_kind
from hangwatch.diagnosis.rules.numerics import diagnose_nonfinite
from hangwatch.diagnosis.rules.pairwise import (
    PairMismatch,
    find_other_end,
    find_pair_mismatches,
    list_sends,
)
from hangwatch.diagnosis.rules.progress import diagnose_no_progress
from hangwatch.diagnosis.rules.replicas import diagnose_replica_divergence
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from . import messages
from .advice import add_stack_advice
from .context import (
    MAX_CULPRIT_STACKS,
    DiagnosisContext,
    EvidenceRequest,
    get_last_seen_at,
    get_newest_call,
    get_op_name,
    get_state_known_until,
    request_stacks,
    select_waits,
)
from .divergences import add_divergence

# A failure after a mismatched call that got through is put down to it within
_MAX_CALLS_AFTER = 2
_FAILED_SOON_S = 5.0  # seconds from the last of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Verdicts (one per root cause; those with ``due`` False are only suspicions) and what to ask
    for.
    """

    verdicts: tuple[Verdict, ...] = ()
    requests: tuple[EvidenceRequest, ...] = ()


def diagnose(attempt: Attempt, now: float, limits: Limits) -> Diagnosis:
    """What is wrong with one attempt of a job at time ``now``.

    Definite causes come first, and whatever a definite cause explains is not judged again: a
    mismatch before the deaths that it leads to, a death before the waits for the dead.
    """
    places = attempt.streams_by_group
    case = DiagnosisContext(
        attempt, now, limits, places, build_wait_graph(attempt, now, limits.lost_after_s)
    )
    for parting in find_call_mismatches(places, attempt.diverged_groups):
        _diagnose_mismatch(case, parting)
    for misfit in find_pair_mismatches(attempt):
        _diagnose_pair_mismatch(case, misfit)
    diagnose_exits(case)
    _diagnose_deadlocks(case)
    diagnose_chain_ends(case)
    diagnose_no_progress(case)
    diagnose_concurrent_use(case)
    diagnose_replica_divergence(case)
    diagnose_nonfinite(case)
    verdicts = tuple(
        add_stack_advice(case, add_divergence(case, verdict)) for verdict in case.verdicts
    )
    return Diagnosis(verdicts=verdicts, requests=tuple(dict.fromkeys(case.requests)))


def _diagnose_mismatch(context: DiagnosisContext, call_mismatch: CallMismatch) -> None:
    context.requests += [
        EvidenceRequest(rank=rank, stream_uid=uid, from_seq=seq)
        for rank, uid, seq in call_mismatch.calls_to_fetch
    ]
    setup = call_mismatch.kind is StreamKind.SETUP
    members = context.streams_by_group[call_mismatch.group.key]
    fallen = {
        r
        for r, s in members.items()
        if (p := context.attempt.processes.get(r)) and _failed_at_call(p, s, call_mismatch.seq)
    }
    # Where all got past the parting it holds up nobody, and what comes later has a cause of its
    # own. Else everybody at or behind it is held up by it, as are those who wait for them.
    passed = (
        not fallen
        and all(s.first_unfinished > call_mismatch.seq for s in members.values())
        and not _diverge_again(members)
    )
    # Where one left out a group, its next call is another's one after that: who waits in those, by
    # count, waits because of it.
    passed &= not (
        setup
        and any(
            stop.stream is s
            for r, s in members.items()
            for stop in context.graph.blocked_calls.get(r, ())
        )
    )
    passed &= not (setup and _was_group_made_elsewhere(context, call_mismatch, members))
    blocked = set() if passed else context.graph.get_waiting_ranks()
    held = {
        r
        for r in call_mismatch.group.ranks
        if r in blocked and (r not in members or members[r].entered >= call_mismatch.seq)
    }
    waiting = (
        set()
        if passed
        else (held | context.graph.find_waiters_of(held | set(call_mismatch.outliers)))
        - set(call_mismatch.outliers)
    )
    since = min(
        (members[r].entered_at for ranks in call_mismatch.classes for r in ranks),
        default=context.now,
    )
    ready = (
        len(call_mismatch.calls) == len(call_mismatch.classes) and not call_mismatch.calls_to_fetch
    )
    known_by = max(
        (get_last_seen_at(context, r) for ranks in call_mismatch.classes for r in ranks),
        default=context.now,
    )
    ready &= not _is_majority_undecided(context, call_mismatch, members)
    summary = messages.describe_mismatch(
        call_mismatch.outliers,
        call_mismatch.calls,
        call_mismatch.differing_fields,
        call_mismatch.group,
        call_mismatch.seq,
    )
    advice = (
        "Process groups must be created in the same order, with the same members, on every rank."
        if setup
        else (
            "Every rank of a group must make the same calls in the same order: compare the two"
            " lines."
        )
    )
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.GROUP_MISMATCH if setup else VerdictKind.MISMATCH,
            severity=Severity.ALERT,
            culprits=call_mismatch.outliers,
            waiting=tuple(sorted(waiting)),
            group=call_mismatch.group,
            seq=call_mismatch.seq,
            differing_fields=call_mismatch.differing_fields,
            calls=call_mismatch.calls,
            waits=select_waits(context, waiting),
            began_at=since,
            is_confirmed=ready or context.now - known_by > 3.0,
            summary=summary,
            advice=advice,
            site=next(
                (
                    c.call.site
                    for c in call_mismatch.calls
                    if set(c.ranks) <= set(call_mismatch.outliers)
                ),
                None,
            ),
        )
    )
    if not passed:
        context.explained_ranks |= set(call_mismatch.outliers) | waiting | held | fallen
    if waiting:
        request_stacks(context, call_mismatch.outliers, waiting, since)


def _was_group_made_elsewhere(
    context: DiagnosisContext, call_mismatch: CallMismatch, members: dict[int, CallStream]
) -> bool:
    """Somebody waits in the first call of a group that was made since: others, who made theirs at
    another place, never come to this one.
    """
    made = {
        get_new_group_ranks(members[r], seq)
        for ranks in call_mismatch.classes
        for r in ranks[:1]
        for seq in members[r].calls
        if seq >= call_mismatch.seq
    }
    first = (crowd[0] for crowd in context.graph.iter_waiter_groups())
    return any(stop.stream.group.ranks in made and 1 in stop.awaited.values() for stop in first)


def _failed_at_call(process: Process, stream: CallStream, seq: int) -> bool:
    """It ended in call ``seq``, or failed right after it: what was wrong may show only where the
    result is used.
    """
    if (process.is_alive and not has_failed_exit(process)) or _made_later_calls(process, stream):
        return False
    if stream.entered == seq or stream.first_unfinished <= seq < stream.entered:
        return True
    failed_soon = (
        has_failed_exit(process)
        and not was_terminated(process)
        and get_failure_time(process) - max(stream.entered_at, stream.last_completion_at)
        <= _FAILED_SOON_S
    )
    return failed_soon and seq < stream.entered <= seq + _MAX_CALLS_AFTER


def _made_later_calls(process: Process, stream: CallStream) -> bool:
    """It made other calls since its newest one in a sequence: what ended it came later."""
    return any(s.entered_at > stream.entered_at + MIN_WAIT_S for s in process.streams.values())


def _diverge_again(members: dict[int, CallStream]) -> bool:
    """Some are blocked in a call in whose place others made another one: they are still apart."""
    for seq in {s.first_unfinished for s in members.values() if s.is_pending}:
        made = {
            call.signature.agree for s in members.values() if (call := s.calls.get(seq)) is not None
        }
        if len(made) > 1:
            return True
    return False


def _is_majority_undecided(
    context: DiagnosisContext, call_mismatch: CallMismatch, members: dict[int, CallStream]
) -> bool:
    """Who is the odd one depends on members that may just be about to make the call."""
    told = [r for ranks in call_mismatch.classes for r in ranks]
    if len(told) == len(call_mismatch.group.ranks) or 2 * max(
        map(len, call_mismatch.classes)
    ) > len(call_mismatch.group.ranks):
        return False
    return context.now - max(members[r].entered_at for r in told) < context.limits.settle_s


def _diagnose_pair_mismatch(context: DiagnosisContext, pair_mismatch: PairMismatch) -> None:
    if context.explained_ranks.issuperset(pair_mismatch.outliers):
        return
    waiting = (
        context.graph.find_waiters_of(pair_mismatch.outliers) | set(pair_mismatch.ranks)
    ) & context.graph.get_waiting_ranks() - set(pair_mismatch.outliers)
    gone = {
        r
        for r in pair_mismatch.ranks
        if (p := context.attempt.processes.get(r)) is not None and not p.is_alive
    }
    summary = messages.describe_mismatch(
        pair_mismatch.outliers,
        pair_mismatch.calls,
        pair_mismatch.differing_fields,
        pair_mismatch.group,
        pair_mismatch.seq,
    )
    if pair_mismatch.exchange is not None:
        summary = messages.describe_pair_mismatch(
            pair_mismatch.outliers,
            pair_mismatch.exchange,
            pair_mismatch.calls[0].call.signature.op,
            pair_mismatch.group,
            pair_mismatch.seq,
        )
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.MISMATCH,
            severity=Severity.ALERT,
            culprits=pair_mismatch.outliers,
            waiting=tuple(sorted(waiting)),
            group=pair_mismatch.group,
            seq=pair_mismatch.seq,
            differing_fields=pair_mismatch.differing_fields,
            calls=pair_mismatch.calls,
            waits=select_waits(context, waiting),
            began_at=pair_mismatch.began_at,
            summary=summary,
            advice="What one rank sends is not what the other expects: compare the two lines.",
            site=next(
                (
                    c.call.site
                    for c in pair_mismatch.calls
                    if set(c.ranks) <= set(pair_mismatch.outliers)
                ),
                None,
            ),
        )
    )
    context.explained_ranks |= {*pair_mismatch.outliers, *waiting, *gone}
    if waiting:
        request_stacks(context, pair_mismatch.outliers, waiting, pair_mismatch.began_at)


def _diagnose_deadlocks(context: DiagnosisContext) -> None:
    never = find_blocked_ranks(context.graph)
    for knot, behind in find_cycle_components(context.graph, never):
        if knot & context.explained_ranks or _waits_for_departed(context, knot):
            continue
        found = find_deadlock_core(context.graph, knot)
        culprits, stops = (
            tuple(sorted(found.ranks)),
            [stop for r in sorted(found.ranks) for stop in context.graph.blocked_calls[r]],
        )
        since = max(stop.began_at for stop in stops)
        doubtful = found.ranks & context.graph.uncertain_ranks | {
            r for r in culprits if has_working_thread(context.attempt.processes[r], since)
        }
        if doubtful:
            context.requests += [
                EvidenceRequest(rank=r, stacks=True) for r in sorted(doubtful)[:16]
            ]
        waiting = (knot | behind) - found.ranks
        known = (
            min(get_state_known_until(context, r) for r in culprits) if doubtful else context.now
        )
        verdict = Verdict(
            kind=VerdictKind.DEADLOCK,
            severity=Severity.ALERT,
            culprits=culprits,
            waiting=tuple(sorted(waiting)),
            group=found.cycle[0].stream.group,
            seq=found.cycle[0].wait.seq,
            calls=tuple(
                c
                for r in culprits[:16]
                for c in get_newest_call(context.graph.blocked_calls[r][0].stream, r)
            ),
            waits=select_waits(context, found.ranks | waiting, found.cycle),
            began_at=since,
            is_confirmed=known - since
            >= (
                context.limits.stall_after_s
                if doubtful
                else (3 if _are_stacks_sampled(context, found.ranks, since) else 4) * MIN_WAIT_S
            ),
            summary=messages.describe_deadlock(
                culprits, [(edge.wait, get_op_name(edge.stream)) for edge in found.cycle]
            ),
            advice=messages.format_deadlock_advice(tuple(sorted(found.common_ranks)), culprits),
        )
        context.verdicts.append(_add_tag_mismatch(context, verdict, stops))
        context.explained_ranks |= found.ranks | waiting
        context.deadlocked_ranks |= found.ranks | waiting
        request_stacks(context, culprits, waiting, since)


def _waits_for_departed(context: DiagnosisContext, component: set[int]) -> bool:
    """They also wait for such as have left, are frozen or lost: these are the cause, and the cycle
    may come of it.
    """
    crowds = {
        id(stop.awaited): stop.awaited
        for rank in component
        for stop in context.graph.blocked_calls[rank]
    }
    others = {
        on for awaited in crowds.values() for on in awaited
    } - context.graph.blocked_calls.keys()
    return any(
        on in context.graph.silent_ranks or get_unable_kind(context, on) is not None
        for on in others
    )


def _are_stacks_sampled(context: DiagnosisContext, ranks: set[int], since: float) -> bool:
    """A look at each stack, as far as these are asked for, has shown no thread that goes on beside
    the one that waits.
    """
    processes = [context.attempt.processes[rank] for rank in sorted(ranks)[:MAX_CULPRIT_STACKS]]
    return all(
        get_main_thread_since(process, since) is not None
        for process in processes
        if process.is_alive
    )


def _add_tag_mismatch(
    context: DiagnosisContext, verdict: Verdict, blocked_calls: list[BlockedCall]
) -> Verdict:
    """A receive that waits for one tag while its peer's message with another lies unreceived: one
    of the tags is wrong.

    Unless one of them was in use between the two before: then the tags are right, and the two use
    them in another order.
    """
    blocking = {id(stop.stream) for stop in blocked_calls}
    receives = (
        stop.make_edge(on)
        for stop in blocked_calls
        if stop.stream.kind is StreamKind.RECV
        for on in stop.awaited
    )
    for edge in receives:
        receiving, (receiver, sender) = edge.stream, (edge.wait.rank, edge.wait.on_rank)
        sends = [
            s
            for s in list_sends(context.attempt, sender)
            if s.peer == receiver and s.group.key == receiving.group.key
        ]
        for sent in sorted(sends, key=lambda s: (id(s) not in blocking, s.entered_at)):
            received = find_other_end(context.attempt, sender, sent)
            if sent.tag == receiving.tag or sent.entered <= (
                received.entered if received is not None else 0
            ):
                continue
            told = messages.describe_tag_mismatch(
                receiver, receiving.tag, sender, sent.tag, receiving.group, id(sent) in blocking
            )
            if (received is not None and received.entered) or any(
                s.tag == receiving.tag and s.entered for s in sends
            ):
                return replace(
                    verdict,
                    differing_fields=("tag",),
                    summary=f"{verdict.summary}; {told}",
                    advice=messages.REORDERED_TAGS_ADVICE,
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
                calls=(*get_newest_call(sent, sender), *get_newest_call(receiving, receiver)),
                summary=told,
                advice=messages.WRONG_TAG_ADVICE,
            )
    return verdict
