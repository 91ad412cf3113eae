"""Calls that every member has made and that do not complete: the cause is in the layers below the
ranks, such as the network or the devices.

Before that can be said, it must be known that the calls are the same, and that the ranks wait. Node
agents report the running hashes of some calls only, and the arguments of those that block. Ranks that
are ahead of a blocked or an awaited one, as the root of a broadcast, the sender of a message, or a
host that runs ahead of its device, may not have reported the call at which it stopped. What is missing
is requested here, without a verdict: the next diagnosis draws the conclusions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS, CallStream, CallWindow, GroupState

from ..context import (
    DiagnosisContext,
    EvidenceRequest,
    get_newest_call,
    get_state_known_until,
    request_stacks,
)
from ..graph.edges import BlockedCall, get_op_name
from ..messages import (
    describe_position,
    describe_ranks,
    describe_unfinished_message,
    format_lower_layers_advice,
    format_more_calls,
)
from .agreement import check_agreement

DIFFERENT_MASTERS_ADVICE = "MASTER_ADDR and MASTER_PORT must be the same on every rank."


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
    delay_s = context.limits.suspicion_delay_s
    candidates = [*_find_stuck_collectives(context), *_find_stuck_channels(context)]
    stuck_calls = [c for c in candidates if _get_stuck_age_s(context, c) >= delay_s]
    for stuck in stuck_calls:
        request_stacks(context, (), set(stuck.waiting), stuck.began_at)
    # Some backends never report that an asynchronous call is complete.
    certain = [
        stuck for stuck in stuck_calls if not context.graph.uncertain_ranks.issuperset(stuck.inside)
    ]
    communication: list[_StuckCall] = []
    for stuck in certain:
        if stuck.stream.kind is StreamKind.SETUP:
            verdict = _make_stuck_verdict(context, [stuck])
            context.accuse(_compare_master_addresses(context, verdict))
        else:
            communication.append(stuck)
    if communication:
        communication.sort(key=lambda stuck: (-len(stuck.waiting), stuck.waiting))
        context.accuse(_make_stuck_verdict(context, communication))


def _get_stuck_age_s(context: DiagnosisContext, stuck: _StuckCall) -> float:
    """The time for which the call is known to be stuck. Only its members count: the state of the other
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
    ranks_by_group: dict[int, tuple[GroupState, list[int]]] = {}
    for rank, stream in stuck_streams.items():
        state = stream.group_state
        if state is not None and stream.is_pending and rank not in context.explained_ranks:
            ranks_by_group.setdefault(id(state), (state, []))[1].append(rank)
    for group_state, inside in ranks_by_group.values():
        group_ranks = group_state.members[inside[0]].group.ranks
        if not blocked.issuperset(group_ranks):
            continue
        stream = group_state.members[inside[0]]
        if len(inside) == len(group_ranks):
            unfinished = "none finishes"
        else:
            unfinished = f"{describe_ranks(tuple(sorted(inside)))} cannot finish it"
        waiting = {*group_ranks, *context.graph.find_waiters_of(inside)}
        agreement = check_agreement(context, group_state.members, group_ranks, stream.entered)
        position = describe_position(stream.group, stream.entered)
        yield _StuckCall(
            stream=stream,
            inside=inside,
            members=group_ranks,
            waiting=sorted(waiting - context.explained_ranks),
            began_at=max(group_state.members[rank].entered_at for rank in group_ranks),
            summary=agreement.describe(unfinished, get_op_name(stream), inside[0], position),
            advice=format_lower_layers_advice(are_equal=agreement.is_known),
        )


def _find_stuck_channels(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """Sends and receives that do not complete although the peer has made its call."""
    for rank, stream in context.graph.stuck_streams.items():
        peer = stream.peer
        if peer is None or rank in context.explained_ranks or not stream.is_pending:
            continue
        waiting = {rank, *context.graph.find_waiters_of([rank])}
        # The peer may have made its call only just now.
        peer_advanced_at = context.attempt.processes[peer].last_advanced_at
        message = describe_unfinished_message(
            rank, get_op_name(stream), f"rank {peer}", is_receive=stream.kind is StreamKind.RECV
        )
        yield _StuckCall(
            stream=stream,
            inside=[rank],
            members=[rank],
            waiting=sorted(waiting - context.explained_ranks),
            began_at=max(stream.entered_at, peer_advanced_at),
            summary=f"{message} ({describe_position(stream.group, stream.entered)})",
            advice=format_lower_layers_advice(are_equal=False),
        )


def _make_stuck_verdict(context: DiagnosisContext, stuck_calls: list[_StuckCall]) -> Verdict:
    """The verdict on all of the calls: it describes the first one and counts the others."""
    first = stuck_calls[0]
    age_s = max(_get_stuck_age_s(context, stuck) for stuck in stuck_calls)
    return make_no_progress_verdict(
        first.stream,
        first.inside[0],
        {rank for stuck in stuck_calls for rank in stuck.waiting},
        min(stuck.began_at for stuck in stuck_calls),
        due=age_s >= context.limits.stall_after_s,
        summary=f"{first.summary}{format_more_calls(len(stuck_calls) - 1)}",
        advice=first.advice,
    )


def make_no_progress_verdict(
    stream: CallStream,
    rank: int,
    waiting: Iterable[int],
    began_at: float,
    *,
    due: bool,
    summary: str,
    advice: str,
) -> Verdict:
    """The verdict, without a culprit, that the newest call of ``rank`` in ``stream`` does not complete."""
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=KINDS[VerdictKind.NO_PROGRESS].severity,
        culprits=(),
        waiting=tuple(sorted(waiting)),
        group=stream.group,
        seq=stream.entered,
        calls=get_newest_call(stream, rank),
        began_at=began_at,
        is_confirmed=due,
        summary=summary,
        advice=advice,
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
        summary="; ".join(
            f"{describe_ranks(tuple(ranks))} expect the master at {address}"
            for address, ranks in [*minorities, majority]
        ),
        advice=DIFFERENT_MASTERS_ADVICE,
    )


