"""Calls that every member has made and that do not complete: the cause is in the layers below the
ranks, such as the network or the devices.

Before that can be said, it must be known that the calls are the same, and that the ranks wait. Node
agents report the running hashes of some calls only, and the arguments of those that block. Ranks that
are ahead of a blocked or an awaited one, as the root of a broadcast, the sender of a message, or a
host that runs ahead of its device, may not have reported the call at which it stopped. What is missing
is requested here, without a verdict: the next diagnosis draws the conclusions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS, CallStream, CallWindow

from ..call_classes import classify_members
from ..context import DiagnosisContext, get_newest_call
from ..graph.edges import BlockedCall, get_op_name
from ..messages import (
    describe_position,
    describe_ranks,
    describe_unfinished_message,
    format_lower_layers_advice,
    format_more_calls,
)
from .start import explain_stuck_setup

_MAX_REQUESTED_RANKS = 8  # later hashes show to which side the other ranks belong


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAgreement:
    """What is known of whether all members of ``group`` made the same call ``seq``."""

    group: Group
    seq: int
    is_known: bool  # the running hashes of all members are equal there
    is_different: bool  # some of them are known to differ
    may_become_known: bool  # hashes were requested and have not arrived

    def describe(self, ending: str, op: str, caller: int) -> str:
        """The clause that all ranks entered the call, and what came of it. It claims that this was the
        same call only if that is known. ``op`` is what ``caller`` called.
        """
        count = len(self.group.ranks)
        position = describe_position(self.group, self.seq)
        if self.is_known:
            return f"all {count} ranks made the same call and {ending}: {op} ({position})"
        if self.is_different:
            doubt = "their calls have not been the same since an earlier one"
        elif self.may_become_known:
            doubt = "whether they made the same call is not known yet"
        else:
            doubt = "whether they made the same call is not known"
        entered = f"all {count} ranks entered call {self.seq} and {ending}"
        return f"{entered}: {op} on rank {caller} ({position}); {doubt}"


def check_agreement(context: DiagnosisContext, group: Group, seq: int) -> CallAgreement:
    """Compares call ``seq`` of the members, and requests what is missing for that."""
    members = context.get_members(group)
    streams = {rank: members[rank] for rank in group.ranks if rank in members}
    classes, unclassified = classify_members(streams, seq)
    classified_count = sum(len(class_ranks) for _, class_ranks in classes)
    window = CallWindow(seq, seq)
    missing = [
        rank
        for rank in unclassified
        if context.processes[rank].is_alive and not streams[rank].has_answered(window)
    ]
    for rank in missing[:_MAX_REQUESTED_RANKS]:
        context.request_calls(rank, streams[rank], window)
    return CallAgreement(
        group=group,
        seq=seq,
        is_known=len(classes) == 1 and classified_count == len(group.ranks),
        is_different=len(classes) > 1,
        may_become_known=bool(missing),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StuckCall:
    """The newest call of ``stream``, which all its members, or both of its ends, have made and the
    ranks ``inside`` have not completed.
    """

    stream: CallStream
    inside: list[int]
    began_at: float
    summary: str
    are_equal: bool  # the calls of all members are known to be equal


def diagnose_no_progress(context: DiagnosisContext) -> None:
    """One verdict for all stuck calls, since they share the network.

    Ranks that cannot find each other in init_process_group are the exception: each of these calls
    has a verdict of its own. A backend may also connect the members of a group in its first call.
    """
    setup = []
    communication = []
    for stuck in [*_find_stuck_collectives(context), *_find_stuck_channels(context)]:
        stream, inside = stuck.stream, stuck.inside
        members = stream.group.ranks if stream.peer is None else inside
        # The state of the ranks that wait for these may be known for less long.
        known_until = min(map(context.get_state_known_until, members))
        age_s = known_until - stuck.began_at
        if age_s < context.limits.suspicion_delay_s:
            continue
        waiting = {*members, *context.graph.find_waiters_of(inside)} - context.explained_ranks
        context.request_stacks((), waiting, stuck.began_at)
        if context.graph.uncertain_ranks.issuperset(inside):
            continue  # some backends never report that an asynchronous call is complete
        verdict = make_no_progress_verdict(
            stream,
            inside[0],
            waiting,
            stuck.began_at,
            due=age_s >= context.limits.stall_after_s,
            summary=stuck.summary,
            advice=format_lower_layers_advice(are_equal=stuck.are_equal),
        )
        is_setup = stream.kind is StreamKind.SETUP
        if is_setup or (stream.peer is None and stream.entered == 1):
            severity = context.get_start_severity(stuck.began_at)
            verdict = replace(verdict, severity=severity)
        if is_setup:
            setup.append(verdict)
        else:
            communication.append(verdict)
    for verdict in setup:
        context.accuse(explain_stuck_setup(context, verdict))
    if communication:
        communication.sort(
            key=lambda verdict: (not verdict.is_alert, -len(verdict.waiting), verdict.waiting)
        )
        first = communication[0]
        all_waiting = {rank for verdict in communication for rank in verdict.waiting}
        merged = replace(
            first,
            waiting=tuple(sorted(all_waiting)),
            began_at=min(verdict.began_at for verdict in communication),
            is_confirmed=any(verdict.is_confirmed for verdict in communication),
            summary=f"{first.summary}{format_more_calls(len(communication) - 1)}",
        )
        context.accuse(merged)


def _find_stuck_collectives(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """Collectives that every member has made and no member completes, or that some have completed
    and now wait elsewhere for the members that have not.
    """
    stuck_streams = context.graph.stuck_streams
    blocked = context.graph.find_waiters_of(stuck_streams).union(stuck_streams)
    blocked -= context.explained_ranks
    ranks_by_state = defaultdict(list)
    for rank, stream in stuck_streams.items():
        state = stream.group_state
        if state is not None and stream.is_pending and rank not in context.explained_ranks:
            ranks_by_state[id(state)].append(rank)
    for inside in ranks_by_state.values():
        stream = stuck_streams[inside[0]]
        group_ranks = stream.group.ranks
        if not blocked.issuperset(group_ranks):
            continue
        if len(inside) == len(group_ranks):
            unfinished = "none finishes"
        else:
            unfinished = f"{describe_ranks(tuple(sorted(inside)))} cannot finish it"
        agreement = check_agreement(context, stream.group, stream.entered)
        members = context.get_members(stream.group)
        yield _StuckCall(
            stream=stream,
            inside=inside,
            began_at=max(members[rank].entered_at for rank in group_ranks),
            summary=agreement.describe(unfinished, get_op_name(stream), inside[0]),
            are_equal=agreement.is_known,
        )


def _find_stuck_channels(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """Sends and receives that do not complete although the peer has made its call."""
    for rank, stream in context.graph.stuck_streams.items():
        peer = stream.peer
        if peer is None or rank in context.explained_ranks or not stream.is_pending:
            continue
        # The peer may have made its call only just now.
        peer_advanced_at = context.processes[peer].last_advanced_at
        message = describe_unfinished_message(
            rank, get_op_name(stream), f"rank {peer}", is_receive=stream.kind is StreamKind.RECV
        )
        yield _StuckCall(
            stream=stream,
            inside=[rank],
            began_at=max(stream.entered_at, peer_advanced_at),
            summary=f"{message} ({describe_position(stream.group, stream.entered)})",
            are_equal=False,
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


def request_last_calls(context: DiagnosisContext) -> None:
    """Requests the calls that show whether ranks that wait for each other made the same ones."""
    awaited_ranks = context.graph.find_chain_ends()
    if len(awaited_ranks) <= MAX_URGENT_SUSPECTS:
        for rank in sorted(awaited_ranks):
            for blocked in context.graph.iter_waits_for(rank):
                _request_call_before(context, blocked, rank)
    _request_stuck_calls(context)
    # The split sizes of members that got past a call in which others are blocked.
    for key in context.attempt.uneven_groups:
        members = context.attempt.streams_by_group[key]
        if len(members) > MAX_URGENT_SUSPECTS:
            continue
        blocked_seqs = set()
        for stream in members.values():
            if stream.blocks_thread and context.now - stream.entered_at >= MIN_WAIT_S:
                blocked_seqs.add(stream.entered)
        for seq in sorted(blocked_seqs):
            for rank, stream in members.items():
                _request_arguments(context, rank, stream, seq)


def _request_arguments(context: DiagnosisContext, rank: int, stream: CallStream, seq: int) -> None:
    """Requests a call that the rank has made, if it is not known and has the same number on other ranks."""
    if stream.entered >= seq and seq not in stream.calls and stream.is_counted(seq):
        context.request_calls(rank, stream, CallWindow(seq, seq))


def _request_call_before(context: DiagnosisContext, blocked: BlockedCall, rank: int) -> None:
    """Requests a blocked rank's call at the number of the last call of the awaited ``rank``."""
    stream = blocked.stream
    if stream.kind is not StreamKind.COLLECTIVE or context.now - blocked.began_at < MIN_WAIT_S:
        return
    state = stream.group_state
    if state is None or state.diverged:
        return  # the search for the first difference requests what is needed
    awaited = state.members.get(rank)
    if awaited is None:
        return
    seq = awaited.entered
    is_counted = awaited.is_counted(seq) and stream.is_counted(seq)
    if is_counted and 0 < seq < stream.entered and seq not in stream.hashes_by_seq:
        context.request_calls(blocked.rank, stream, CallWindow(seq, seq))


