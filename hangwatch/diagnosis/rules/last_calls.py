"""Requests the calls that show whether ranks that wait for each other made the same ones. Makes no verdict:
if the calls differ, the next diagnosis finds the mismatch.

Node agents report the running hashes of some calls only, and the arguments of those that block. Ranks that
are ahead of a blocked or an awaited one, as the root of a broadcast, the sender of a message, or a host
that runs ahead of its device, may not have reported the call at which it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from hangwatch.diagnosis.context import DiagnosisContext, EvidenceRequest
from hangwatch.diagnosis.graph.graph import BlockedCall
from hangwatch.model.calls import StreamKind
from hangwatch.tracking.call_stream import (
    MAX_URGENT_SUSPECTS,
    CallStream,
    CallWindow,
    GroupState,
)

from .agreement import check_agreement

# Most waits for a rank are shorter, in a healthy job.
_MIN_WAIT_S = 1.0


def request_last_calls(context: DiagnosisContext) -> None:
    awaited_ranks = context.graph.find_chain_ends()
    if len(awaited_ranks) <= MAX_URGENT_SUSPECTS:
        for rank in sorted(awaited_ranks):
            for blocked, last_seq in _iter_unknown_calls(context, rank):
                _request_call(context, blocked.rank, blocked.stream, last_seq)
    _request_stuck_calls(context)
    _request_split_sizes(context)


def _request_call(context: DiagnosisContext, rank: int, stream: CallStream, seq: int) -> None:
    window = CallWindow(seq, seq)
    if not stream.has_answered(window):
        context.requests.append(EvidenceRequest.for_calls(rank, stream, window))


def _iter_unknown_calls(context: DiagnosisContext, rank: int) -> Iterator[tuple[BlockedCall, int]]:
    """The waits for ``rank`` of ranks whose call at the position of its last one is unknown, with that
    position.
    """
    for blocked in context.graph.iter_waits_for(rank):
        if blocked.stream.kind is not StreamKind.COLLECTIVE:
            continue
        if context.now - blocked.began_at < _MIN_WAIT_S or _has_diverged(blocked.stream):
            continue
        own = context.streams_by_group.get(blocked.stream.group.key, {}).get(rank)
        if own is not None and _is_unknown(blocked.stream, own):
            yield blocked, own.entered


def _has_diverged(stream: CallStream) -> bool:
    """Whether its group has; then the search for the first difference requests what is needed."""
    return stream.group_state is not None and stream.group_state.diverged


def _is_unknown(stream: CallStream, awaited: CallStream) -> bool:
    seq = awaited.entered
    if not (awaited.is_counted(seq) and stream.is_counted(seq)):
        return False
    return 0 < seq < stream.entered and seq not in stream.hashes_by_seq


def _request_stuck_calls(context: DiagnosisContext) -> None:
    """Requests the counterparts of calls that do not complete although all others have made theirs."""
    graph = context.graph
    stuck_ranks = graph.stuck_streams.keys() | graph.released_ranks
    if len(stuck_ranks) > MAX_URGENT_SUSPECTS:
        return
    stuck_groups: dict[int, tuple[GroupState, int]] = {}
    for rank in sorted(stuck_ranks):
        for stream in context.attempt.processes[rank].open_calls.unfinished_streams:
            if context.now - stream.entered_at < _MIN_WAIT_S:
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
            if stream.blocks_thread and context.now - stream.entered_at >= _MIN_WAIT_S
        }
        for seq in sorted(blocked_seqs):
            for rank, stream in members.items():
                is_known = seq in stream.calls or not stream.is_counted(seq)
                if stream.entered >= seq and not is_known:
                    _request_call(context, rank, stream, seq)
