"""The ends of the wait chains: ranks that others wait for and that wait for nobody. What each of
them is doing is its kind.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    MAX_CULPRIT_STACKS,
    DiagnosisContext,
    EvidenceRequest,
    find_blocking_user_thread,
    find_missing_call,
    find_silent_node_mates,
    get_op_name,
    get_state_known_until,
    get_suspicion_delay_s,
    request_stacks,
    select_waits,
)
from hangwatch.diagnosis.graph.graph import BlockedCall, WaitEdge
from hangwatch.diagnosis.graph.progress import (
    find_working_threads,
    is_progressing,
    is_waiting_for_rank,
    needs_another_sample,
)
from hangwatch.diagnosis.graph.waits import is_not_initialized
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.process import FreezeReason, Process

KIND_PRECEDENCE = (
    VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK, VerdictKind.LOST_NODE, VerdictKind.STARTUP_STALL, VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK,
)  # fmt: skip
_SECOND_SAMPLE_S = (
    2.0  # seconds for which it is waited for, where a busy host was slow to give the first
)


@dataclass(slots=True, eq=False)
class _LongestWaits:
    """The longest waits for one rank, or for many whom the same ranks wait for: these share one
    object.
    """

    blocked_calls: list[BlockedCall]
    began_at: float
    last_began_at: float  # when the last of all who wait came
    all_declared: bool  # none of them is torch's
    setup_calls: list[BlockedCall]  # those in the creation of a group
    # of each: until when it is known, and since when it is
    known_intervals: list[tuple[float, float]]
    longest_s: float  # for which any of them is known

    @classmethod
    def from_blocked_calls(
        cls, context: DiagnosisContext, blocked_calls: list[BlockedCall], last_began_at: float
    ) -> _LongestWaits:
        told = [
            (get_state_known_until(context, stop.rank), stop.began_at) for stop in blocked_calls
        ]
        return cls(
            blocked_calls=blocked_calls,
            began_at=min(stop.began_at for stop in blocked_calls),
            last_began_at=last_began_at,
            all_declared=all(stop.stream.group.is_declared for stop in blocked_calls),
            setup_calls=[stop for stop in blocked_calls if stop.stream.kind is StreamKind.SETUP],
            known_intervals=told,
            longest_s=max(known - since for known, since in told),
        )


def diagnose_chain_ends(context: DiagnosisContext) -> None:
    """The ends of the wait chains: those who are waited for and wait for nobody."""
    found = context.graph.find_chain_ends() - set(context.graph.stuck_streams)
    longest = max(
        (
            context.now - stop.began_at
            for stops in context.graph.blocked_calls.values()
            for stop in stops
        ),
        default=0.0,
    )
    suspected_from = get_suspicion_delay_s(context.limits)
    if len(found) > MAX_URGENT_SUSPECTS and longest < suspected_from:
        found = _find_unable_ranks(context, found)
    into = _collect_waits(context, found)
    for component in context.graph.group_chain_ends(found):
        open_ends = sorted(
            [rank for rank in component if rank in into and rank not in context.explained_ranks]
        )
        victims = context.graph.find_waiters_of(component) - component - context.deadlocked_ranks
        if not open_ends or victims & context.explained_ranks:
            continue
        if len(open_ends) > MAX_URGENT_SUSPECTS and not any(
            _is_awaited_for(context, r, into[r], suspected_from) for r in open_ends
        ):
            context.explained_ranks |= victims.union(open_ends)
            if not (open_ends := sorted(_find_unable_ranks(context, open_ends))):
                continue
        kinds = _classify_ends(context, open_ends, into)
        waiters = _find_waiting_absent(context, kinds, into)
        held = (
            waiters
            if waiters
            and any(
                _is_working(context, rank, into[rank].began_at)
                for rank in _select_absent(kinds) - waiters
            )
            else set()
        )
        by_kind: dict[VerdictKind, list[int]] = {}
        for rank, kind in kinds.items():
            if rank not in held:
                by_kind.setdefault(kind, []).append(rank)
        if len(by_kind) > 1 and all(
            context.graph.silent_ranks[r].is_proven_alive
            for r in by_kind.get(VerdictKind.LOST_NODE, ())
        ):
            by_kind.pop(
                VerdictKind.LOST_NODE, None
            )  # they ran on unheard: those who are heard are the cause
        _add_end_verdict(context, by_kind, into, victims, waiters)
        if held:
            request_stacks(context, sorted(held), (), min(into[r].began_at for r in held))
            _request_resample(context, sorted(held)[:MAX_CULPRIT_STACKS])


def _find_unable_ranks(context: DiagnosisContext, ranks: Collection[int]) -> set[int]:
    """Of so many, for whom nobody waits for long, these alone count: most are only not heard yet."""
    return {
        rank
        for rank in context.attempt.unable_ranks.intersection(ranks)
        if get_unable_kind(context, rank) is not None
    }


def _collect_waits(context: DiagnosisContext, chain_ends: set[int]) -> dict[int, _LongestWaits]:
    """The waits for each of them. Of a crowd those alone that wait longest by any count: who began
    first, or was heard of last.
    """
    longest: list[tuple[list[BlockedCall], float]] = []  # and when the last of the crowd came
    crowds: dict[int, list[int]] = {}  # that wait for each, by their places in `longest`
    for crowd in context.graph.iter_waiter_groups():
        if not (awaited := chain_ends.intersection(crowd[0].awaited)):
            continue
        latest: dict[
            float, tuple[float, BlockedCall]
        ] = {}  # by when they began: to sort 100,000 pairs holds up all threads
        for stop in crowd:
            if stop.rank in context.deadlocked_ranks:
                continue
            known = get_state_known_until(context, stop.rank)
            if stop.began_at not in latest or known > latest[stop.began_at][0]:
                latest[stop.began_at] = known, stop
        kept: list[BlockedCall] = []
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
    alike: dict[tuple[int, ...], _LongestWaits] = {}
    for by in map(tuple, crowds.values()):
        if by not in alike:
            alike[by] = _LongestWaits.from_blocked_calls(
                context,
                [stop for n in by for stop in longest[n][0]],
                max(longest[n][1] for n in by),
            )
    return {rank: alike[tuple(by)] for rank, by in crowds.items()}


def _classify_ends(
    context: DiagnosisContext, ranks: list[int], waits_by_end: dict[int, _LongestWaits]
) -> dict[int, VerdictKind]:
    """What each is doing. Of those of whom any one would do, only such as are nearest to coming
    hold up anybody.
    """
    kinds = {rank: _classify_end(context, rank, waits_by_end[rank]) for rank in ranks}
    eligible = [
        rank
        for rank in ranks
        if all(stop.any_suffices for stop in waits_by_end[rank].blocked_calls)
    ]
    nearest = max((KIND_PRECEDENCE.index(kinds[rank]) for rank in eligible), default=0)
    return {
        rank: kind
        for rank, kind in kinds.items()
        if rank not in eligible or KIND_PRECEDENCE.index(kind) == nearest
    }


def _classify_end(context: DiagnosisContext, rank: int, waits: _LongestWaits) -> VerdictKind:
    process, since = context.attempt.processes.get(rank), waits.began_at
    if (kind := get_unable_kind(context, rank)) is not None:
        return kind
    if rank in context.graph.silent_ranks:
        return VerdictKind.LOST_NODE
    # It takes no init_process_group for declared ones, and who is up in another world may still do
    # there what it should.
    if process is None or (is_not_initialized(process) and not waits.all_declared):
        return VerdictKind.STARTUP_STALL
    if any(stop.awaited[rank] == 1 for stop in waits.setup_calls) and all(
        s.kind is not StreamKind.SETUP for s in process.streams.values()
    ):
        return VerdictKind.STARTUP_STALL
    slow = context.now - since < context.limits.slow_limit_s and _is_working(context, rank, since)
    return (
        VerdictKind.SLOW_RANK
        if slow or _is_in_phase(context, process)
        else VerdictKind.MISSING_RANK
    )


def _is_working(context: DiagnosisContext, rank: int, since: float) -> bool:
    process = context.attempt.processes[rank]
    # Whoever still gets on elsewhere is not stuck before it has been in its own code for as long.
    getting_on = (
        rank in context.graph.released_ranks
        or get_state_known_until(context, rank) - process.last_advanced_at
        < context.limits.stall_after_s
    )
    return (
        getting_on
        or is_progressing(process, since)
        or bool(find_working_threads(process, since))
        or _is_in_phase(context, process)
    )


def _select_absent(kinds: dict[int, VerdictKind]) -> set[int]:
    return {
        rank
        for rank, kind in kinds.items()
        if kind in (VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK)
    }


def _find_waiting_absent(
    context: DiagnosisContext, kinds: dict[int, VerdictKind], waits_by_end: dict[int, _LongestWaits]
) -> set[int]:
    """The absent who, when looked at, wait for what another rank may do: while one of the absent
    works, these may be its victims.

    Only some of many are looked at. Where there are such among these, whoever was not seen, and
    does nothing, may be one as well.
    """
    absent = _select_absent(kinds)
    seen = {
        r: is_waiting_for_rank(p, waits_by_end[r].began_at)
        for r in absent
        if (p := context.attempt.processes[r]).samples and not _is_in_phase(context, p)
    }
    if True not in seen.values():
        return set()
    return {
        r
        for r in absent
        if (waits := seen.get(r))
        or (waits is None and not _is_working(context, r, waits_by_end[r].began_at))
    }


def _is_in_phase(context: DiagnosisContext, process: Process) -> bool:
    """In one that it declared, and for no longer than that may last."""
    return process.phase is not None and context.now - process.phase_began_at < (
        process.phase_limit_s or context.limits.slow_limit_s
    )


def get_unable_kind(context: DiagnosisContext, rank: int) -> VerdictKind | None:
    """Why it cannot: it has left, or is frozen."""
    if rank not in context.attempt.unable_ranks:
        return None
    process = context.attempt.processes[rank]
    if any(process.has_left(stop.stream.group) for stop in context.graph.iter_waits_for(rank)):
        return VerdictKind.EXITED_RANK
    return VerdictKind.FROZEN_RANK if process.freeze_reason(context.now) is not None else None


def _add_end_verdict(
    context: DiagnosisContext,
    by_kind: dict[VerdictKind, list[int]],
    waits_by_end: dict[int, _LongestWaits],
    victims: set[int],
    waiters: set[int],
) -> None:
    kind = min(by_kind, key=KIND_PRECEDENCE.index)
    ranks = by_kind[kind]
    # Whoever came last may have held up those who waited for more than him.
    ages = {
        r: _get_wait_age_s(
            context, r, waits_by_end[r], waits_by_end[r].last_began_at if r in waiters else 0.0
        )
        for r in ranks
    }
    age = max(ages.values())
    if kind not in (VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK):
        # Those who came late only a moment ago are not yet part of it.
        ranks = [
            r for r in ranks if ages[r] >= min(age, context.limits.stall_after_s) * 0.9
        ] or ranks
    since = min(_get_complaint_start(context, r, waits_by_end[r].began_at) for r in ranks)
    on = min(ranks, key=lambda rank: waits_by_end[rank].began_at)
    edge = min(waits_by_end[on].blocked_calls, key=lambda stop: stop.began_at).make_edge(on)
    if kind is VerdictKind.LOST_NODE:
        ranks = find_silent_node_mates(context, ranks)
        victims = context.graph.find_waiters_of(ranks)
    culprits = tuple(sorted(ranks))
    waiting = victims - set(culprits)
    process = context.attempt.processes.get(culprits[0])
    stopped = process is not None and process.freeze_reason(context.now) is FreezeReason.STOPPED
    at_once = kind is VerdictKind.EXITED_RANK or (kind is VerdictKind.FROZEN_RANK and stopped)
    limit = max(context.limits.settle_s, MIN_WAIT_S) if at_once else context.limits.stall_after_s
    if not at_once and waiting and context.graph.uncertain_ranks.issuperset(waiting):
        limit *= 2  # that any of them waits is guessed: a look at a stack would tell
    if kind is VerdictKind.MISSING_RANK and any(
        needs_another_sample(context.attempt.processes[r], since, VerdictKind.SLOW_RANK in by_kind)
        for r in culprits
    ):
        limit += _SECOND_SAMPLE_S
    context.verdicts.append(
        make_absence_verdict(context, kind, culprits, waiting, edge, since, due=age >= limit)
    )
    context.explained_ranks |= set(culprits) | waiting
    alive = [r for r in culprits if (p := context.attempt.processes.get(r)) and p.is_alive]
    if age >= get_suspicion_delay_s(context.limits) or at_once:
        request_stacks(context, alive, waiting, since)
    if kind is VerdictKind.SLOW_RANK:
        _request_resample(
            context,
            [
                rank
                for rank in alive
                if find_working_threads(context.attempt.processes[rank], since)
            ],
        )


def make_absence_verdict(
    context: DiagnosisContext,
    kind: VerdictKind,
    culprits: tuple[int, ...],
    waiting: set[int],
    edge: WaitEdge,
    since: float,
    *,
    due: bool,
) -> Verdict:
    """The verdict on those whom others wait for; ``edge`` is one of these waits."""
    keeper = find_blocking_user_thread(context, culprits, since)
    verdict = Verdict(
        kind=kind,
        severity=Severity.WARNING if kind is VerdictKind.SLOW_RANK else Severity.ALERT,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=edge.stream.group,
        seq=edge.wait.seq,
        calls=find_missing_call(context, edge, waiting),
        waits=select_waits(context, waiting),
        began_at=since,
        is_confirmed=due,
        site=find_user_site(keeper[1]) if keeper is not None else None,
    )
    return _add_messages(context, verdict, edge, keeper)


def _request_resample(context: DiagnosisContext, ranks: list[int]) -> None:
    """What ranks wait for worked when it was last seen; only another look tells whether it still
    does.
    """
    for process in map(context.attempt.processes.__getitem__, ranks):
        if (
            process.samples
            and context.now - process.samples[-1].taken_at >= context.limits.stall_after_s
        ):
            context.requests.append(EvidenceRequest(rank=process.rank, stacks=True))


def _get_complaint_start(context: DiagnosisContext, rank: int, since: float) -> float:
    """Since when others who wait since then may rightly complain of ``rank``."""
    if (silence := context.graph.silent_ranks.get(rank)) is not None:
        return max(since, silence.last_alive_at)
    return since if rank in context.attempt.processes else max(since, context.attempt.opened_at)


def _is_awaited_for(
    context: DiagnosisContext, rank: int, waits: _LongestWaits, seconds: float
) -> bool:
    """Others have waited for it for so long. Of nearly all of 100,000 that is soon told."""
    return waits.longest_s >= seconds and _get_wait_age_s(context, rank, waits, 0.0) >= seconds


def _get_wait_age_s(
    context: DiagnosisContext, rank: int, waits: _LongestWaits, freed_at: float
) -> float:
    """For how long others are known to have waited for it, but for the time in which it was, or may
    have been, held up itself.
    """
    process = context.attempt.processes.get(rank)
    if rank in context.graph.newly_released_ranks or (
        process is not None and _was_just_seen(context, process)
    ):
        return 0.0  # in all that is known of it, it was
    until = (
        context.now if rank in context.graph.silent_ranks else get_state_known_until(context, rank)
    )
    if until <= waits.began_at:
        return 0.0
    began = _get_complaint_start(context, rank, freed_at)
    held_from, held_until = process.blocked_interval if process is not None else (0.0, 0.0)
    ages = [0.0]
    for known, since in waits.known_intervals:
        first, last = max(began, since), min(until, known)
        ages.append(last - first - max(0.0, min(held_until, last) - max(held_from, first)))
    return max(ages)


def _was_just_seen(context: DiagnosisContext, process: Process) -> bool:
    """It was told a moment ago that calls are over which it made long since, as after a while in
    which its host was not heard. That is not to say that it got on a moment ago and waits for
    nobody: whether it waits in its newest call can be told once that has passed.
    """
    made_long_since = context.now - process.newest_call_at >= context.limits.stall_after_s / 2
    return made_long_since and any(
        context.now - s.last_completion_at < MIN_WAIT_S for s in process.streams.values()
    )


def _add_messages(
    context: DiagnosisContext,
    verdict: Verdict,
    edge: WaitEdge,
    blocking_thread: tuple[int, ThreadStack] | None,
) -> Verdict:
    op = get_op_name(edge.stream, edge.wait.seq)
    count = len(verdict.waiting)
    wait = messages.format_waiter_count(count)
    many = len(verdict.culprits) > 1
    process = context.attempt.processes.get(verdict.culprits[0])
    waiter = edge.wait.rank if edge.stream.peer is not None else None
    inside = verdict.calls[0].ranks if verdict.calls else ()
    summary = messages.describe_not_entered(
        verdict.culprits, op, edge.stream.group, edge.wait.seq, count, waiter, inside
    )
    advice = messages.format_stack_advice(many)
    if verdict.kind is VerdictKind.STARTUP_STALL:
        again = " again" if process is not None and process.lifecycle is Lifecycle.DESTROYED else ""
        summary = (
            f"{messages.describe_ranks(verdict.culprits)} never reached init_process_group{again},"
            f" in which {wait}"
        )
        if edge.stream.group.is_declared:
            summary = (
                f"{messages.describe_ranks(verdict.culprits)} never started, for which {wait} in"
                f" {op}"
            )
        advice = messages.format_startup_advice(
            {rank: context.attempt.processes.get(rank) for rank in verdict.culprits}
        )
    elif verdict.kind is VerdictKind.EXITED_RANK:
        gone = process is None or not process.is_alive
        summary = messages.describe_exited_ranks(
            verdict.culprits, gone, count, op, edge.stream.group, edge.wait.seq
        )
        advice = messages.format_exited_rank_advice(many)
    elif verdict.kind is VerdictKind.FROZEN_RANK and process is not None:
        state, advice = messages.describe_freeze(
            process.freeze_reason(context.now), process.state, many
        )
        summary = f"{messages.describe_ranks(verdict.culprits)} {state}; {wait} in {op}"
    elif verdict.kind is VerdictKind.LOST_NODE and process is not None:
        summary, advice = messages.describe_lost_node(process.host, verdict.culprits, count, op)
    elif verdict.kind is VerdictKind.SLOW_RANK and process is not None:
        doing = f" in its phase {process.phase!r}" if process.phase else ""
        works, them = ("work", "them") if many else ("works", "it")
        summary = (
            f"{messages.describe_ranks(verdict.culprits)} still {works}{doing} while {wait} for"
            f" {them} in {op}"
        )
        advice = messages.format_slow_rank_advice(
            process, verdict.began_at, _is_in_phase(context, process)
        )
    if blocking_thread is not None and verdict.kind is not VerdictKind.EXITED_RANK:
        rank, thread = blocking_thread
        summary += (
            f": {messages.describe_blocking_thread(f'rank {rank}' if many else 'it', thread)} is at"
            f" {verdict.site}"
        )
    return replace(verdict, summary=summary, advice=advice)
