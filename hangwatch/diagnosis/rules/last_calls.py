"""Requests the calls that show whether a rank that others wait for made the same last call as they.

Node agents report the running hashes of some calls only. Ranks that are ahead of the awaited one, as
the root of a broadcast or a host that runs ahead of its device, may not have reported that of the call
at which it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from hangwatch.diagnosis.context import DiagnosisContext, EvidenceRequest
from hangwatch.diagnosis.graph.graph import BlockedCall
from hangwatch.model.calls import StreamKind
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS, CallStream, CallWindow

# Most waits for a rank are shorter, in a healthy job.
_MIN_WAIT_S = 1.0


def request_last_calls(context: DiagnosisContext) -> None:
    """Requests one waiting rank's calls for each awaited rank. Makes no verdict: if the calls differ,
    the next diagnosis finds the mismatch.
    """
    awaited_ranks = context.graph.find_chain_ends()
    if len(awaited_ranks) > MAX_URGENT_SUSPECTS:
        return
    for rank in sorted(awaited_ranks):
        for blocked, last_seq in _iter_unknown_calls(context, rank):
            stream = blocked.stream
            window = CallWindow(last_seq, last_seq)
            context.requests.append(EvidenceRequest.for_calls(blocked.rank, stream, window))


def _iter_unknown_calls(context: DiagnosisContext, rank: int) -> Iterator[tuple[BlockedCall, int]]:
    """The waits for ``rank`` of ranks whose call at the position of its last one is unknown, with that
    position.
    """
    for blocked in context.graph.iter_waits_for(rank):
        if blocked.stream.kind is not StreamKind.COLLECTIVE:
            continue
        state = blocked.stream.group_state
        if context.now - blocked.began_at < _MIN_WAIT_S or (state is not None and state.diverged):
            continue
        own = context.streams_by_group.get(blocked.stream.group.key, {}).get(rank)
        if own is not None and _is_unknown(blocked.stream, own):
            yield blocked, own.entered


def _is_unknown(stream: CallStream, awaited: CallStream) -> bool:
    seq = awaited.entered
    if not (awaited.is_counted(seq) and stream.is_counted(seq)):
        return False
    if not seq or stream.entered <= seq:
        return False
    return seq not in stream.hashes_by_seq and not stream.has_answered(CallWindow(seq, seq))