def _request_stuck_calls(context: DiagnosisContext) -> None:
    """Requests the counterparts of calls that do not complete although all others have made theirs."""
    graph = context.graph
    stuck_ranks = graph.stuck_streams.keys() | graph.released_ranks
    if len(stuck_ranks) > MAX_URGENT_SUSPECTS:
        return
    stuck_groups = {}
    for rank in sorted(stuck_ranks):
        for stream in context.processes[rank].unfinished_streams:
            if context.now - stream.entered_at < MIN_WAIT_S:
                continue
            state = stream.group_state
            if state is not None:
                if graph.stuck_streams.get(rank) is stream and not state.diverged:
                    stuck_groups[id(state)] = stream.group, stream.entered
            elif stream.other_end is not None and stream.peer is not None:
                seq = stream.first_unfinished
                if seq in stream.calls and stream.is_counted(seq):
                    _request_arguments(context, stream.peer, stream.other_end, seq)
    for group, seq in stuck_groups.values():
        check_agreement(context, group, seq)


def sample_busy_ranks(context: DiagnosisContext) -> None:
    """Requests a stack of some of the busy ranks that may have waited for longer than the suspicion delay,
    or may wait for a rank that has left or is frozen. A host may spin while it waits for its device.

    A rank whose stack shows that it waits is part of the next wait-for graph.
    """
    graph = context.graph
    unable = graph.resolver.unable_to_call
    overdue = {}
    for rank in graph.unsampled_waits.keys() - context.explained_ranks:
        waits = graph.unsampled_waits[rank]
        began_at = min([blocked.began_at for blocked in waits])
        delay_s = MIN_WAIT_S
        if all(unable.isdisjoint(blocked.awaited) for blocked in waits):
            delay_s = context.limits.suspicion_delay_s
        if context.get_state_known_until(rank) - began_at >= delay_s:
            overdue[rank] = began_at
    if overdue:
        context.request_stacks((), overdue, min(overdue.values()))
