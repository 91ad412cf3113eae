"""Calls that every member has made and that do not complete: the cause is in the layers below the
ranks, such as the network or the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_newest_call,
    get_op_name,
    get_state_known_until,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream, GroupState

from .agreement import check_agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class _StuckCall:
    """The newest call of ``stream``, which all ``members`` have made and the ranks ``inside`` have
    not completed. ``waiting`` are the members and the ranks that wait for those inside.
    """

    stream: CallStream
    inside: list[int]
    members: Iterable[int]
    waiting: list[int]
    began_at: float
    summary: str
    advice: str


def diagnose_no_progress(context: DiagnosisContext) -> None:
    """One verdict for all stuck calls, since they share the network.

    Ranks that cannot find each other in init_process_group are the exception: each of these calls
    has a verdict of its own.
    """
    stuck_calls = _find_stuck_calls(context)
    for stuck in stuck_calls:
        request_stacks(context, (), set(stuck.waiting), stuck.began_at)
    # Some backends never report that an asynchronous call is complete.
    certain = [
        stuck for stuck in stuck_calls if not context.graph.uncertain_ranks.issuperset(stuck.inside)
    ]
    communication: list[_StuckCall] = []
    for stuck in certain:
        if stuck.stream.kind is StreamKind.SETUP:
            verdict = _make_verdict(context, [stuck])
            context.verdicts.append(_compare_master_addresses(context, verdict))
        else:
            communication.append(stuck)
    if communication:
        communication.sort(key=lambda stuck: (-len(stuck.waiting), stuck.waiting))
        context.verdicts.append(_make_verdict(context, communication))


def _find_stuck_calls(context: DiagnosisContext) -> list[_StuckCall]:
    """Those that have been stuck for long enough to be suspicious."""
    candidates = [*_find_stuck_collectives(context), *_find_stuck_channels(context)]
    limit_s = get_suspicion_delay_s(context.limits)
    return [stuck for stuck in candidates if _get_stuck_age_s(context, stuck) >= limit_s]


def _get_stuck_age_s(context: DiagnosisContext, stuck: _StuckCall) -> float:
    """For how long the call is known to be stuck. Only its members count: the state of the other
    waiting ranks may be known for less long.
    """
    known_until = min(get_state_known_until(context, rank) for rank in stuck.members)
    return known_until - stuck.began_at


def _find_stuck_collectives(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """Collectives that every member has made and no member completes, or that some have completed
    and now wait elsewhere for the members that have not.
    """
    stuck_streams = context.graph.stuck_streams
    blocked = context.graph.find_waiters_of(stuck_streams).union(stuck_streams)
    blocked -= context.explained_ranks
    for group_state, inside in _group_stuck_ranks(context):
        group_ranks = group_state.members[inside[0]].group.ranks
        if not blocked.issuperset(group_ranks):
            continue
        stream = group_state.members[inside[0]]
        if len(inside) == len(group_ranks):
            unfinished = "none finishes"
        else:
            unfinished = f"{messages.describe_ranks(tuple(sorted(inside)))} cannot finish it"
        waiting = {*group_ranks, *context.graph.find_waiters_of(inside)}
        agreement = check_agreement(context, group_state.members, group_ranks, stream.entered)
        position = messages.describe_position(stream.group, stream.entered)
        yield _StuckCall(
            stream=stream,
            inside=inside,
            members=group_ranks,
            waiting=sorted(waiting - context.explained_ranks),
            began_at=max(group_state.members[rank].entered_at for rank in group_ranks),
            summary=agreement.describe(unfinished, get_op_name(stream), inside[0], position),
            advice=messages.format_lower_layers_advice(are_equal=agreement.is_known),
        )


def _group_stuck_ranks(context: DiagnosisContext) -> Iterable[tuple[GroupState, list[int]]]:
    """The ranks that are inside a stuck collective, by process group."""
    ranks_by_group: dict[int, tuple[GroupState, list[int]]] = {}
    for rank, stream in context.graph.stuck_streams.items():
        group_state = stream.group_state
        if group_state is None or not stream.is_pending or rank in context.explained_ranks:
            continue
        _, inside = ranks_by_group.setdefault(id(group_state), (group_state, []))
        inside.append(rank)
    return ranks_by_group.values()


def _find_stuck_channels(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """Sends and receives that do not complete although the peer has made its call."""
    for rank, stream in context.graph.stuck_streams.items():
        peer = stream.peer
        if peer is None or rank in context.explained_ranks or not stream.is_pending:
            continue
        waiting = {rank, *context.graph.find_waiters_of([rank])}
        # The peer may have made its call only just now.
        peer_advanced_at = context.attempt.processes[peer].last_advanced_at
        yield _StuckCall(
            stream=stream,
            inside=[rank],
            members=[rank],
            waiting=sorted(waiting - context.explained_ranks),
            began_at=max(stream.entered_at, peer_advanced_at),
            summary=_describe_stuck_message(rank, peer, stream),
            advice=messages.format_lower_layers_advice(are_equal=False),
        )


def _describe_stuck_message(rank: int, peer: int, stream: CallStream) -> str:
    message = messages.describe_unfinished_message(
        rank,
        get_op_name(stream),
        f"rank {peer}",
        is_receive=stream.kind is StreamKind.RECV,
    )
    return f"{message} ({messages.describe_position(stream.group, stream.entered)})"


def _make_verdict(context: DiagnosisContext, stuck_calls: list[_StuckCall]) -> Verdict:
    """The first call is described, the others are counted."""
    first = stuck_calls[0]
    group, seq = first.stream.group, first.stream.entered
    waiting = sorted({rank for stuck in stuck_calls for rank in stuck.waiting})
    context.explained_ranks |= set(waiting)
    age_s = max(_get_stuck_age_s(context, stuck) for stuck in stuck_calls)
    more_calls = messages.format_more_calls(len(stuck_calls) - 1)
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=KINDS[VerdictKind.NO_PROGRESS].severity,
        culprits=(),
        waiting=tuple(waiting),
        group=group,
        seq=seq,
        calls=get_newest_call(first.stream, first.inside[0]),
        began_at=min(stuck.began_at for stuck in stuck_calls),
        is_confirmed=age_s >= context.limits.stall_after_s,
        summary=f"{first.summary}{more_calls}",
        advice=first.advice,
    )


def _compare_master_addresses(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Ranks that all wait for each other in init_process_group may have been given different master
    addresses: then the ranks with another address than the majority are the culprits.
    """
    ranks_by_address: dict[str, list[int]] = {}
    for rank in verdict.waiting:
        address = context.attempt.processes[rank].identity.master
        ranks_by_address.setdefault(address, []).append(rank)
    majority, *minorities = sorted(ranks_by_address.items(), key=lambda item: -len(item[1]))
    if not minorities:
        return verdict
    is_tie = len(minorities[0][1]) == len(majority[1])
    if is_tie:
        culprits = verdict.waiting
    else:
        culprits = tuple(sorted(rank for _, ranks in minorities for rank in ranks))
    return replace(
        verdict,
        kind=VerdictKind.STARTUP_STALL,
        severity=KINDS[VerdictKind.STARTUP_STALL].severity,
        culprits=culprits,
        waiting=tuple(rank for rank in verdict.waiting if rank not in culprits),
        summary=messages.describe_different_masters([*minorities, majority]),
        advice=messages.DIFFERENT_MASTERS_ADVICE,
    )