def request_last_calls(context: DiagnosisContext) -> None:
    """Requests the calls that show whether ranks that wait for each other made the same ones."""
    awaited_ranks = context.graph.find_chain_ends()
    if len(awaited_ranks) <= MAX_URGENT_SUSPECTS:
        for rank in sorted(awaited_ranks):
            for blocked in context.graph.iter_waits_for(rank):
                _request_call_before(context, blocked, rank)
    _request_stuck_calls(context)
    _request_split_sizes(context)


def _request_call(context: DiagnosisContext, rank: int, stream: CallStream, seq: int) -> None:
    window = CallWindow(seq, seq)
    if not stream.has_answered(window):
        context.requests.append(EvidenceRequest.for_calls(rank, stream, window))


def _request_call_before(context: DiagnosisContext, blocked: BlockedCall, rank: int) -> None:
    """Requests the call of a blocked rank at the position of the last call of the awaited ``rank``, if it
    is not known.
    """
    stream = blocked.stream
    if stream.kind is not StreamKind.COLLECTIVE or context.now - blocked.began_at < MIN_WAIT_S:
        return
    if stream.group_state is not None and stream.group_state.diverged:
        return  # the search for the first difference requests what is needed
    awaited = context.streams_by_group.get(stream.group.key, {}).get(rank)
    if awaited is None:
        return
    seq = awaited.entered
    is_counted = awaited.is_counted(seq) and stream.is_counted(seq)
    if is_counted and 0 < seq < stream.entered and seq not in stream.hashes_by_seq:
        _request_call(context, blocked.rank, stream, seq)


def _request_stuck_calls(context: DiagnosisContext) -> None:
    """Requests the counterparts of calls that do not complete although all others have made theirs."""
    graph = context.graph
    stuck_ranks = graph.stuck_streams.keys() | graph.released_ranks
    if len(stuck_ranks) > MAX_URGENT_SUSPECTS:
        return
    stuck_groups: dict[int, tuple[GroupState, int]] = {}
    for rank in sorted(stuck_ranks):
        for stream in context.attempt.processes[rank].open_calls.unfinished_streams:
            if context.now - stream.entered_at < MIN_WAIT_S:
                continue
            state = stream.group_state
            if state is None:
                _request_other_end(context, stream)
            elif graph.stuck_streams.get(rank) is stream and not state.diverged:
                stuck_groups[id(state)] = state, stream.entered
    for state, seq in stuck_groups.values():
        check_agreement(context, state.members, state.key[2], seq)


def _request_other_end(context: DiagnosisContext, stream: CallStream) -> None:
    """Requests the send that a receive waits for, or the receive of a send."""
    other_end = stream.other_end
    seq = stream.first_unfinished
    if other_end is None or stream.peer is None or seq not in stream.calls:
        return
    if not (stream.is_counted(seq) and other_end.is_counted(seq)):
        return
    if other_end.entered >= seq and seq not in other_end.calls:
        _request_call(context, stream.peer, other_end, seq)


def _request_split_sizes(context: DiagnosisContext) -> None:
    """Requests the split sizes of members that got past a call in which others are blocked."""
    for key in context.attempt.uneven_groups:
        members = context.streams_by_group[key]
        if len(members) > MAX_URGENT_SUSPECTS:
            continue
        blocked_seqs = {
            stream.entered
            for stream in members.values()
            if stream.blocks_thread and context.now - stream.entered_at >= MIN_WAIT_S
        }
        for seq in sorted(blocked_seqs):
            for rank, stream in members.items():
                is_known = seq in stream.calls or not stream.is_counted(seq)
                if stream.entered >= seq and not is_known:
                    _request_call(context, rank, stream, seq)


def sample_busy_ranks(context: DiagnosisContext) -> None:
    """Requests a stack of some of the busy ranks that may have waited for longer than the suspicion delay,
    or may wait for a rank that has left or is frozen. A host may spin while it waits for its device.

    A rank whose stack shows that it waits is part of the next wait-for graph.
    """
    graph = context.graph
    overdue: dict[int, float] = {}
    for rank in graph.unsampled_waits.keys() - context.explained_ranks:
        waits = graph.unsampled_waits[rank]
        began_at = min([blocked.began_at for blocked in waits])
        is_any_unable = any(r in b.awaited for b in waits for r in graph.resolver.unable_to_call)
        delay_s = MIN_WAIT_S if is_any_unable else context.limits.suspicion_delay_s
        if get_state_known_until(context, rank) - began_at >= delay_s:
            overdue[rank] = began_at
    if overdue:
        request_stacks(context, (), overdue, min(overdue.values()))
