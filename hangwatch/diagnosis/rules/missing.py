"""The ends of the wait chains: ranks that others wait for and that do not wait themselves.

Two kinds of ends are no culprits: members of a foreign group that are no ranks of the attempt, and
ranks that are not recorded. Whether they made the call is not known.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, SECOND_SAMPLE_S
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.process import FreezeReason

from ..context import (
    MAX_CULPRIT_STACKS,
    DiagnosisContext,
    EvidenceRequest,
    find_missing_call,
    find_silent_node_mates,
    get_op_name,
    get_state_known_until,
    iter_alive,
    request_stacks,
)
from ..graph.graph import shows_all_members
from ..graph.progress import find_working_threads, needs_another_sample
from ..messages import describe_not_entered, describe_ranks, format_waiter_count
from .absence import make_absence_verdict
from .chain_ends import (
    KIND_PRECEDENCE,
    LongestWaits,
    classify_ends,
    collect_longest_waits,
    find_possible_victims,
    get_accountable_since,
    get_last_entered_at,
    get_unable_kind,
    get_wait_age_s,
    has_been_awaited_for,
    is_working,
    select_absent,
)

_SIMULTANEOUS_SHARE = 0.9  # culprits are awaited for at least this share of the longest wait

_OUTSIDE_ADVICE = (
    "The group numbers its members by itself: look at the program at its other end, which may be at"
    " work."
)
_UNWATCHED_ADVICE = (
    "Other calls that need all ranks were completed, so the process exists, and it does not"
    " report: pass HANGWATCH_URL to every rank and install hangwatch into the Python of each;"
    " `hangwatch doctor` on its host reports what is wrong there."
)


def diagnose_chain_ends(context: DiagnosisContext) -> None:
    """One verdict for each set of chain ends that delay some rank in common."""
    graph = context.graph
    chain_ends = graph.find_chain_ends() - graph.stuck_streams.keys() - graph.uncounted_waits.keys()
    chain_ends -= graph.unrecorded_waits.keys()
    if len(chain_ends) > MAX_URGENT_SUSPECTS:
        groups = graph.iter_waiter_groups()
        first_began_at = min([b.began_at for group in groups for b in group], default=context.now)
        if context.now - first_began_at < context.limits.suspicion_delay_s:
            chain_ends = _find_unable_ranks(context, chain_ends)
        else:
            chain_ends = _drop_unreported_ranks(context, chain_ends, first_began_at)
    waits_by_end = collect_longest_waits(context, chain_ends)
    for component in context.graph.group_chain_ends(chain_ends):
        _diagnose_component(context, component, waits_by_end)


def _drop_unreported_ranks(
    context: DiagnosisContext, ranks: Collection[int], since: float
) -> set[int]:
    """Drops the ranks that have not reported ``since`` a time: with many ranks, the next heartbeats of
    their hosts are not due yet. No wait for them is known to last.
    """
    kept = context.graph.silent_ranks.keys() | context.attempt.unable_ranks
    return {rank for rank in ranks if rank in kept or get_state_known_until(context, rank) > since}


def _find_unable_ranks(context: DiagnosisContext, ranks: Collection[int]) -> set[int]:
    """The ranks that have left or are frozen. The others of many ranks, for which no rank has waited
    long, are probably only waiting for their next report.
    """
    return {
        rank
        for rank in context.attempt.unable_ranks.intersection(ranks)
        if get_unable_kind(context, rank) is not None
    }


def _diagnose_component(
    context: DiagnosisContext, component: set[int], waits_by_end: dict[int, LongestWaits]
) -> None:
    unexplained = component - context.explained_ranks
    ends = sorted(rank for rank in unexplained if rank in waits_by_end)
    waiters = context.graph.find_waiters_of(component)
    victims = waiters - component - context.deadlocked_ranks
    if not ends or victims & context.explained_ranks:
        return
    delay_s = context.limits.suspicion_delay_s
    if len(ends) > MAX_URGENT_SUSPECTS and not any(
        has_been_awaited_for(context, rank, waits_by_end[rank], delay_s) for rank in ends
    ):
        context.explained_ranks |= victims.union(ends)
        ends = sorted(_find_unable_ranks(context, ends))
        if not ends:
            return
    outside = [rank for rank in ends if rank < 0]
    if outside:
        if len(outside) == len(ends):
            _accuse_outside_members(context, outside, victims, waits_by_end)
            return
        ends = [rank for rank in ends if rank >= 0]
        context.explained_ranks |= set(outside)
    unwatched = find_unwatched_ends(context, ends, waits_by_end)
    if len(unwatched) == len(ends):
        _accuse_unwatched_ranks(context, unwatched, victims, waits_by_end)
        return
    ends = [rank for rank in ends if rank not in unwatched]
    kinds = classify_ends(context, ends, waits_by_end)
    possible_victims = find_possible_victims(context, kinds, waits_by_end)
    spared = set()
    if possible_victims:
        others = select_absent(kinds) - possible_victims
        if any(is_working(context, rank, waits_by_end[rank].began_at) for rank in others):
            spared = possible_victims
    ranks_by_kind: dict[VerdictKind, list[int]] = {}
    for rank, kind in kinds.items():
        if rank not in spared:
            ranks_by_kind.setdefault(kind, []).append(rank)
    lost_ranks = ranks_by_kind.get(VerdictKind.LOST_NODE, ())
    if len(ranks_by_kind) > 1 and all(
        context.graph.silent_ranks[rank].is_proven_alive for rank in lost_ranks
    ):
        # The lost ranks kept running without reporting: the cause is among the ranks that report.
        ranks_by_kind.pop(VerdictKind.LOST_NODE, None)
    ends_by_kind = _ChainEnds(ranks_by_kind, waits_by_end, victims, possible_victims)
    _add_end_verdict(context, ends_by_kind)
    if spared:
        began_at = min(waits_by_end[rank].began_at for rank in spared)
        request_stacks(context, sorted(spared), (), began_at)
        _request_new_samples(context, sorted(spared)[:MAX_CULPRIT_STACKS])


@dataclass(frozen=True, slots=True)
class _ChainEnds:
    """The ends of one component of wait chains."""

    ranks_by_kind: dict[VerdictKind, list[int]]
    waits_by_end: dict[int, LongestWaits]
    victims: set[int]
    possible_victims: set[int]  # ends that themselves wait for what another rank may do


def _add_end_verdict(context: DiagnosisContext, ends: _ChainEnds) -> None:
    waits_by_end = ends.waits_by_end
    kind = min(ends.ranks_by_kind, key=KIND_PRECEDENCE.index)
    ranks, age_s = _select_simultaneous(context, ends, kind)
    began_at = min(
        get_accountable_since(context, rank, waits_by_end[rank].began_at) for rank in ranks
    )
    longest_awaited = min(ranks, key=lambda rank: waits_by_end[rank].began_at)
    devices = context.get_devices()
    # Hosts run ahead of their devices: what these wait for comes first.
    device_edge = None if devices is None else devices.find_longest_wait((longest_awaited,))
    edge = device_edge or waits_by_end[longest_awaited].make_first_edge(longest_awaited)
    victims = ends.victims
    if kind is VerdictKind.LOST_NODE:
        ranks = find_silent_node_mates(context, ranks)
        victims = context.graph.find_waiters_of(ranks)
    culprits = tuple(sorted(ranks))
    waiting = (victims | context.find_waiting_devices(culprits)).difference(culprits)
    is_immediate = _is_immediate(context, kind, culprits[0])
    limit_s = _get_confirmation_delay_s(context, ends, kind, culprits, waiting, began_at)
    context.accuse(
        make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=age_s >= limit_s)
    )
    alive = [process.rank for process in iter_alive(context, culprits)]
    if age_s >= context.limits.suspicion_delay_s or is_immediate:
        # A rank imports, downloads and connects before its process group exists.
        are_moving = kind is VerdictKind.STARTUP_STALL
        request_stacks(context, alive, waiting, began_at, are_moving=are_moving)
    if kind is VerdictKind.SLOW_RANK:
        processes = context.attempt.processes
        kept_by_threads = [r for r in alive if find_working_threads(processes[r], began_at)]
        _request_new_samples(context, kept_by_threads)


def _select_simultaneous(
    context: DiagnosisContext, ends: _ChainEnds, kind: VerdictKind
) -> tuple[list[int], float]:
    """The ranks of a kind without those that were only just missed, and the longest wait for any
    of them in seconds.
    """
    ranks = ends.ranks_by_kind[kind]
    ages_s = {}
    for rank in ranks:
        waits = ends.waits_by_end[rank]
        # The last rank to arrive may have delayed the others, if they waited for it as well.
        freed_at = 0.0
        if rank in ends.possible_victims:
            freed_at = get_last_entered_at(context, rank, waits)
        ages_s[rank] = get_wait_age_s(context, rank, waits, freed_at)
    longest_s = max(ages_s.values())
    if kind not in (VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK):
        threshold_s = min(longest_s, context.limits.stall_after_s) * _SIMULTANEOUS_SHARE
        ranks = [rank for rank in ranks if ages_s[rank] >= threshold_s] or ranks
    return ranks, longest_s


def _is_immediate(context: DiagnosisContext, kind: VerdictKind, culprit: int) -> bool:
    """Whether the verdict need not wait for ``stall_after_s``."""
    if kind is VerdictKind.EXITED_RANK:
        return True
    process = context.attempt.processes.get(culprit)
    if kind is not VerdictKind.FROZEN_RANK or process is None:
        return False
    return process.freeze_reason(context.now) is FreezeReason.STOPPED


def _get_confirmation_delay_s(
    context: DiagnosisContext,
    ends: _ChainEnds,
    kind: VerdictKind,
    culprits: tuple[int, ...],
    waiting: set[int],
    began_at: float,
) -> float:
    if _is_immediate(context, kind, culprits[0]):
        return max(context.limits.settle_s, MIN_WAIT_S)
    delay_s = context.limits.stall_after_s
    if waiting and context.graph.uncertain_ranks.issuperset(waiting):
        # Whether any of them waits is only a guess; a stack sample would show it.
        delay_s *= 2
    is_any_slow = VerdictKind.SLOW_RANK in ends.ranks_by_kind
    processes = context.attempt.processes
    if kind is VerdictKind.MISSING_RANK and any(
        needs_another_sample(processes[rank], began_at, is_any_slow) for rank in culprits
    ):
        delay_s += SECOND_SAMPLE_S
    return delay_s


def _request_new_samples(context: DiagnosisContext, ranks: list[int]) -> None:
    """Requests stacks of ranks whose last sample is old: what they wait for worked then, and only a
    new sample shows whether it still does.
    """
    for rank in ranks:
        samples = context.attempt.processes[rank].samples
        if samples and context.now - samples[-1].taken_at >= context.limits.stall_after_s:
            context.requests.append(EvidenceRequest(rank=rank, stacks=True))


def _accuse_outside_members(
    context: DiagnosisContext,
    outside: Collection[int],
    victims: set[int],
    waits_by_end: dict[int, LongestWaits],
) -> None:
    """Adds a warning, since nothing shows whether these processes work, or an alert once that lasts.
    Ranks of an attempt of their own get none: its diagnosis names them.
    """
    ranks = tuple(sorted(outside, reverse=True))
    members = [context.attempt.foreign_groups.find_outside(rank) for rank in ranks]
    if all(m is not None and m.process.is_alive and not m.attempt.is_finished for m in members):
        return
    own_victims = {rank for rank in victims if rank >= 0}
    first = min(ranks, key=lambda rank: waits_by_end[rank].began_at)
    waits = waits_by_end[first]
    age_s = max(get_wait_age_s(context, rank, waits_by_end[rank], 0.0) for rank in ranks)
    is_long = age_s >= context.limits.slow_limit_s
    edge = waits.make_first_edge(first)
    calls = find_missing_call(context, edge, own_victims)
    summary = describe_not_entered(
        ranks,
        get_op_name(edge.stream, edge.wait.seq),
        edge.stream.group,
        edge.wait.seq,
        len(own_victims),
        edge.wait.rank if edge.stream.peer is not None else None,
        calls[0].ranks if calls else (),
    )
    is_due = age_s >= context.limits.stall_after_s
    verdict = make_absence_verdict(
        context,
        VerdictKind.MISSING_RANK if is_long else VerdictKind.SLOW_RANK,
        (),
        own_victims,
        edge,
        waits.began_at,
        due=is_due,
        messages=(summary, _OUTSIDE_ADVICE),
    )
    context.accuse(verdict, {*ranks, *victims}, samples=is_due)


def drop_outside_members(verdict: Verdict) -> Verdict:
    """The verdict with ranks of the attempt alone. Its texts may name others."""
    calls = [replace(c, ranks=_select_known(c.ranks)) for c in verdict.calls]
    return replace(
        verdict,
        culprits=_select_known(verdict.culprits),
        waiting=_select_known(verdict.waiting),
        calls=tuple(c for c in calls if c.ranks),
        waits=tuple(w for w in verdict.waits if w.rank >= 0 and w.on_rank >= 0),
    )


def _select_known(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank >= 0)


def find_unwatched_ends(
    context: DiagnosisContext, ends: Collection[int], waits_by_end: dict[int, LongestWaits]
) -> list[int]:
    """The ends of wait chains whose calls are not recorded."""
    attempt, unwatched = context.attempt, []
    # Whether a group shows that an end exists that does not report, by the id of the group's state.
    # Before all of 100,000 ranks have started, there are as many ends, and the groups have as many
    # members.
    is_shown: dict[int, bool] = {}
    for rank in ends:
        process = attempt.processes.get(rank)
        if process is not None:
            if process.identity.unrecorded:
                unwatched.append(rank)
            continue
        for blocked in waits_by_end[rank].blocked_calls:
            state = blocked.stream.group_state
            if state is None:
                continue
            if id(state) not in is_shown:
                is_shown[id(state)] = shows_all_members(attempt, state)
            if is_shown[id(state)]:
                unwatched.append(rank)
                break
    return unwatched


def _accuse_unwatched_ranks(
    context: DiagnosisContext,
    unwatched: Collection[int],
    victims: set[int],
    waits_by_end: dict[int, LongestWaits],
) -> None:
    """Adds a warning at first, as for a late start: the unwatched ranks may be at work."""
    ranks = tuple(sorted(unwatched))
    first = min(ranks, key=lambda rank: waits_by_end[rank].began_at)
    waits = waits_by_end[first]
    age_s = max(get_wait_age_s(context, rank, waits_by_end[rank], 0.0) for rank in ranks)
    edge = waits.make_first_edge(first)
    are, they = ("are", "they") if len(ranks) > 1 else ("is", "it")
    summary = (
        f"{format_waiter_count(len(victims))} in {get_op_name(edge.stream, edge.wait.seq)}"
        f" for {describe_ranks(ranks)}, which {are} not watched: whether {they} made the call"
        " is not known"
    )
    advice = _UNWATCHED_ADVICE
    for rank in ranks:
        process = context.attempt.processes.get(rank)
        if process is not None and process.identity.unrecorded:  # the reason, with its remedy
            advice = f"Nothing is recorded of that process: {process.identity.unrecorded}."
            break
    is_due = age_s >= context.limits.stall_after_s
    verdict = make_absence_verdict(
        context,
        VerdictKind.STARTUP_STALL,
        (),
        victims,
        edge,
        waits.began_at,
        due=is_due,
        messages=(summary, advice),
    )
    context.accuse(verdict, unwatched, samples=is_due)
